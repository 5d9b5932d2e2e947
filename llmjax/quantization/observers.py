"""`Observer`: what was seen of a tensor, in fixed memory, and the range that an absmax, percentile or mse rule takes from it.

Owns a histogram of magnitudes (`log_bins`) and the exact largest magnitude of each group. Host only, plain numpy: what is counted
on a device comes in as a `Summary`. Knows no model.

Ranges are of symmetric quantisation: a range r becomes 127, what lies beyond is clipped. Error bounds:

- absmax: exact.
- percentile: never below the exact one, and above it by at most 1/32 of it (magnitudes below 2^-30 count as 2^-30, and nothing
  exceeds the absmax).
- mse: the best of the bins' upper edges, 32 an octave, for values spread evenly over each bin; the search ends ten octaves
  below the absmax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from llmjax.errors import ConfigError
from llmjax.quantization.log_bins import BINS_AN_OCTAVE, LOWER_EDGES, NUM_BINS, UPPER_EDGES, quantile_bins

Granularity = Literal["tensor", "channel", "token"]
Rule = Literal["absmax", "percentile", "mse"]
RULES: tuple[Rule, ...] = ("absmax", "percentile", "mse")

_LARGEST = 127  # of int8, as in pallas_kernels.quantized
_POINTS_A_BIN = 16
_OCTAVES_OF_CLIPPING = 10


class Summary(NamedTuple):
    """What one array adds to an observer of G groups.

    Attributes:
        counts: whole numbers [G, NUM_BINS].
        absmax: float32 [G]; means nothing when `bad` is not 0.
        bad: values that are NaN or infinite.
    """

    counts: np.ndarray
    absmax: np.ndarray
    bad: int


class Observer:
    """A streaming observer: one pass, memory fixed by the number of groups, mergeable.

    Attributes:
        granularity: "tensor" has one group. "channel" has one for each channel. "token" has one group too, but counts one
            value a token, its largest magnitude: the distribution of the ranges that tokens have when each has its own scale.
        counts: int64 [G, NUM_BINS].
        absmax: float32 [G], exact.
    """

    def __init__(self, granularity: Granularity, channels: int = 1) -> None:
        """`channels` is read for "channel" alone."""
        if granularity not in ("tensor", "channel", "token"):
            raise ConfigError(f"granularity {granularity!r}; choose tensor, channel or token")
        groups = channels if granularity == "channel" else 1
        self.granularity = granularity
        self.counts = np.zeros((groups, NUM_BINS), np.int64)
        self.absmax = np.zeros(groups, np.float32)

    def add(self, summary: Summary) -> None:
        """Take in what was counted of one more array. The caller has refused a summary with bad values."""
        assert not summary.bad, "values that are not finite have no range"
        self.counts += summary.counts
        np.maximum(self.absmax, summary.absmax, out=self.absmax)

    def merge(self, other: Observer) -> None:
        """Take in all that another observer of the same groups has seen."""
        if (other.granularity, len(other.absmax)) != (self.granularity, len(self.absmax)):
            raise ConfigError(
                f"an observer of {len(self.absmax)} groups ({self.granularity}) cannot take in one of {len(other.absmax)} "
                f"({other.granularity})"
            )
        self.counts += other.counts
        np.maximum(self.absmax, other.absmax, out=self.absmax)

    def range(self, rule: Rule, *, percent: float = 99.9) -> np.ndarray:
        """The magnitude that becomes 127, for each group: float32 [G]; 0 where there was nothing but zeros.

        `percent` is read by "percentile" alone. Raises `ConfigError` for another rule, a percent that is not in (0, 100], or an
        observer that has seen nothing.
        """
        if not self.counts.any():
            raise ConfigError("an observer that has seen no values has no range: calibrate with at least one sample")
        if rule == "absmax":
            return self.absmax.copy()
        if rule == "percentile":
            if not 0 < percent <= 100:
                raise ConfigError(f"a percentile lies above 0 and is at most 100, got {percent}")
            edges = UPPER_EDGES[quantile_bins(self.counts, percent)]
        elif rule == "mse":
            edges = self._least_error()
        else:
            raise ConfigError(f"observer {rule!r}; choose one of {', '.join(RULES)}")
        ranges: np.ndarray = np.minimum(edges, self.absmax).astype(np.float32)
        return ranges

    def arrays(self) -> dict[str, np.ndarray]:
        """The state, to be saved; `restored` makes an observer of it."""
        return {"counts": self.counts, "absmax": self.absmax}

    @classmethod
    def restored(cls, granularity: Granularity, arrays: Mapping[str, np.ndarray]) -> Observer:
        """The observer whose `arrays` these are; they are copied."""
        observer = cls(granularity, len(arrays["absmax"]))
        observer.counts += arrays["counts"]
        observer.absmax[:] = arrays["absmax"]
        return observer

    def _least_error(self) -> np.ndarray:
        """The upper edge, for each group, at which the expected squared error of rounding and clipping is least: float64 [G]."""
        seen = np.flatnonzero(self.counts.any(axis=0))
        top = NUM_BINS - 1 - np.argmax(self.counts[:, ::-1] > 0, axis=1)  # of each group
        first = max(1, int(top.min()) - _OCTAVES_OF_CLIPPING * BINS_AN_OCTAVE)
        candidates = np.arange(first, max(int(top.max()), first) + 1)
        beyond = max(float(self.absmax.max()), 2 * LOWER_EDGES[-1])  # the last bin ends somewhere
        upper = np.minimum(UPPER_EDGES, beyond)
        errors = _expected_errors(LOWER_EDGES[seen], upper[seen], upper[candidates])
        total = self.counts[:, seen].astype(np.float64) @ errors
        total[candidates[None, :] > np.maximum(top, first)[:, None]] = np.inf
        best: np.ndarray = upper[candidates[np.argmin(total, axis=1)]]
        return best


def _expected_errors(lower: np.ndarray, upper: np.ndarray, ranges: np.ndarray) -> np.ndarray:
    """[bins, ranges]: mean squared error of quantising values spread evenly over a bin, for each range."""
    points = (np.arange(_POINTS_A_BIN) + 0.5) / _POINTS_A_BIN
    values = lower[:, None] + (upper - lower)[:, None] * points
    errors = np.empty((len(lower), len(ranges)))
    for number, largest in enumerate(ranges):
        scale = largest / _LARGEST
        error = values - np.minimum(np.rint(values / scale), _LARGEST) * scale
        errors[:, number] = np.mean(error**2, axis=1)
    return errors
