"""The second half of scripts/demo, with nothing but the standard library: pull, serve, ask, print."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

MODEL = "smollm2"
QUESTION = "What is the capital city of France? Answer in one sentence."
READY_TIMEOUT_S = 600.0


class DemoError(Exception):
    """Something that ends the demo, in one line."""


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def mlxserve(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlxserve", *arguments]


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    """Poll /health until it answers 200, the server ends or the time is over."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError(f"the server ended with exit code {server.returncode}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise DemoError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")


def ask(port: int) -> str:
    """Stream one answer to stdout and its speed to stderr; returns the text."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    started = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise DemoError(
            f"the server answered {response.status}: {response.read(500).decode(errors='replace')}"
        )
    pieces: list[str] = []
    first_at: float | None = None
    usage: dict[str, int] = {}
    is_done = False
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[len(b"data:") :].strip()
        if data == b"[DONE]":
            is_done = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            raise DemoError(f"the stream failed: {chunk['error']}")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text:
                first_at = first_at or time.perf_counter()
                pieces.append(text)
                put(text)
    ended = time.perf_counter()
    put("\n")
    connection.close()
    if not is_done or first_at is None:
        raise DemoError("the stream ended early" if not is_done else "the answer was empty")
    num_tokens = usage.get("completion_tokens", 0)
    speed = f"{(num_tokens - 1) / (ended - first_at):.1f} tok/s, " if num_tokens > 1 else ""
    say(f"({num_tokens} tokens, {speed}first text after {first_at - started:.2f} s)")
    return "".join(pieces)


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.terminate()
    try:
        server.wait(timeout=30)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        server.kill()
        server.wait()


def run(port: int, is_once: bool) -> int:
    pulled = subprocess.run(mlxserve("pull", MODEL), stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
    if pulled.returncode != 0:
        raise DemoError(f"mlxserve pull {MODEL} failed; the lines above say why")
    port = port or free_port()
    # Its own session: Ctrl-C reaches this script alone, which then stops the server in order.
    server = subprocess.Popen(
        mlxserve("serve", MODEL, "--port", str(port)), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until_ready(server, port)
        say(f"\n{QUESTION}")
        ask(port)
        url = f"http://127.0.0.1:{port}/v1"
        if is_once:
            say(f"It was served at {url}")
            return 0
        say(f"\nServing {MODEL} at {url} until Ctrl-C. Try:\n")
        say(f"  curl {url}/chat/completions -H 'Content-Type: application/json' \\")
        say(
            "    -d '"
            + json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]})
            + "'\n"
        )
        return server.wait()
    finally:
        stop(server)


def _raise_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        return run(options.port, options.once)
    except KeyboardInterrupt:
        return 130 if options.once else 0
    except (DemoError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
        say(f"error: {error}" if isinstance(error, DemoError) else f"error: {type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
