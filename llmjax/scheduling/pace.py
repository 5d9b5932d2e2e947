"""How long decode steps take: whether a launch of several of them would keep a newcomer waiting. Knows no request."""

from __future__ import annotations

import statistics
from collections import deque

LAUNCH_SECONDS = 5e-3
"""A launch that is over sooner keeps nobody waiting: the first tokens of a short prompt take longer."""

QUIET_LAUNCHES = 100
"""Another is likely to come while one has come within so many lengths of a launch: if they come by chance, at about that rate,
one in a hundred launches has somebody waiting for its end."""

_SAMPLES = 9  # the median of so many: a pause between two launches is not a long step


class Pace:
    """Measured from the times of the scheduler's own calls: with one launch ahead, it is asked for the next one when one ends."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._last: tuple[float, int] | None = None  # a decode launch and its steps
        self._came = float("-inf")

    def came(self, when: float) -> None:
        """Somebody came, `when` in seconds."""
        self._came = max(self._came, when)

    def launched(self, steps: int, now: float) -> None:
        """A decode launch; 0 steps for any other."""
        if self._last is not None and steps:
            before, done = self._last
            self._samples.append((now - before) / done)
        self._last = (now, steps) if steps else None

    @property
    def step_seconds(self) -> float | None:
        """Seconds a decode step takes; None before two decode launches in a row."""
        return statistics.median(self._samples) if self._samples else None

    def hurries(self, steps: int, now: float) -> bool:
        """Whether a launch of `steps` is long, and somebody is likely to come before it ends."""
        length = steps * (self.step_seconds or 0.0)
        return length > LAUNCH_SECONDS and now - self._came < QUIET_LAUNCHES * length
