"""The listening socket: opened before anything heavy is loaded, so that a wrong address is told at once."""

from __future__ import annotations

import socket

from llmjax.errors import LlmjaxError

BACKLOG = 2048  # connections that wait to be accepted


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises `LlmjaxError` when that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.getaddrinfo(host or None, port, family)  # before there is a socket to be left behind
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, TypeError, ValueError) as error:  # not only OSError: a host may be no host name at all
        reason = getattr(error, "strerror", None) or str(error)
        raise LlmjaxError(f"cannot listen on {host} port {port}: {reason}; choose another host or port") from None


def url_of(listener: socket.socket) -> str:
    """Where a listening socket can be reached from this machine."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
