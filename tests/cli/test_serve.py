"""A real ``mlxserve serve`` process: start, stream, stop, and what it says when it cannot start."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxserve.cli.listening import base_url, bind_sockets, close_sockets, is_reachable_from_network
from mlxserve.errors import PortUnavailableError, UsageError
from tests.cli.conftest import Result, Starter
from tests.tiny_adapters import write_adapter
from tests.tiny_models import TinyModel, write_tiny_model

Run = Callable[..., Result]
Script = Callable[..., str]

TINY = TinyModel(context=256, has_eos=False)
READY = r"Ready at http://127\.0\.0\.1:(\d+)/v1"
SLOW: list[dict[str, object]] = [{"match": "", "pieces": ["a"], "end": "run", "delay_ms": 20}]
QUICK: list[dict[str, object]] = [{"match": "", "pieces": ["Cape", " Town"], "end": "eos"}]


def post(
    port: int, body: dict[str, object], headers: dict[str, str] | None = None
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"messages": [{"role": "user", "content": "Where?"}]} | body
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(body),
        {"Content-Type": "application/json", "Connection": "close"} | (headers or {}),
    )
    return connection.getresponse()


def is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        except OSError:
            return False
        return True


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_streams_frees_the_port_and_exits_0(
    start: Starter, script: Script, signum: signal.Signals
) -> None:
    server = start("serve", script(SLOW), "--port", "0")
    port = int(server.wait_for(READY)[1])
    response = post(port, {"model": "echo", "stream": True, "max_tokens": 4000})
    assert response.status == 200
    first = next(line for line in response if b'"content":"a"' in line.replace(b": ", b":"))
    assert first.startswith(b"data:")
    server.signal(signum)
    # The stream ends by itself, in order: http.client raises IncompleteRead on a cut chunk.
    response.read()
    response.close()
    assert server.end() == 0
    assert is_free(port)
    assert not any("Traceback" in line for line in server.lines)


def test_a_signal_without_requests_exits_0(start: Starter, script: Script) -> None:
    server = start("serve", script(QUICK), "--port", "0")
    port = int(server.wait_for(READY)[1])
    server.signal(signal.SIGINT)
    assert server.end() == 0
    assert is_free(port)


def test_many_streams_and_waiting_requests_all_end(start: Starter, script: Script) -> None:
    server = start("serve", script(SLOW), "--port", "0", "--parallel", "2")
    port = int(server.wait_for(READY)[1])
    bodies: list[bytes] = []
    begun = threading.Semaphore(0)

    def client() -> None:
        response = post(port, {"model": "echo", "stream": True, "max_tokens": 4000})
        begun.release()
        bodies.append(response.read())
        response.close()

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        assert begun.acquire(timeout=60)
    server.signal(signal.SIGINT)
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert server.end() == 0


def test_models_are_served_side_by_side(start: Starter, script: Script) -> None:
    other: list[dict[str, object]] = [{"match": "", "pieces": ["Lima"], "end": "eos"}]
    server = start("serve", script(QUICK), script(other, name="second"), "--port", "0")
    port = int(server.wait_for(READY)[1])
    for model, text in (("echo", "Cape Town"), ("second", "Lima")):
        response = post(port, {"model": model})
        assert response.status == 200
        assert json.loads(response.read())["choices"][0]["message"]["content"] == text
        response.close()
    server.signal(signal.SIGTERM)
    assert server.end() == 0
    assert any("echo" in line for line in server.lines)
    assert any("second" in line for line in server.lines)


def test_the_key_is_asked_for(start: Starter, script: Script) -> None:
    server = start("serve", script(QUICK), "--port", "0", "--api-key", "secret")
    port = int(server.wait_for(READY)[1])
    for headers, status in (({}, 401), ({"Authorization": "Bearer secret"}, 200)):
        response = post(port, {"model": "echo"}, headers)
        assert response.status == status
        response.read()
        response.close()
    server.signal(signal.SIGINT)
    assert server.end() == 0


def test_max_context_is_what_clients_are_held_to(start: Starter, script: Script) -> None:
    server = start("serve", script(QUICK), "--port", "0", "--max-context", "64")
    port = int(server.wait_for(READY)[1])
    response = post(port, {"model": "echo", "messages": [{"role": "user", "content": "x" * 100}]})
    error = json.loads(response.read())["error"]
    response.close()
    assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert "64" in error["message"]
    server.signal(signal.SIGINT)
    assert server.end() == 0


@pytest.mark.parametrize(("options", "warns"), [([], True), (["--api-key", "k"], False)])
def test_a_server_open_to_the_network_without_a_key_warns(
    start: Starter, script: Script, options: list[str], warns: bool
) -> None:
    server = start("serve", script(QUICK), "--port", "0", "--host", "0.0.0.0", *options)
    server.wait_for(READY)
    server.signal(signal.SIGINT)
    assert server.end() == 0
    assert any(line.startswith("warning:") and "--api-key" in line for line in server.lines) is warns


def test_a_busy_port_is_one_line_before_any_loading(run: Run, busy_port: int) -> None:
    # The model does not exist: were it looked at first, the error would be another.
    assert run("serve", "./no-such-folder", "--port", str(busy_port)) == Result(
        1,
        "",
        f"error: port {busy_port} on 127.0.0.1 is in use by another program;"
        " stop it or choose another with --port\n",
    )


def test_two_models_of_one_name_are_refused(run: Run, script: Script) -> None:
    name = script(QUICK)
    assert run("serve", name, name, "--port", "0") == Result(
        2, "", "error: two of the models to serve have the same id 'echo'\n"
    )


def test_more_context_than_the_model_has_is_refused(run: Run, script: Script) -> None:
    assert run("serve", script(QUICK), "--port", "0", "--max-context", "5000") == Result(
        2, "", "error: --max-context 5000 is more than echo supports: 4096 tokens\n"
    )


def test_an_adapter_is_served_beside_its_model(start: Starter, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny", TINY)
    write_adapter(tmp_path / "adapter=1", TINY)
    server = start("serve", str(tmp_path / "tiny"), "--adapter", f"a={tmp_path / 'adapter=1'}", "--port", "0")
    port = int(server.wait_for(READY)[1])
    response = post(port, {"model": "tiny:a", "max_tokens": 2})
    answer = json.loads(response.read())
    response.close()
    assert (response.status, answer["model"]) == (200, "tiny:a")
    server.signal(signal.SIGINT)
    assert server.end() == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--adapter", "a"], 2, "--adapter 'a' is not NAME=DIR or MODEL:NAME=DIR"),
        (["--adapter", "=x"], 2, "--adapter '=x' is not NAME=DIR"),
        (["--adapter", "other:a=x"], 2, "no such model is served, only: tiny"),
        (["--adapter", "a b=x"], 2, "an adapter's name has 1 to 64 letters"),
        (["--adapter", "a=none"], 1, "none: no such adapter folder"),
        (
            ["--adapter", "a=adapter", "--adapter", "a=adapter"],
            2,
            "two adapters of tiny have the same name 'a'",
        ),
    ],
)
def test_wrong_adapters_end_the_start_with_one_line(
    run: Run, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    write_tiny_model(tmp_path / "tiny", TINY)
    write_adapter(tmp_path / "adapter", TINY)
    options = [option.replace("=adapter", f"={tmp_path / 'adapter'}") for option in options]
    result = run("serve", str(tmp_path / "tiny"), "--port", "0", *options)
    assert (result.code, result.out, result.err.count("\n")) == (code, "", 1)
    assert message in result.err


def test_an_unknown_host_is_one_line(run: Run) -> None:
    result = run("serve", "--host", "999.1.1.1", "--port", "0")
    assert result.code == 2
    assert result.err.startswith("error: --host '999.1.1.1' is not an address of this machine")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", [["serve", "--port", "0"], ["generate", "--prompt", "a"], ["chat"]])
def test_models_that_are_none(run: Run, command: list[str]) -> None:
    for name in ("./no-such-folder", "scripted:none.json", "nosuchmodel", "missing.gguf"):
        result = run(command[0], name, *command[1:])
        assert (result.code in (1, 2), result.out) == (True, "")
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1
        assert name.removeprefix("scripted:").removeprefix("./") in result.err


def test_a_folder_without_a_model_is_one_line(run: Run) -> None:
    result = run("serve", ".", "--port", "0")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1


def test_a_bad_script_is_one_line_and_exit_code_2(run: Run, script: Script) -> None:
    result = run("serve", script(QUICK, nonsense=1), "--port", "0")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert "nonsense" in result.err
    assert result.err.count("\n") == 1


def test_sockets_of_a_name_and_of_a_wildcard() -> None:
    for host, is_open in (("localhost", False), ("127.0.0.1", False), ("0.0.0.0", True)):
        sockets = bind_sockets(host, 0)
        assert is_reachable_from_network(sockets) is is_open
        assert base_url(sockets[0]).startswith(("http://127.0.0.1:", "http://[::1]:"))
        close_sockets(sockets)


def test_a_taken_port_and_a_foreign_address(busy_port: int) -> None:
    with pytest.raises(PortUnavailableError, match=f"port {busy_port} on 127.0.0.1 is in use"):
        bind_sockets("127.0.0.1", busy_port)
    with pytest.raises(UsageError, match=r"--host '192\.0\.2\.1' is not an address of this machine"):
        bind_sockets("192.0.2.1", 0)
