"""`LaunchSeconds`: how long a plain decode step and a round of speculation take, by row bucket. Knows no requests, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from llmjax.scheduling.buckets import pick

PLAIN = 0
"""The draft length of a plain decode step."""

_SLOWEST_WEIGHT = 1 / 8  # of the newest time, once there are several
_MOST = 2.0  # times longer or shorter than expected that one launch may count: a pause is not a slow program
_MOST_AT_FIRST = 4.0  # where it was not timed before, or for long
_STALE = 64  # times of its bucket after which a program's own counts for less than how the others have changed


class LaunchSeconds:
    """Measured at the start, and followed as launches are timed.

    A time of one program also moves those of its bucket that have not been timed for long: contexts grow for all of them, and
    comparing the newest time of one with an old one of another would favour whoever was not run.

    Args:
        plain: seconds of one plain decode step, by row bucket.
        speculate: seconds of a round, by row bucket and number of drafts.
    """

    def __init__(self, plain: Mapping[int, float], speculate: Mapping[tuple[int, int], float]) -> None:
        self._seconds = {(rows, PLAIN): seconds for rows, seconds in plain.items()} | dict(speculate)
        assert all(value > 0 for value in self._seconds.values())
        self._buckets = sorted({rows for rows, _ in self._seconds})
        self._counts = dict.fromkeys(self._seconds, 0)
        self._timed_at = dict.fromkeys(self._seconds, -_STALE)
        self._times = dict.fromkeys(self._buckets, 0)

    def of(self, rows: int, length: int) -> float:
        """Seconds of a launch with so many rows, padded to their bucket; infinity where there is no such program."""
        if not self._buckets or rows > self._buckets[-1]:
            return float("inf")
        return self._seconds.get((pick(self._buckets, rows), length), float("inf"))

    def measured(self, rows: int, length: int, seconds: float, *, at_most: bool = False) -> None:
        """A launch took so long; `at_most`: or less, which tells nothing unless it was taken to need more. What was not measured
        at the start is left aside."""
        expected = self.of(rows, length)
        if seconds <= 0 or expected == float("inf") or (at_most and seconds >= expected):
            return
        bucket = pick(self._buckets, rows)
        key = bucket, length
        before = self._seconds[key]
        if self._times[bucket] - self._timed_at[key] >= _STALE:
            self._counts[key] = 0
        weight = max(_SLOWEST_WEIGHT, 1 / (1 + self._counts[key]))
        most = _MOST if self._counts[key] else _MOST_AT_FIRST
        taken = min(max(seconds, before / most), before * most)
        factor = 1 + weight * (taken / before - 1)
        self._seconds[key] = before * factor
        self._counts[key] += 1
        self._times[bucket] = now = self._times[bucket] + 1
        self._timed_at[key] = now
        for other, timed_at in self._timed_at.items():
            if other[0] == bucket and now - timed_at >= _STALE:
                self._seconds[other] *= factor
