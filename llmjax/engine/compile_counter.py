"""Counts the programs XLA compiles in this process, so that "nothing compiles while serving" can be checked, not believed."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_hits = 0
_compiled = 0  # of the whole process: JAX reports compilations to listeners that cannot be taken away again


def _listen(event: str, duration: float, **_: object) -> None:
    global _compiled
    if event == _EVENT:
        _compiled += 1


def _listen_for_hits(event: str, **_: object) -> None:
    global _hits
    if event == _HIT:
        _hits += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
jax.monitoring.register_event_listener(_listen_for_hits)


class CompileCounter:
    """Compilations since this object was made."""

    def __init__(self) -> None:
        self._start, self._start_hits = _compiled, _hits

    @property
    def count(self) -> int:
        """How many programs were compiled (a hit in the persistent cache counts too)."""
        return _compiled - self._start

    @property
    def hits(self) -> int:
        """How many of them the persistent cache had."""
        return _hits - self._start_hits
