"""What ``fit`` computes for SmolLM2 against the memory of a running server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxserve.hub import BUILTIN_MODELS
from mlxserve_convert.fit import gguf_footprint, server_bytes

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc"),
]


def anonymous(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def server(smollm2_folder: Path) -> Iterator[tuple[int, str]]:
    port = free_port()
    command = [sys.executable, "-m", "mlxserve", "serve", "smollm2", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health").close()
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        yield process.pid, url
        process.terminate()


def test_loaded_and_with_a_full_context_within_five_percent(server: tuple[int, str]) -> None:
    pid, url = server
    model, resident = gguf_footprint(BUILTIN_MODELS["smollm2"].path, ())
    loaded = anonymous(pid)
    assert server_bytes(model, resident, context=0) == pytest.approx(loaded, rel=0.05)
    prompt = [index * 37 % 40_000 + 10 for index in range(8000)]
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()
    full = anonymous(pid)
    assert server_bytes(model, resident, context=8000) == pytest.approx(full, rel=0.05)
    print(f"loaded {loaded / 2**20:.0f} MiB, with 8,000 tokens {full / 2**20:.0f} MiB")
