"""mlxserve: convert, serve and fine-tune large models with MLX, on a Mac and on Linux."""

__version__ = "0.1.0"
