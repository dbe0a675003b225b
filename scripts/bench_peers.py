#!/usr/bin/env python3
"""One run that measures this machine's read bandwidth, mlxserve, llama.cpp and, on demand, stock mlx-lm.

The sides take turns on warm models: one runs, the others are blocked on their stdin. All get the same
prompts, the same number of new tokens and of threads, and greedy sampling; mlxserve runs the exact import of
the GGUF file that llama.cpp loads. Every figure is a median, and every ratio one of medians of this run.

    python -m venv ~/llama && ~/llama/bin/pip install llama-cpp-python      (compiles for some minutes, once)
    scripts/bench_peers.py smollm2 --peer-python ~/llama/bin/python --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

from bench_protocol import Peer, PeerError  # noqa: E402

VENV_PYTHON = SCRIPTS.parent / ".venv" / "bin" / "python"
PEER_PYTHON_VARIABLE = "MLXSERVE_PEER_PYTHON"
HOW_TO = "python -m venv DIR && DIR/bin/pip install llama-cpp-python, then --peer-python DIR/bin/python"
DEFAULT_CASES = ("128/64/1", "1024/64/1", "512/64/1", "512/64/4", "512/64/16")
DEFAULT_STOCK_CASE = "128/16/1"
OURS, LLAMA, STOCK = "mlxserve", "llama.cpp", "mlx-lm"
SEED = 7
REST_S = 0.2
"""Between two runs, so that the threads of the one before have gone to sleep."""


@dataclass(frozen=True)
class Case:
    prompt_tokens: int
    new_tokens: int
    streams: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """``512/64/4``: prompt tokens, new tokens and streams."""
        try:
            prompt, new, streams = (int(part) for part in text.split("/"))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"wants PROMPT/NEW/STREAMS such as 512/64/4, got {text!r}"
            ) from None
        if prompt < 1 or new < 2 or streams < 1:
            raise argparse.ArgumentTypeError(
                f"wants at least 1 prompt token, 2 new ones and 1 stream, got {text!r}"
            )
        return cls(prompt, new, streams)

    def __str__(self) -> str:
        return f"{self.prompt_tokens}/{self.new_tokens}/{self.streams}"

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ids, the same for every side and run. The lowest ids are special tokens as a rule."""
        rng = random.Random(SEED)
        first = min(3, vocab_size - 1)
        return [
            [rng.randrange(first, vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.streams)
        ]


@dataclass(frozen=True)
class Variant:
    """mlxserve with other settings, as environment variables."""

    name: str
    environment: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """``int8:MLXSERVE_CPU_MATMUL=int8``, several variables with commas between them."""
        name, _, settings = text.partition(":")
        pairs = [pair.partition("=") for pair in settings.split(",")]
        if not name or not all(key and mark for key, mark, _ in pairs):
            raise argparse.ArgumentTypeError(f"wants NAME:VARIABLE=VALUE, got {text!r}")
        return cls(name, {key: value for key, _, value in pairs})


Figures = dict[tuple[Case, str], list[dict[str, Any]]]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2", help="a .gguf file or smollm2 (default)")
    parser.add_argument(
        "--peer-python",
        default=os.environ.get(PEER_PYTHON_VARIABLE),
        metavar="PATH",
        help=f"the Python that has llama-cpp-python (default: ${PEER_PYTHON_VARIABLE})",
    )
    parser.add_argument(
        "--peer-script", type=Path, default=SCRIPTS / "peer_llama_cpp.py", help=argparse.SUPPRESS
    )
    parser.add_argument(
        "--case", type=Case.parse, action="append", metavar="PROMPT/NEW/STREAMS", dest="cases"
    )
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of each (default: 5)")
    parser.add_argument("--threads", type=int, metavar="N", help="of both sides (default: the usable CPUs)")
    parser.add_argument(
        "--variant",
        type=Variant.parse,
        action="append",
        default=[],
        metavar="NAME:VARIABLE=VALUE",
        help="mlxserve once more with these settings, in turn with the rest",
    )
    parser.add_argument(
        "--stock",
        type=Case.parse,
        nargs="?",
        const=Case.parse(DEFAULT_STOCK_CASE),
        metavar="PROMPT/NEW/1",
        help=f"measure stock mlx-lm as well, in float32 (slow; default case: {DEFAULT_STOCK_CASE})",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    options = parser.parse_args(arguments)
    if options.cases is None:
        options.cases = [Case.parse(text) for text in DEFAULT_CASES]
    if options.repeat < 1:
        parser.error(f"--repeat must be at least 1, got {options.repeat}")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    if options.stock is not None and options.stock.streams != 1:
        parser.error("--stock runs one stream")
    if options.peer_python is None:
        parser.error(f"--peer-python is missing. To make one: {HOW_TO}")
    return options


def gguf_path(model: str) -> Path:
    """The file that both sides load."""
    from rich.console import Console

    from mlxserve.cli.model_source import fetch
    from mlxserve.errors import MlxserveError
    from mlxserve.hub import resolve

    try:
        source = resolve(model)
        if source.kind not in ("builtin", "gguf"):
            raise PeerError(f"{model} is no GGUF file, which llama.cpp needs")
        return fetch(source, console=Console(stderr=True))
    except MlxserveError as error:
        raise PeerError(str(error)) from None


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def our_python() -> str:
    """This one, where it has mlxserve, else that of ``.venv``, which may hold an older build."""
    if find_spec("mlxserve") is None and VENV_PYTHON.is_file():
        return str(VENV_PYTHON)
    return sys.executable


class Bench:
    """All sides, started and loaded."""

    def __init__(self, options: argparse.Namespace, gguf: Path, stack: ExitStack) -> None:
        self.options = options
        self.threads = options.threads or usable_cpus()
        self.gguf = gguf
        self._stack = stack
        self.loaded: dict[str, dict[str, Any]] = {}
        ours = [our_python(), str(SCRIPTS / "peer_mlxserve.py")]
        threads = {"MLXSERVE_THREADS": str(self.threads)}
        self.ours = self._start(OURS, ours, str(gguf), threads)
        self.variants = [
            self._start(f"{OURS} {variant.name}", ours, str(gguf), threads | variant.environment)
            for variant in options.variant
        ]
        self.llama = self._start(LLAMA, [options.peer_python, str(options.peer_script)], str(gguf))
        self.stock: Peer | None = None
        if options.stock is not None:
            stock = [ours[0], str(SCRIPTS / "peer_mlx_lm.py")]
            self.stock = self._start(STOCK, stock, self.loaded[OURS]["folder"])

    def _start(
        self, name: str, command: list[str], model: str, environment: dict[str, str] | None = None
    ) -> Peer:
        say(f"Loading {name}")
        peer = self._stack.enter_context(Peer(name, command, environment=environment))
        try:
            self.loaded[name] = peer.ask("load", model=model, threads=self.threads)
        except PeerError as error:
            how = f" (to make its environment: {HOW_TO})" if name == LLAMA else ""
            raise PeerError(f"{error}{how}") from None
        return peer

    def plan(self) -> Iterator[tuple[Case, Peer]]:
        """One round: who runs what, in order."""
        for case in self.options.cases:
            for peer in (self.ours, self.llama, *self.variants):
                yield case, peer
        if self.stock is not None:
            if self.options.stock not in self.options.cases:
                yield self.options.stock, self.ours
            yield self.options.stock, self.stock

    def measure(self) -> tuple[Figures, list[dict[str, float]]]:
        """A warm-up of each side, then the rounds."""
        vocab_size = self.loaded[OURS]["vocab_size"]
        prompts = {case: case.prompts(vocab_size) for case, _ in self.plan()}
        warm_up = Case(16, 4, 1).prompts(vocab_size)
        for peer in {id(peer): peer for _, peer in self.plan()}.values():
            peer.ask("run", prompts=warm_up, new_tokens=4)
        figures: Figures = {}
        rates = []
        for number in range(self.options.repeat):
            say(f"Round {number + 1} of {self.options.repeat}")
            rates.append(self.ours.ask("read_rates"))
            for case, peer in self.plan():
                time.sleep(REST_S)
                run = peer.ask("run", prompts=prompts[case], new_tokens=case.new_tokens)
                figures.setdefault((case, peer.name), []).append(run)
        return figures, rates


def report(bench: Bench, figures: Figures, rates: list[dict[str, float]]) -> dict[str, Any]:
    """The JSON: medians, their runs, and ratios of mlxserve's over each other side's."""
    read = statistics.median(rate["best"] for rate in rates)
    medians = {
        key: {
            name: statistics.median(run[name] for run in runs) for name in ("prefill_tok_s", "decode_tok_s")
        }
        for key, runs in figures.items()
    }
    ours = bench.loaded[OURS]
    cases = []
    for case in dict.fromkeys(case for case, _ in figures):
        num_bytes = ours["decode_weight_bytes"] // case.streams
        num_bytes += (case.prompt_tokens + case.new_tokens // 2) * ours["kv_token_bytes"]
        sides: dict[str, Any] = {}
        for name in (name for other, name in figures if other == case):
            runs = figures[case, name]
            sides[name] = {key: round(value, 2) for key, value in medians[case, name].items()}
            for key in ("prefill_tok_s", "decode_tok_s"):
                sides[name][f"{key}_runs"] = [round(run[key], 2) for run in runs]
            if name.startswith(OURS):
                rate = medians[case, name]["decode_tok_s"]
                sides[name]["bandwidth_fraction"] = round(rate * num_bytes / read, 3)
        ratios = {
            mine: {
                other: {
                    part: round(
                        medians[case, mine][f"{part}_tok_s"] / medians[case, other][f"{part}_tok_s"], 2
                    )
                    for part in ("prefill", "decode")
                }
                for other in sides
                if not other.startswith(OURS)
            }
            for mine in sides
            if mine.startswith(OURS)
        }
        cases.append({"case": str(case), "bytes_per_token": num_bytes, "sides": sides, "ratios": ratios})
    return {
        "model": bench.gguf.name,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "threads": bench.threads,
        "repeat": bench.options.repeat,
        "read_gbps": round(read / 1e9, 2),
        "read_gbps_runs": [round(rate["best"] / 1e9, 2) for rate in rates],
        "read_gbps_small_pages": round(statistics.median(rate["small_pages"] for rate in rates) / 1e9, 2),
        "weight_bytes": ours["weight_bytes"],
        "versions": {name: loaded["version"] for name, loaded in bench.loaded.items()},
        "environment": {
            key: value
            for key, value in os.environ.items()
            if key.startswith("MLXSERVE_") and key != PEER_PYTHON_VARIABLE
        },
        "variants": {variant.name: variant.environment for variant in bench.options.variant},
        "cases": cases,
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of a report, one row a case and side."""
    lines = [
        f"{result['model']}: {result['threads']} threads, medians of {result['repeat']} runs in turn, "
        f"{result['read_gbps']} GB/s read",
        "",
        "| prompt/new/streams | side | prefill tok/s | decode tok/s | of bandwidth "
        "| mlxserve over it, prefill | decode |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in result["cases"]:
        for name, side in case["sides"].items():
            fraction = side.get("bandwidth_fraction")
            ratios = [
                (label.removeprefix(OURS).strip(), against[name])
                for label, against in case["ratios"].items()
                if name in against
            ]
            cells = [
                case["case"],
                name,
                f"{side['prefill_tok_s']:.1f}",
                f"{side['decode_tok_s']:.1f}",
                "" if fraction is None else f"{fraction:.0%}",
                *(
                    ", ".join(f"{ratio[part]} {label}".strip() for label, ratio in ratios)
                    for part in ("prefill", "decode")
                ),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        with ExitStack() as stack:
            bench = Bench(options, gguf_path(options.model), stack)
            result = report(bench, *bench.measure())
    except PeerError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
