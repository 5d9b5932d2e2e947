"""`DashboardFeed`: what the dashboard shows, as server-sent events, one a second for all who watch.

The engine is asked once for all viewers, and not at all when nobody watches. A viewer that reads slowly gets the newest event
when it is ready for one. While the server drains and nothing is under way any more, streams end by themselves, so that nobody
keeps a server from stopping.
"""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any

from llmjax.errors import LlmjaxError
from llmjax.server.dashboard_figures import Window, bars
from llmjax.server.service import Service
from llmjax.version import __version__

log = logging.getLogger(__name__)

HISTORY = 300  # seconds whose points a new viewer gets
_PATIENCE = 2.0  # seconds that the engine has to answer; a step of a slow one may take longer, and then this event goes without


class DashboardFeed:
    """Args:
    service: whose engine, health and errors are shown.
    interval: seconds between two events.
    """

    def __init__(self, service: Service, *, interval: float = 1.0) -> None:
        self._service = service
        self._interval = interval
        self._version = __version__
        self._viewers: dict[asyncio.Event, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._next = 0.0  # monotonic: not to ask the engine again before
        self._window = Window()
        self._history: collections.deque[list[float | None]] = collections.deque(maxlen=HISTORY)
        self._latest: bytes | None = None
        self._over = False

    @property
    def num_viewers(self) -> int:
        """How many watch."""
        return len(self._viewers)

    @property
    def runs(self) -> bool:
        """Whether the engine is being asked."""
        return self._task is not None

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of one viewer: first the points of the past, then the present, again and again. To be closed."""
        news = asyncio.Event()
        self._viewers[news] = None
        if self._task is None:
            self._latest = None  # of another time
            self._task = asyncio.create_task(self._run())
        elif self._latest is not None:
            news.set()
        greeted = False
        try:
            while True:
                await news.wait()
                news.clear()
                assert self._latest is not None
                past = b"" if greeted else b"event: history\ndata: " + _json(self._past()) + b"\n\n"
                greeted = True
                yield past + self._latest
                if self._over:
                    return
        finally:
            del self._viewers[news]
            if not self._viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    def _past(self) -> list[list[float | None]]:
        """The points of the last `HISTORY` seconds."""
        since = time.time() - HISTORY
        return [point for point in self._history if point[0] is not None and point[0] > since]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self._next = time.monotonic() + self._interval
            message = await self._message()
            self._latest = b"data: " + _json(message) + b"\n\n"
            self._over = message["health"]["state"] in ("draining", "stopped") and self._service.engine.num_open == 0
            for news in self._viewers:
                news.set()

    async def _message(self) -> dict[str, Any]:
        service = self._service
        snapshot, figures = await self._ask(), None
        now = round(time.time(), 3)
        if snapshot is not None:
            figures = self._window.add(snapshot)
            self._history.append(_point(now, snapshot, figures))
        health = service.engine.health
        return {
            "time": now,
            "uptime": int(now) - service.created,
            "models": list(service.config.served_names),
            "version": self._version,
            "health": {"state": health.state, "reason": health.reason},
            "figures": figures,
            "engine": None if snapshot is None else _shown(snapshot),
            "point": self._history[-1] if snapshot is not None else None,
            "errors": service.errors.newest(),
        }

    async def _ask(self) -> dict[str, Any] | None:
        """The engine's snapshot; None when it does not answer, which its health explains."""
        if self._service.engine.health.gone:
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._service.engine.snapshot()
        except (LlmjaxError, TimeoutError):
            return None
        except Exception as error:  # a bug of ours: the page goes on without the engine's part
            log.error("the engine gave no snapshot", exc_info=error)
            return None


def _shown(snapshot: dict[str, Any]) -> dict[str, Any]:
    hidden = ("times", "sizes", "taken", "started")
    sizes = {name: bars(counts) for name, counts in snapshot["sizes"].items()}
    return {name: value for name, value in snapshot.items() if name not in hidden} | {"sizes": sizes}


def _point(now: float, snapshot: dict[str, Any], figures: dict[str, Any]) -> list[float | None]:
    """One place of the charts, in the order that the page's script knows."""
    times = [value for name in ("first", "between") for value in figures[name].values()]
    pages = snapshot["pages"]
    state = [sum(snapshot["running"].values()), sum(snapshot["waiting"].values()), snapshot["held"] / pages]
    point = [now, figures["output_rate"], figures["prompt_rate"], *times, *state, snapshot["cached"] / pages]
    return [None if value is None else float(f"{value:.4g}") if index else value for index, value in enumerate(point)]


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
