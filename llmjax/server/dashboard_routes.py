"""`/dashboard`: a page that shows what the server does. Its files are in `dashboard/` and need nothing from anywhere else.

With API keys the page itself needs none, because it holds no data: it asks for the key and sends it with `/dashboard/events`,
which has all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llmjax.server.dashboard_feed import DashboardFeed
from llmjax.server.exchange import EventSender, SlowReaderError, while_connected
from llmjax.server.service import Service

log = logging.getLogger(__name__)

_FILES = {
    "/dashboard": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/page.css": ("page.css", "text/css; charset=utf-8"),
    "/dashboard/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/dashboard/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
SHELL = frozenset(_FILES)
"""Paths that are served to everybody."""
EVENTS = "/dashboard/events"
_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def dashboard_routes(service: Service) -> list[Route]:
    """The page, its files and its events."""
    folder = importlib.resources.files("llmjax.server") / "dashboard"

    def file(name: str, media_type: str) -> Any:
        response = Response((folder / name).read_bytes(), media_type=media_type, headers=_HEADERS)

        async def answer(request: Request) -> Response:
            return response

        return answer

    files = [Route(path, file(*entry), methods=["GET"]) for path, entry in _FILES.items()]
    return [*files, Route(EVENTS, DashboardEvents(service), methods=["GET"])]


class DashboardEvents:
    """The ASGI app of the events."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.feed = DashboardFeed(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["method"] == "HEAD":  # has no end to wait for otherwise
            await Response(media_type="text/event-stream")(scope, receive, send)
            return
        try:
            await while_connected(receive, self._send_events(EventSender(send, self._service.config.send_timeout, {})))
        except SlowReaderError:
            log.info("a viewer of the dashboard took nothing for %g s: it was dropped", self._service.config.send_timeout)

    async def _send_events(self, sender: EventSender) -> None:
        clock = asyncio.get_running_loop().time
        async with sender.watched():
            async with contextlib.aclosing(self.feed.events()) as events:
                async for data in events:
                    await sender.send(data, clock())
            await sender.send(b"", clock(), last=True)
