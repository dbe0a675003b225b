"""The hub's HTTP API on a free port: repositories and data sets (none in Git LFS) from memory, faults on
demand.

Written from the public API (https://huggingface.co/docs/hub/api): model info, tree, and ``resolve``, which
answers large files (Git LFS) with a redirect to another path.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from dataclasses import dataclass, field
from types import TracebackType

from aiohttp import web

COMMIT = "c0ffee" + "0" * 34
_CHUNK = 4096


@dataclass
class Repo:
    """``files`` by path; those of at least ``lfs_from`` bytes are in Git LFS."""

    files: dict[str, bytes]
    lfs_from: int = 1000
    token: str | None = None
    is_gated: bool = False
    revisions: tuple[str, ...] = ("main", "v1", COMMIT)

    def is_lfs(self, path: str) -> bool:
        return len(self.files[path]) >= self.lfs_from

    def entry(self, path: str) -> dict:
        content = self.files[path]
        entry = {"type": "file", "path": path, "size": len(content), "oid": git_id(content)}
        if self.is_lfs(path):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        return entry


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Hub:
    """``cut_after``: the next answers for a path end after so many bytes. ``sent`` counts bytes by path,
    ``ranges`` the Range headers that were asked for. ``damage``: paths of which a byte is turned around.
    ``stall``: paths that stop half-way and send nothing more."""

    repos: dict[str, Repo] = field(default_factory=dict)
    data_sets: dict[str, Repo] = field(default_factory=dict)
    cut_after: dict[str, list[int]] = field(default_factory=dict)
    damage: set[str] = field(default_factory=set)
    stall: set[str] = field(default_factory=set)
    no_ranges: bool = False
    is_broken: bool = False
    sent: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Hub:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        app = web.Application()
        for kind in ("models", "datasets"):
            app.router.add_get(f"/api/{kind}/{{owner}}/{{name}}", self._info)
            app.router.add_get(f"/api/{kind}/{{owner}}/{{name}}/revision/{{revision:.+}}", self._info)
            app.router.add_get(f"/api/{kind}/{{owner}}/{{name}}/tree/{{revision}}", self._tree)
        app.router.add_get("/datasets/{owner}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/{owner}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/lfs/{owner}/{name}/{path:.+}", self._content)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def _named(self, request: web.Request) -> Repo | None:
        repos = self.data_sets if request.path.startswith(("/api/datasets/", "/datasets/")) else self.repos
        return repos.get("{owner}/{name}".format(**request.match_info))

    def _repo(self, request: web.Request) -> Repo:
        self.requests.append(f"{request.method} {request.path}")
        if self.is_broken:
            raise web.HTTPServiceUnavailable
        repo = self._named(request)
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if repo is None or (repo.token is not None and given != repo.token):
            if repo is not None and repo.is_gated:
                raise web.HTTPForbidden(headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
            raise web.HTTPNotFound(headers={"X-Error-Code": "RepoNotFound"})
        if request.match_info.get("revision", "main") not in repo.revisions:
            raise web.HTTPNotFound(headers={"X-Error-Code": "RevisionNotFound"})
        return repo

    async def _info(self, request: web.Request) -> web.Response:
        repo = self._repo(request)
        repo_id = "{owner}/{name}".format(**request.match_info)
        siblings = [{"rfilename": path} for path in repo.files]
        return web.json_response(
            {
                "id": repo_id,
                "modelId": repo_id,
                "sha": COMMIT,
                "siblings": siblings,
                "tags": [],
                "private": False,
            }
        )

    async def _tree(self, request: web.Request) -> web.Response:
        repo = self._repo(request)
        folders = {path.rpartition("/")[0] for path in repo.files} - {""}
        entries = [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
        return web.json_response(entries + [repo.entry(path) for path in repo.files])

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        repo, path = self._repo(request), request.match_info["path"]
        if path not in repo.files:
            raise web.HTTPNotFound(headers={"X-Error-Code": "EntryNotFound"})
        content = repo.files[path]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{git_id(content)}"'}
        if repo.is_lfs(path):
            headers |= {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
            # Another host, as the hub does it.
            place = self.url.replace("127.0.0.1", "localhost")
            location = place + "/lfs/{owner}/{name}/{path}".format(**request.match_info)
            raise web.HTTPFound(location, headers=headers)
        return await self._content(request, headers)

    async def _content(
        self, request: web.Request, headers: dict[str, str] | None = None
    ) -> web.StreamResponse:
        path = request.match_info["path"]
        repo = self._named(request)
        assert repo is not None
        content = repo.files[path]
        if path in self.damage:
            content = content[:-1] + bytes([content[-1] ^ 1])
        begin, status = 0, 200
        wanted = request.headers.get("Range")
        headers = dict(headers or {})
        if wanted is not None:
            self.ranges.append(wanted)
            if not self.no_ranges:
                begin, status = int(wanted.removeprefix("bytes=").rstrip("-")), 206
                headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        body = content[begin:]
        response = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(body))})
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        cuts = self.cut_after.get(path, [])
        limit = cuts.pop(0) if cuts else len(body)
        if path in self.stall:
            limit = len(body) // 2
        for at in range(0, limit, _CHUNK):
            piece = body[at : min(at + _CHUNK, limit)]
            await response.write(piece)
            self.sent[path] = self.sent.get(path, 0) + len(piece)
        if path in self.stall:
            await asyncio.sleep(60)
        if limit < len(body) and request.transport is not None:
            request.transport.close()
        return response
