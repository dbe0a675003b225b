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
    """An open ``text/event-stream`` reply.

    Every ``send`` waits for the client when its socket is full, so nothing piles up in the transport;
    it raises ConnectionError once the client has left.
    """

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response

    @classmethod
    async def open(cls, request: web.Request) -> EventStream:
        """Send the headers. From here on an error can only be an event."""
        response = web.StreamResponse(headers=_HEADERS)
        await response.prepare(request)
        return cls(response)

    async def send(self, data: bytes) -> None:
        await self.response.write(b"data: " + data + b"\n\n")

    async def ping(self) -> None:
        """A comment, which clients skip: it keeps proxies and timeouts quiet during a long prefill."""
        await self.response.write(b": keep-alive\n\n")

    async def close(self, *, is_done: bool) -> None:
        """End the reply; ``[DONE]`` goes out only after a stream that came to its end."""
        if is_done:
            await self.send(b"[DONE]")
        await self.response.write_eof()
