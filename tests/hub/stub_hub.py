"""A hub on this machine: the few addresses that a snapshot of a data set asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40


@dataclass(slots=True)
class StubHub:
    """``files`` of each data set by path; ``fetched`` lists what was downloaded."""

    address: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"]:
            name, rest = "/".join(parts[2:4]), parts[4:]
            if name not in self.files:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            files = self.files[name]
            if rest[:1] == ["tree"]:
                return 200, {}, json.dumps([_entry(path, files[path]) for path in sorted(files)]).encode()
            siblings = [{"rfilename": path} for path in sorted(files)]
            return 200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        if parts[:1] == ["datasets"] and parts[3:5] == ["resolve", COMMIT]:
            content = self.files["/".join(parts[1:3])]["/".join(parts[5:])]
            return 200, {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": COMMIT}, content
        return 404, {}, b"{}"


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(content), "oid": _blob(content)}


@contextmanager
def stub_hub() -> Iterator[StubHub]:
    hub = StubHub("")

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def do_GET(self) -> None:
            self._reply(with_body=True)

        def _reply(self, *, with_body: bool) -> None:
            status, headers, body = hub.answer(self.path)
            if with_body and "/resolve/" in self.path:
                hub.fetched.append(self.path.partition(f"{COMMIT}/")[2])
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the tests look at ``fetched``."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
