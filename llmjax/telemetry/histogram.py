"""`Histogram`: how many values of which size there were. One thread adds, any may read; a value costs a bisection and two sums.

Seconds are counted in steps of about 12 % (the Renard series R20 of ISO 3), fine enough for percentiles over a short while, which
are found from the difference of two readings. Prometheus is shown fewer of them. Knows no names and no labels.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_R20 = (1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8, 3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0)
SECONDS = tuple(float(f"{step}e{power}") for power in range(-4, 3) for step in _R20)
"""Upper bounds of the steps, from 0.1 ms to 900 s."""
SHOWN_SECONDS = tuple(float(f"{step}e{power}") for power in range(-4, 3) for step in (1.0, 2.5, 5.0))
"""Those of them that Prometheus is shown."""
SIZES = tuple(2**power for power in range(18))
"""Upper bounds for counts of tokens, launches or choices: powers of two."""


class Histogram:
    """Counts of values by upper bound.

    Args:
        bounds: in rising order; a value is counted at the first that is not below it, or beyond the last one.

    Attributes:
        counts: one for each bound, and one for what lies beyond.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self, shown: Sequence[float]) -> list[tuple[float, int]]:
        """(bound, values up to it) for some of the bounds, and for infinity."""
        counts = list(self.counts)
        found, so_far, at = [], 0, 0
        for bound, count in zip(self.bounds, counts, strict=False):
            so_far += count
            if at < len(shown) and bound == shown[at]:
                found.append((bound, so_far))
                at += 1
        return [*found, (float("inf"), so_far + counts[-1])]


def percentile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` (0 to 1) of the counted ones lie, on a straight line within a step; None without any.

    Values beyond the last bound are told as that.
    """
    wanted = share * sum(counts)
    if wanted <= 0:
        return None
    so_far = 0
    for index, count in enumerate(counts[: len(bounds)]):
        if so_far + count >= wanted:
            low = bounds[index - 1] if index else 0.0
            return low + (bounds[index] - low) * (wanted - so_far) / count
        so_far += count
    return bounds[-1]
