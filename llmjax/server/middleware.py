"""Around every route: request ids, counting, API keys. Plain ASGI, so that streams pass through unbuffered."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmjax.server.dashboard_routes import SHELL
from llmjax.server.exchange import CLIENT_LEFT
from llmjax.server.http_errors import HttpError, error_response
from llmjax.server.request_log import line
from llmjax.server.service import Service

log = logging.getLogger(__name__)

PROBES = frozenset({"/livez", "/readyz", "/health"})
_OPEN = PROBES | SHELL


class Accounts:
    """Gives every exchange an id (in the scope's state and the header `x-request-id`), counts it, and logs it without its text.

    An answer that did not begin or did not end is counted as 499: the client had left, or was dropped.
    """

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[str]) -> None:
        self._app = app
        self._service = service
        self._routes = frozenset(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        headers = Headers(scope=scope)
        request_id = self._service.new_id(headers.get("x-request-id"))
        # What follows such a body may be a part of it to a proxy, and another request to us (RFC 9112, 6.1).
        two_lengths = "content-length" in headers and "transfer-encoding" in headers
        scope.setdefault("state", {})["request_id"] = request_id
        status, complete = 0, False
        read = sent = 0

        async def counted_receive() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            return message

        async def counted(message: Message) -> None:
            nonlocal status, complete, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = request_id
                if two_lengths:
                    answered["connection"] = "close"
            await send(message)
            sent += len(message.get("body", b""))
            complete = complete or (message["type"] == "http.response.body" and not message.get("more_body", False))

        try:
            await self._app(scope, counted_receive, counted)
        except Exception:
            status, complete = status or 500, True  # answered further out
            raise
        finally:
            path = route_path(scope)
            route = path if path in self._routes else "/v1/models/{id}" if path.startswith("/v1/models/") else "other"
            seconds = time.monotonic() - started
            shown = status if complete else CLIENT_LEFT
            metrics = self._service.metrics
            method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
            metrics.requests.labels(route, method, shown).inc()
            metrics.seconds.labels(route).observe(seconds)
            metrics.request_bytes.labels(route).observe(read)
            metrics.response_bytes.labels(route).observe(sent)
            if path not in PROBES:
                client = (scope.get("client") or ("unknown",))[0]
                fields = {"id": request_id, "client": client, "method": method, "route": route, "status": shown}
                fields |= {"seconds": round(seconds, 6), **scope["state"].get("answer", {})}
                log.info("%s", line(fields), extra={"event": "request", "fields": fields})


class ApiKeys:
    """Refuses every route but the probes and the dashboard's empty page to whoever sends none of the keys as a bearer token."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and route_path(scope) not in _OPEN and not self._opens(Headers(scope=scope)):
            error = HttpError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await error_response(error, 0)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _opens(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        # Digests have one length, and all are compared: the time tells nothing of the keys.
        same = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(same)


def route_path(scope: Scope) -> str:
    """The path below the place where the app is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
