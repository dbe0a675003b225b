"""A model is loaded layer by layer: never much more than the weights is in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_fused import quantize
from tests.tiny_models import TinyModel, write_tiny_model

MIB = 1 << 20
SLACK = 12 * MIB
"""Of the probe, the interpreter and the allocators."""

LOAD = """
import json, sys, threading
from pathlib import Path
import mlx.core as mx
from mlx_lm.models import llama
import mlx_lm.utils
from mlxserve.models.loader import load_model
from mlxserve_kernels import ops

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

ops.num_threads()
before = peak = anonymous()
done = threading.Event()
def watch():
    global peak
    while not done.wait(0.0002):
        peak = max(peak, anonymous())
watcher = threading.Thread(target=watch)
watcher.start()
model = load_model(Path(sys.argv[1]))
done.set()
watcher.join()
blocks = [sum(a.nbytes for _, a in mlx_lm.utils.tree_flatten(b.parameters())) for b in model.module.layers]
print(json.dumps({"peak": peak - before, "weights": model.weight_bytes, "layer": max(blocks)}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("bits", [4, 8, None])
def test_peak_is_the_weights_and_one_layer(bits: int | None, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shape = TinyModel(
        hidden=768,
        intermediate=3072,
        heads=12,
        kv_heads=4,
        head_dim=64,
        vocab=256,
        layers=10,
        dtype="float16",
    )
    write_tiny_model(folder, shape)
    if bits is not None:
        quantize(folder, bits)
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, check=True, timeout=120
    )
    seen = json.loads(result.stdout)
    assert seen["weights"] > 3 * SLACK, "too small to tell"
    assert seen["peak"] <= seen["weights"] + seen["layer"] + SLACK, seen
