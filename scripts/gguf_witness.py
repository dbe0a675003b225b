#!/usr/bin/env python3
"""Greedy tokens of llama.cpp beside a float32 reference of the same GGUF file.

    scripts/gguf_witness.py FILE --python VENV/bin/python [--tokens 24] [--float] [--json]

VENV holds llama-cpp-python. It continues ten prompts greedily; the reference (tests/real/numpy_reference.py)
then reads prompt and continuation in one pass. llama.cpp rounds activations to 8 bits, so the two may differ
where the reference's two best logits are close: a difference counts where their gap is over 0.3. Exit code 1
if there is one. With --float llama.cpp gets a copy of the file whose weights are float32 (and keeps keys and
values in float32), so that it rounds nothing. llama.cpp is a witness here, not the judge.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GAP = 0.3
_CONTEXT = 2048
_CHILD = """
import json, sys
from llama_cpp import Llama
path, count, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
llama = Llama(path, n_ctx=%d, n_threads=2, verbose=False, seed=0, **json.loads(sys.argv[4]))
found = []
for prompt in prompts:
    tokens = llama.tokenize(prompt.encode(), special=False)
    llama.reset()
    new = []
    for token in llama.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
        new.append(token)
        if len(new) == count:
            break
    found.append([tokens, new])
print(json.dumps(found))
"""


def write_floats(path: Path, target: Path) -> None:
    """The same model with every tensor as float32."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, *rest = field.types
            writer.add_key_value(name, field.contents(), kind, rest[-1] if rest else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def greedy_by_llama(
    python: str, path: Path, prompts: tuple[str, ...], count: int, *, in_float: bool = False
) -> list[list[list[int]]]:
    """Tokens of each prompt, and those that follow it."""
    if in_float:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / path.name
            write_floats(path, copy)
            return _greedy(python, copy, prompts, count, {"type_k": 0, "type_v": 0})
    return _greedy(python, path, prompts, count, {})


def _greedy(
    python: str, path: Path, prompts: tuple[str, ...], count: int, settings: dict[str, int]
) -> list[list[list[int]]]:
    command = [python, "-c", _CHILD % _CONTEXT, str(path), str(count), json.dumps(prompts)]
    command.append(json.dumps(settings))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama.cpp failed: {done.stderr.strip().splitlines()[-1]}")
    found: list[list[list[int]]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(path: Path, found: list[list[list[int]]]) -> dict[str, Any]:
    from tests.real.numpy_reference import NumpyModel

    reference = NumpyModel(path)
    same, close, wrong = 0, [], []
    for index, (prompt, new) in enumerate(found):
        logits = reference.logits([*prompt, *new[:-1]], last=len(new))
        second, best = np.sort(logits, axis=1)[:, -2:].T
        for place, token in enumerate(new):
            gap = float(best[place] - second[place])
            if token == int(logits[place].argmax()):
                same += 1
            else:
                (wrong if gap > GAP else close).append(
                    {"prompt": index, "place": place, "gap": round(gap, 4), "llama_cpp": token}
                )
    return {
        "file": path.name,
        "prompt_tokens": [len(prompt) for prompt, _ in found],
        "tokens": sum(len(new) for _, new in found),
        "same": same,
        "differ_at_small_gaps": close,
        "differ_at_large_gaps": wrong,
    }


def _text(result: dict[str, Any]) -> str:
    lines = [f"{result['file']}: {result['same']} of {result['tokens']} greedy tokens are the reference's"]
    for what, bound in (("small", "up to"), ("large", "over")):
        entries = [f"  {entry}" for entry in result[f"differ_at_{what}_gaps"]]
        lines += [f"differ at gaps {bound} {GAP}:", *(entries or ["  none"])]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--python", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--float", action="store_true", help="llama.cpp computes in float32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from tests.real.test_gguf_parity import PROMPTS

    found = greedy_by_llama(options.python, options.file, PROMPTS, options.tokens, in_float=options.float)
    result = compare(options.file, found)
    sys.stdout.write(f"{json.dumps(result) if options.json else _text(result)}\n")
    if result["differ_at_large_gaps"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
