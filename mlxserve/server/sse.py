"""Server-sent events: one ``data:`` line an event, comments as keep-alive, ``[DONE]`` at the end."""

from __future__ import annotations

from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Reverse proxies (nginx) buffer replies unless told not to.
    "X-Accel-Buffering": "no",
}


class EventStream:
    """A ``text/event-stream`` reply, whose headers go out with its first event or comment.

    Until then (``is_open`` False) an error can still be a plain reply. Every write waits for the client
    when its socket is full, so nothing piles up in the transport; it raises ConnectionError once the
    client has left.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS)

    @property
    def is_open(self) -> bool:
        return self.response.prepared

    async def send(self, data: bytes) -> None:
        await self._write(b"data: " + data + b"\n\n")

    async def ping(self) -> None:
        """A comment, which clients skip: it keeps proxies and timeouts quiet during a long prefill."""
        await self._write(b": keep-alive\n\n")

    async def close(self, *, is_done: bool) -> None:
        """End the reply; ``[DONE]`` goes out only after a stream that came to its end."""
        if is_done:
            await self.send(b"[DONE]")
        await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        if not self.is_open:
            await self.response.prepare(self._request)
        await self.response.write(data)
