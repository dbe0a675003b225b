"""PyTorch files: read where they lie, and never run."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.utils import load_model

from mlxserve.errors import ConversionError
from mlxserve_convert import ConvertOptions, convert
from mlxserve_convert.mapped_file import MappedFile
from mlxserve_convert.torch_file import read_torch_file
from tests.convert import quantized, torch_files
from tests.convert.checkpoints import (
    LLAMA,
    logits,
    random_weights,
    reference_model,
    write_folder,
    write_tokenizer,
)
from tests.convert.torch_files import Storage, Tensor, plain, save, save_legacy

TOKENS = [3, 60, 17, 42, 5, 11, 9]
RNG = np.random.default_rng(0)


def read(path: Path) -> dict[str, np.ndarray]:
    file = MappedFile(path)
    values = {name: weight.value() for name, weight in read_torch_file(file).items()}
    # numpy has no bfloat16.
    return {
        name: np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
        for name, array in values.items()
    }


def refusal(path: Path) -> str:
    with pytest.raises(ConversionError) as error:
        read_torch_file(MappedFile(path))
    message = str(error.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 600
    return message


def state_of(weights: dict[str, np.ndarray], dtype: type = np.float32) -> dict[str, Any]:
    """As a model's state_dict is: ordered, with a versions attribute."""
    state: OrderedDict[str, Any] = OrderedDict()
    for index, (name, values) in enumerate(weights.items()):
        state[name] = plain(str(index), values.astype(dtype), is_parameter=index % 2 == 0)
    state._metadata = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
    return state


def folder_of(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize("writer", [save, save_legacy])
def test_a_folder_of_one_file(tmp_path: Path, writer: Any) -> None:
    weights = random_weights(LLAMA)
    folder = folder_of(tmp_path / "source", LLAMA)
    writer(folder / "pytorch_model.bin", state_of(weights))
    report = convert(folder, tmp_path / "out", ConvertOptions(bits=8))
    assert report.source_format == "pytorch"
    other = write_folder(tmp_path / "other", LLAMA, weights)
    convert(other, tmp_path / "expected", ConvertOptions(bits=8))
    files = [tmp_path / name / "model.safetensors" for name in ("out", "expected")]
    assert files[0].read_bytes() == files[1].read_bytes()
    model, _ = load_model(tmp_path / "out")
    assert np.allclose(logits(model, TOKENS), logits(reference_model(LLAMA, weights), TOKENS), atol=0.5)


def test_shards_with_an_index(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    folder = folder_of(tmp_path / "source", LLAMA)
    names = list(weights)
    weight_map = {}
    for shard in range(2):
        file = f"pytorch_model-{shard + 1:05d}-of-00002.bin"
        part = {name: weights[name] for name in names[shard::2]}
        weight_map |= dict.fromkeys(part, file)
        save(folder / file, state_of(part, np.float16), protocol=4)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    convert(folder, tmp_path / "out", ConvertOptions(dtype="float16", bits=8))
    assert not (tmp_path / "out" / "pytorch_model.bin.index.json").exists()
    load_model(tmp_path / "out")
    index.write_text(json.dumps({"weight_map": weight_map | {"model.extra": file}}))
    with pytest.raises(ConversionError, match=r"names 1 tensors that no file has, first 'model\.extra'"):
        convert(folder, tmp_path / "no", ConvertOptions())
    index.write_text(json.dumps({"weight_map": weight_map | {"x": "../pytorch_model.bin"}}))
    with pytest.raises(ConversionError, match="is not the name of a file beside it"):
        convert(folder, tmp_path / "no", ConvertOptions())
    index.write_text(json.dumps({"weight_map": weight_map}))
    (folder / file).unlink()
    with pytest.raises(ConversionError, match=f"1 of 2 files that the index names are missing, first {file}"):
        convert(folder, tmp_path / "no", ConvertOptions())


def test_tensors_that_are_there_twice(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "source", LLAMA)
    for shard in (1, 2):
        save(folder / f"pytorch_model-{shard:05d}-of-00002.bin", {"x": plain("0", np.ones(3, np.float32))})
    with pytest.raises(ConversionError, match="tensor 'x' is also in another file"):
        convert(folder, tmp_path / "no", ConvertOptions())


def test_safetensors_come_first(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "source", LLAMA, random_weights(LLAMA))
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert convert(folder, tmp_path / "out", ConvertOptions()).source_format == "safetensors"


def test_a_quantized_checkpoint_in_a_torch_file(tmp_path: Path) -> None:
    config = {**LLAMA, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 1}
    state: dict[str, Any] = {}
    exact: dict[str, np.ndarray] = {}
    quantizer = quantized.gptq(4, 64, is_symmetric=False)
    for name, values in random_weights(config).items():
        if ".layers." in name and values.ndim > 1:
            parts, exact[name] = quantizer(values)
            for kind, (_, part) in parts.items():
                state[f"{name.removesuffix('.weight')}.{kind}"] = plain(str(len(state)), part)
        else:
            exact[name] = values.astype(np.float16).astype(np.float32)
            state[name] = plain(str(len(state)), values.astype(np.float16))
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}
    folder = folder_of(tmp_path / "source", config | {"quantization_config": settings})
    save(folder / "pytorch_model.bin", state)
    report = convert(folder, tmp_path / "out", ConvertOptions())
    assert not report.inexact_tensors
    model, _ = load_model(tmp_path / "out")
    model.set_dtype(mx.float32)
    expected = logits(reference_model(config, exact), TOKENS)
    assert np.allclose(logits(model, TOKENS), expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("writer", [save, save_legacy])
def test_types_views_and_shared_storages(tmp_path: Path, writer: Any) -> None:
    numbers = RNG.standard_normal(60).astype(np.float32)
    wide = np.array([1.5, -2.25, 70000.0], np.float32)
    shared = Storage("7", numbers)
    state = {
        "whole": Tensor(shared, (60,), (1,)),
        "matrix": Tensor(shared, (4, 5), (5, 1), offset=3),
        "transposed": Tensor(shared, (5, 4), (1, 5), offset=3),
        "columns": Tensor(shared, (6, 3), (10, 1), offset=2),
        "third axis": Tensor(shared, (2, 3, 4), (30, 1, 7), offset=1),
        "every third": Tensor(shared, (10,), (3,), offset=4),
        "one": Tensor(shared, (), (), offset=59),
        "ones": Tensor(shared, (1, 3), (0, 1)),
        "half": plain("1", RNG.standard_normal((3, 4)).astype(np.float16)),
        "bfloat": plain("2", (wide.view(np.uint32) >> 16).astype(np.uint16)),
        "double": plain("3", np.array([0.1, 1e-30], np.float64)),
        "long": plain("4", np.array([-(1 << 40), 5], np.int64)),
        "int": plain("5", np.array([[1, -2]], np.int32)),
        "byte": plain("6", np.array([0, 255], np.uint8)),
        "bool": plain("8", np.array([True, False, True])),
    }
    writer(tmp_path / "x.bin", state)
    found = read(tmp_path / "x.bin")
    assert found.keys() == state.keys()
    for name in ("whole", "matrix", "transposed", "columns", "third axis", "every third", "one", "ones"):
        tensor = state[name]
        steps = [step * 4 for step in tensor.strides]
        expected = np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, steps)
        assert np.array_equal(found[name], expected), name
    for name in ("half", "long", "int", "byte", "bool"):
        tensor = state[name]
        assert np.array_equal(found[name], tensor.storage.numbers.reshape(tensor.shape)), name
        assert found[name].dtype == tensor.storage.numbers.dtype
    assert np.array_equal(found["double"], np.array([0.1, 1e-30], np.float32))
    file = MappedFile(tmp_path / "x.bin")
    assert read_torch_file(file)["bfloat"].dtype == mx.bfloat16
    assert np.array_equal(found["bfloat"], [1.5, -2.25, 69632.0])
    rows = read_torch_file(file)["third axis"].read(2, 5)
    assert np.array_equal(np.array(rows), found["third axis"].reshape(6, 4)[2:5])


def test_a_float8_tensor_of_an_untyped_storage(tmp_path: Path) -> None:
    storage = Storage("0", np.arange(12, dtype=np.uint8), kind="UntypedStorage")
    save(tmp_path / "x.bin", {"x": Tensor(storage, (3, 4), (4, 1), dtype="float8_e4m3fn")})
    weight = read_torch_file(MappedFile(tmp_path / "x.bin"))["x"]
    assert weight.source_types == {"f8_e4m3"}
    assert weight.shape == (3, 4)


class Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def hostile_values(mark: Path) -> dict[str, Any]:
    code = f"open({str(mark)!r}, 'w')"
    return {
        "posix.system": Evil(os.system, f"touch {mark}"),
        "builtins.eval": Evil(builtins.eval, code),
        "builtins.exec": Evil(exec, code),
        "builtins.getattr": Evil(getattr, Evil(__import__, "os"), "system"),
        "builtins.__import__": Evil(__import__, "os"),
        "pickle.loads": Evil(pickle.loads, pickle.dumps(Evil(os.system, f"touch {mark}"))),
    }


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("is_legacy", [False, True])
def test_code_is_refused_by_name_and_never_run(tmp_path: Path, protocol: int, is_legacy: bool) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "x.bin"
    for name, value in hostile_values(mark).items():
        for state in ({"x": value}, value, {"x": {"y": [value]}}, OrderedDict(x=value)):
            if is_legacy:
                save_legacy(path, {"x": state})
            else:
                torch_files.write_archive(path, torch_files.pickled(state, protocol=protocol), {})
            message = refusal(path)
            # Protocol 2 names the module as Python 2 did.
            assert name in message.replace("__builtin__", "builtins")
            assert "it is not run" in message
    assert not mark.exists()


def test_names_of_torch_that_are_not_needed_are_refused(tmp_path: Path) -> None:
    storage = Storage("0", np.zeros(4, np.float32), kind="ComplexFloatStorage")
    save(tmp_path / "x.bin", {"x": Tensor(storage, (4,), (1,))})
    assert "names torch.ComplexFloatStorage" in refusal(tmp_path / "x.bin")
    save(
        tmp_path / "y.bin",
        {"x": Tensor(Storage("0", np.zeros(4, np.float32)), (4,), (1,), function="_rebuild_qtensor")},
    )
    assert "names torch._utils._rebuild_qtensor" in refusal(tmp_path / "y.bin")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (((1 << 40,), (1,), 0), "reaches over its storage of 4"),
        (((1 << 40, 1 << 40), (0, 0), 0), "reaches over its storage of 4"),
        (((2, 2), (2, 1), 1), "reaches over its storage of 4"),
        (((5,), (1,), 0), "reaches over its storage of 4"),
        (((4,), (-1,), 3), "not described as torch does it"),
        (((4,), (1,), -1), "not described as torch does it"),
        (((4,), (1, 1), 0), "not described as torch does it"),
        ((("4",), (1,), 0), "not described as torch does it"),
        (((True,), (1,), 0), "not described as torch does it"),
        (((1 << 70,), (1,), 0), "not described as torch does it"),
        (((1,) * 40, (1,) * 40, 0), "not described as torch does it"),
    ],
)
def test_tensors_beyond_their_storage(tmp_path: Path, tensor: Any, message: str) -> None:
    shape, strides, offset = tensor
    storage = Storage("0", np.arange(4, dtype=np.float32))
    save(tmp_path / "x.bin", {"x": Tensor(storage, shape, strides, offset)})
    assert message in refusal(tmp_path / "x.bin")


def test_states_that_are_no_tensors_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    for state, message in (
        ([1, 2], "holds no dictionary of tensors"),
        ({}, "holds no dictionary of tensors"),
        ({"epoch": 3}, "holds a int as 'epoch'"),
        ({"model": {"x": plain("0", np.ones(2, np.float32))}}, "holds a dict as 'model'"),
        ({1: 2}, "names that are no text"),
        ({(1, 2): 3}, "a tuple is used as a key"),
        ({"x": {1, 2}}, "no place in a file of tensors"),
    ):
        torch_files.write_archive(path, torch_files.pickled(state, protocol=4), {})
        assert message in refusal(path), state
    torch_files.write_archive(path, torch_files.pickled({"x": plain("0", np.ones(2, np.float32))}), {})
    assert "has no numbers for tensor 'x'" in refusal(path)


def test_pickles_that_grow_or_never_end(tmp_path: Path) -> None:
    """A short pickle whose tuples, each of two of the one before, would have 2 ** 60 leaves; keys that would
    take forever to hash; lengths beyond the file."""
    doubling = b"\x80\x02)" + b"q\x00h\x00\x86" * 60
    path = tmp_path / "x.bin"
    for description, message in (
        (doubling + b".", "holds no dictionary"),
        (doubling + b"q\x01}h\x01Ns.", "a tuple is used as a key"),
        (b"\x80\x02}X\x01\x00\x00\x00x" + doubling[2:] + b"s.", "holds a tuple as 'x'"),
        (b"\x80\x02X\xff\xff\xff\xffabc.", "before it is whole"),
        (b"\x80\x04\x8d" + b"\xff" * 8 + b"abc.", "before it is whole"),
        (b"\x80\x02" + b"(" * 100_000 + b".", "takes a value that is not there"),
        (b"\x80\x02)" + b"\x85" * 300_000 + b".", "holds no dictionary"),
        (b"\x80\x02]" + b"q\x00h\x00a" * 1000 + b".", "holds no dictionary"),
        (b"\x80\x02h\x05.", "refers to a value that is not there"),
        (b"\x80\x02ccollections\nOrderedDict\n](NNe\x85R.", "a call that torch does not make"),
        (b"\x80\x02c" + b"a" * 5000 + b"\nb\n.", "a name is longer than 1024 bytes"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "names os.system"),
        (b"\x80\x02}", "before it is whole"),
        (b"", "before it is whole"),
        (b"(I1\nI2\nt.", "no place in a file of tensors"),
        (b"\x80\x02ios\nsystem\n.", "no place in a file of tensors"),
        (b"\x80\x02\x82\x01.", "no place in a file of tensors"),
    ):
        torch_files.write_archive(path, description, {})
        assert message in refusal(path), description[:40]


def test_archives_that_are_not_as_torch_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    state = {"x": plain("0", np.ones(4000, np.float32))}
    description, storages = torch_files.pickled(state), torch_files.storages_of(state)
    torch_files.write_archive(path, description, storages, compression=zipfile.ZIP_DEFLATED)
    assert "compressed or encrypted" in refusal(path)
    torch_files.write_archive(path, description, storages, byteorder="big")
    assert "highest byte first" in refusal(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", description)
        archive.writestr("b/data.pkl", description)
    assert "has 2 descriptions" in refusal(path)
    torch_files.write_archive(path, description, {"0": Storage("0", np.ones(3999, np.float32))})
    assert "too few numbers for tensor 'x'" in refusal(path)
    torch_files.write_archive(path, description, storages)
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 60, len(whole) // 2, 40, 4):
        path.write_bytes(whole[:length])
        assert "zip archive" in refusal(path), length
    path.write_bytes(b"#!/bin/sh\n")
    assert "no file of torch.save" in refusal(path)
    path.write_bytes(b"")
    with pytest.raises(ConversionError, match="is empty"):
        MappedFile(path)


def test_a_truncated_file_of_the_older_format(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    save_legacy(path, {"x": plain("0", np.ones(400, np.float32))})
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) - 1700, 60, 20):
        path.write_bytes(whole[:length])
        refusal(path)
    path.write_bytes(whole.replace(b"little_endian", b"middle_endian"))
    assert "highest byte first" in refusal(path)


def test_an_archive_of_more_than_4_gb_keeps_its_numbers_in_extra_fields(tmp_path: Path) -> None:
    """Entries of 64 bits, as zipfile writes them when it is told to expect large files."""
    path = tmp_path / "x.bin"
    state = {"x": plain("0", np.arange(50, dtype=np.float32))}
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as entry:
            entry.write(torch_files.pickled(state))
        with archive.open("archive/data/0", "w", force_zip64=True) as entry:
            entry.write(np.arange(50, dtype=np.float32).tobytes())
    assert np.array_equal(read(path)["x"], np.arange(50))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_mutation_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzzed.bin"
    state = {"a.weight": plain("0", np.ones((2, 3), np.float32)), "b": plain("1", np.ones(4, np.float16))}
    (save if data.draw(st.booleans()) else save_legacy)(path, state)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))] if data.draw(st.booleans()) else raw)
    with contextlib.suppress(ConversionError):
        for weight in read_torch_file(MappedFile(path)).values():
            weight.value()


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_no_pickle_escapes_as_another_error(tmp_path_factory: pytest.TempPathFactory, body: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "pickle.bin"
    torch_files.write_archive(path, body, {})
    with pytest.raises(ConversionError):
        read_torch_file(MappedFile(path))
