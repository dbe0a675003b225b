"""Split GGUF files: any part opens all; a missing or foreign part is an error that names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from gguf import MODEL_ARCH
from gguf import GGMLQuantizationType as Kind

from mlxserve.errors import ConversionError
from mlxserve_convert import ConvertOptions, convert
from mlxserve_convert.gguf_parts import GGUFParts
from tests.convert.gguf_writer import FAMILIES, family_weights, write_family

LLAMA = next(family for family in FAMILIES if family.arch == MODEL_ARCH.LLAMA)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_family(folder / "tiny.gguf", LLAMA, family_weights(LLAMA), Kind.Q8_0, split_max_tensors=6)
    found = sorted(folder.iterdir())
    assert [path.name for path in found] == [f"tiny-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)]
    return found


@pytest.mark.parametrize("given", [0, 2])
def test_any_part_opens_all(tmp_path: Path, parts: list[Path], given: int) -> None:
    write_family(tmp_path / "whole.gguf", LLAMA, family_weights(LLAMA), Kind.Q8_0)
    convert(tmp_path / "whole.gguf", tmp_path / "whole", ConvertOptions())
    convert(parts[given], tmp_path / "split", ConvertOptions())
    whole = mx.load(str(tmp_path / "whole" / "model.safetensors"))
    split = mx.load(str(tmp_path / "split" / "model.safetensors"))
    assert whole.keys() == split.keys()
    assert all(mx.array_equal(split[name], whole[name]).item() for name in whole)


def test_missing_parts_are_named(parts: list[Path]) -> None:
    parts[1].unlink()
    parts[3].unlink()
    with pytest.raises(ConversionError, match=r"missing: tiny-00002-of-00004\.gguf, tiny-00004-of-00004\.gg"):
        GGUFParts(parts[0])


def test_a_renamed_part_is_refused(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ConversionError, match=r"one of 4 parts, but is not called NAME-00001-of-00004\.gguf"):
        GGUFParts(other)


def test_parts_in_each_others_places_are_refused(parts: list[Path]) -> None:
    shutil.copyfile(parts[1], parts[2])
    with pytest.raises(ConversionError, match="is part 1 of 4 by its metadata, expected part 2 of 4"):
        GGUFParts(parts[0])


def test_a_part_of_another_model_is_refused(tmp_path: Path, parts: list[Path]) -> None:
    smollm3 = next(family for family in FAMILIES if family.arch == MODEL_ARCH.SMOLLM3)
    folder = tmp_path / "other"
    folder.mkdir()
    write_family(folder / "tiny.gguf", smollm3, family_weights(smollm3), Kind.Q8_0, split_max_tensors=10)
    shutil.copyfile(folder / "tiny-00002-of-00004.gguf", parts[1])
    with pytest.raises(ConversionError, match=r"tiny-00002-of-00004\.gguf: belongs to another model"):
        GGUFParts(parts[0])


def test_parts_with_too_few_tensors_are_refused(tmp_path: Path, parts: list[Path]) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    fewer = family_weights(LLAMA)
    del fewer["lm_head.weight"]
    write_family(folder / "tiny.gguf", LLAMA, fewer, Kind.Q8_0, split_max_tensors=6)
    shutil.copyfile(folder / parts[3].name, parts[3])
    with pytest.raises(ConversionError, match=r"another model"):
        GGUFParts(parts[0])
