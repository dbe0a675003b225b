"""Decoders of checkpoints that others quantized, one module a method."""
