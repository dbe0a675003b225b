"""Every quantized GGUF type: equal to the ``gguf`` package's dequantization, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf.constants import GGML_QUANT_SIZES

from mlxserve_convert.gguf_blocks import SUPPORTED_TYPES, gguf_weight
from mlxserve_convert.gguf_file import GGUFFile
from mlxserve_convert.weights import Weight

ROWS, COLUMNS = 12, 512
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where a block has its float16 scales; elsewhere at its start."""
LAYOUTS = {
    "Q4_0": ("affine", 4, 32),
    "Q4_1": ("affine", 4, 32),
    "Q5_0": ("affine", 5, 32),
    "Q5_1": ("affine", 5, 32),
    "Q8_0": ("affine", 8, 32),
    "Q3_K": ("affine", 8, 128),
    "Q4_K": ("affine", 4, 32),
    "Q5_K": ("affine", 5, 32),
    "IQ4_NL": ("affine", 8, 32),
    "IQ4_XS": ("affine", 8, 32),
    "TQ1_0": ("affine", 2, 128),
    "TQ2_0": ("affine", 2, 128),
    "MXFP4": ("mxfp4", 4, 32),
    "NVFP4": ("nvfp4", 4, 16),
}
QUANTIZED = [name for name in SUPPORTED_TYPES if name not in ("F32", "F16", "BF16", "F64")]


def random_blocks(kind: Kind, seed: int = 0) -> np.ndarray:
    """Rows of random blocks, each bit of which counts, with finite scales."""
    rng = np.random.default_rng(seed)
    block, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ROWS * COLUMNS // block, num_bytes), dtype=np.uint8)
    scales = (rng.standard_normal((len(blocks), 2)) * 0.01).astype(np.float16)
    if kind == Kind.MXFP4:
        blocks[:, 0] = rng.integers(0, 251, len(blocks))
    elif kind == Kind.NVFP4:
        blocks[:, :4] &= 0x7F
    elif kind == Kind.IQ1_M:
        # The scale is in the top nibbles of four words: an exponent of all ones is not finite.
        blocks[:, 55] &= 0x3F
    elif kind == Kind.Q8_K:
        blocks[:, :4] = scales[:, :1].astype(np.float32).view(np.uint8)
    else:
        for index, at in enumerate(HALVES.get(kind.name, (0,))):
            blocks[:, at : at + 2] = scales[:, index : index + 1].view(np.uint8)
    return blocks.reshape(ROWS, -1)


def expected_values(raw: np.ndarray, kind: Kind) -> np.ndarray:
    if kind != Kind.Q8_K:
        return gguf.quants.dequantize(raw, kind)
    # 256 int8 after a float32; what follows are sums of them. The package has no code for it.
    blocks = raw.reshape(-1, 292)
    codes = np.ascontiguousarray(blocks[:, 4:260]).view(np.int8).astype(np.float32)
    return (np.ascontiguousarray(blocks[:, :4]).view(np.float32) * codes).reshape(ROWS, COLUMNS)


MakeWeight = Callable[[np.ndarray, Kind], Weight]


@pytest.fixture
def weight_of(tmp_path: Path) -> Iterator[MakeWeight]:
    files: list[GGUFFile] = []

    def make(raw: np.ndarray, kind: Kind) -> Weight:
        writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
        writer.add_tensor("x", raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        files.append(GGUFFile(tmp_path / "one.gguf"))
        return gguf_weight(files[-1], files[-1].tensors["x"])

    yield make
    for file in files:
        file.close()


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_are_those_of_the_format(weight_of: MakeWeight, name: str) -> None:
    kind = Kind[name]
    raw = random_blocks(kind)
    weight = weight_of(raw, kind)
    expected = expected_values(raw, kind)
    assert np.isfinite(expected).all()
    assert weight.is_quantized
    assert weight.shape == (ROWS, COLUMNS)
    assert np.abs(np.array(weight.read(0, ROWS)) - expected).max() == 0.0
    assert np.abs(np.array(weight.read(3, 8)) - expected[3:8]).max() == 0.0


@pytest.mark.parametrize("name", QUANTIZED)
def test_layouts_hold_the_same_values(weight_of: MakeWeight, name: str) -> None:
    kind = Kind[name]
    raw = random_blocks(kind, seed=1)
    weight = weight_of(raw, kind)
    if name not in LAYOUTS:
        assert weight.layout is None
        return
    assert weight.layout is not None
    mode, bits, group_size = LAYOUTS[name]
    assert (weight.layout.mode, weight.layout.bits, weight.layout.group_size) == LAYOUTS[name]
    packed = weight.read_packed(2, 9)
    assert packed.words.dtype == mx.uint32
    assert packed.words.shape == (7, COLUMNS * bits // 32)
    assert packed.scales.shape == (7, COLUMNS // group_size)
    assert packed.scales.dtype == weight.layout.scale_dtype
    values = mx.dequantize(
        packed.words,
        packed.scales,
        packed.biases,
        group_size=group_size,
        bits=bits,
        mode=mode,
        dtype=mx.float32,
    )
    assert np.abs(np.array(values) - expected_values(raw, kind)[2:9]).max() == 0.0


def test_mxfp4_words_and_scales_are_the_files(weight_of: MakeWeight) -> None:
    raw = random_blocks(Kind.MXFP4)
    packed = weight_of(raw, Kind.MXFP4).read_packed(0, ROWS)
    blocks = raw.reshape(ROWS, -1, 17)
    assert np.array_equal(np.array(packed.scales), blocks[..., 0])
    low, high = blocks[..., 1:] & 15, blocks[..., 1:] >> 4
    codes = np.concatenate([low, high], axis=-1).reshape(ROWS, COLUMNS // 8, 8).astype(np.uint32)
    words = sum(codes[..., place] << np.uint32(4 * place) for place in range(8))
    assert np.array_equal(np.array(packed.words), words)


def test_floats_of_64_bits_become_32(weight_of: MakeWeight) -> None:
    values = np.random.default_rng(0).standard_normal((ROWS, COLUMNS))
    weight = weight_of(values, Kind.F64)
    assert np.array_equal(np.array(weight.read(0, ROWS)), values.astype(np.float32))
