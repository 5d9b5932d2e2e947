"""The systems that an engine is compared with, on its own programs and pages: how requests are sent, or admitted, differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from llmjax.errors import ConfigError
from llmjax.loadtest.suite import System

OURS = System("engine", "the engine as it is configured: each request is sent when it comes")


def systems(names: Sequence[str], engine_config: Any, *, static_batch: int = 8) -> list[System]:
    """The engine of `engine_config` (a `ResolvedConfig`) and the baselines of these names."""
    return [OURS, *(BASELINES[name](engine_config, static_batch) for name in names)]


def client_systems(names: Sequence[str], *, static_batch: int = 8) -> list[System]:
    """A server, and those baselines that are a matter of its client. Raises `ConfigError` for others."""
    for name in names:
        if name != "static":
            raise ConfigError(f"the baseline {name} changes the engine, and a server's is its own: only static works over HTTP")
    return [System("server", "the server as it is"), *(_static(None, static_batch) for _ in names)]


def _static(engine_config: Any, static_batch: int) -> System:
    about = f"static batches of up to {static_batch}: the next is sent when all of the one before have ended"
    return System("static", about, batch=static_batch)


def _whole_length(engine_config: Any, static_batch: int) -> System:
    about = "the pages of a request's full length (prompt and max_tokens) are reserved when it starts"
    same = OURS.name if engine_config.deterministic or engine_config.reserve_full_length else ""
    return System("whole_length", about, {"reserve_full_length": True}, same_as=same)


def _first_come(engine_config: Any, static_batch: int) -> System:
    lanes: Sequence[Any] = engine_config.lanes
    if len(lanes) < 2:
        return System("fifo", "the engine is first come, first served: the same policy", same_as=OURS.name)
    one = dataclasses.replace(lanes[-1], depth=None, timeout=None)
    return System("fifo", "one lane: first come, first served, whatever the lengths", {"lanes": (one,)})


BASELINES: dict[str, Callable[[Any, int], System]] = {"static": _static, "fifo": _first_come, "whole_length": _whole_length}
