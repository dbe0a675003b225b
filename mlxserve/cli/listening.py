"""Sockets of the server, bound before a model is loaded so that a busy port is known at once."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Sequence

from mlxserve.errors import PortUnavailableError, UsageError


def bind_sockets(host: str, port: int) -> list[socket.socket]:
    """Bind every address of ``host``; the caller listens on the sockets and closes them.

    Port 0 picks a free port on the first address. Raises UsageError for a host without an address,
    PortUnavailableError when a port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host!r} is not an address of this machine: {_reason(error)}") from error
    wanted = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    if port == 0:
        del wanted[1:]
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    for family, address in wanted:
        try:
            sockets.append(_bind(family, address))
        except OSError as error:
            # "localhost" may name an IPv6 address on a machine that has none.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                missing = error
                continue
            close_sockets(sockets)
            raise unavailable(host, port, error) from error
    if not sockets:
        raise UsageError(f"--host {host!r} is not an address of this machine: {_reason(missing)}")
    return sockets


def unavailable(host: str, port: int, error: OSError) -> PortUnavailableError:
    """The error for a port that cannot be bound or listened on."""
    if error.errno == errno.EADDRINUSE:
        return PortUnavailableError(
            f"port {port} on {host} is in use by another program; stop it or choose another with --port"
        )
    return PortUnavailableError(f"port {port} on {host} cannot be opened: {_reason(error)}")


def close_sockets(sockets: Sequence[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


def base_url(sock: socket.socket) -> str:
    """The URL of one bound socket; a wildcard address becomes the loopback one, which reaches it too."""
    host, port = sock.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        address = ipaddress.ip_address("::1" if address.version == 6 else "127.0.0.1")
    return f"http://[{address}]:{port}" if address.version == 6 else f"http://{address}:{port}"


def is_reachable_from_network(sockets: Sequence[socket.socket]) -> bool:
    return any(not ipaddress.ip_address(sock.getsockname()[0]).is_loopback for sock in sockets)


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _reason(error: BaseException | None) -> str:
    return getattr(error, "strerror", None) or str(error)
