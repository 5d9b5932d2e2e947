"""The startup timeline: which phase of a start took how long, phases that ran beside each other included.

Owns the clock and the words. Must not know what a phase does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Phase:
    """One stretch of the start, in seconds from the timeline's beginning."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Timeline:
    """Phases in the order of their beginning. Threads may add to it at the same time."""

    def __init__(self, origin: float | None = None) -> None:
        """`origin`: when the start began, by `time.perf_counter`; None is now."""
        self._origin = time.perf_counter() if origin is None else origin
        self._phases: list[Phase] = []
        self._lock = threading.Lock()

    @property
    def phases(self) -> list[Phase]:
        """What has ended so far."""
        with self._lock:
            return sorted(self._phases, key=lambda phase: phase.start)

    @property
    def elapsed(self) -> float:
        """Seconds since the timeline was made."""
        return time.perf_counter() - self._origin

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the block does is a phase, also when it fails."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start, time.perf_counter())

    def add(self, name: str, start: float, end: float) -> None:
        """A phase that was timed by itself; both times by `time.perf_counter`."""
        with self._lock:
            self._phases.append(Phase(name, start - self._origin, end - self._origin))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase, those of one name added up. Their sum is more than the start's where phases overlapped."""
        total: dict[str, float] = {}
        for phase in self.phases:
            total[phase.name] = total.get(phase.name, 0.0) + phase.seconds
        return total

    def text(self) -> str:
        """One line: "load weights 0.0-4.1 s, lower 0.2-1.9 s, …"; stretches of one name are told as one."""
        spans: dict[str, tuple[float, float]] = {}
        for phase in self.phases:
            first, last = spans.get(phase.name, (phase.start, phase.end))
            spans[phase.name] = min(first, phase.start), max(last, phase.end)
        return ", ".join(f"{name} {start:.1f}-{end:.1f} s" for name, (start, end) in spans.items())
