"""Histograms of magnitudes on one fixed grid of bins, 32 an octave: how they are read. Host only; knows no observers.

Every histogram has the same bins, so that two can be added and compared whatever was seen first. A bin is the exponent and the
first five bits of the mantissa of a float32: finding it is exact, without a logarithm. Bin 0 holds what is below 2^-30, zeros
included, the last bin what is from 2^18 on; a bin between them is at most 1/32 wider than its lower edge.
"""

from __future__ import annotations

import numpy as np

MANTISSA_BITS = 5
LOWEST_EXPONENT = -30
HIGHEST_EXPONENT = 18
BINS_AN_OCTAVE = 1 << MANTISSA_BITS
NUM_BINS = (HIGHEST_EXPONENT - LOWEST_EXPONENT) * BINS_AN_OCTAVE + 2
RELATIVE_ERROR = 1 / BINS_AN_OCTAVE
"""How far a quantile read from a histogram may lie above the exact one; it never lies below."""


def _lower_edges() -> np.ndarray:
    steps = np.arange(NUM_BINS - 1)
    octaves, parts = np.divmod(steps, BINS_AN_OCTAVE)
    return np.concatenate([[0.0], np.exp2(LOWEST_EXPONENT + octaves) * (1 + parts / BINS_AN_OCTAVE)])


LOWER_EDGES = _lower_edges()
"""float64 [NUM_BINS]; each is a float32 too."""

UPPER_EDGES = np.append(LOWER_EDGES[1:], np.inf)
"""float64 [NUM_BINS]; the last bin has no upper edge."""


def bin_numbers(magnitudes: np.ndarray) -> np.ndarray:
    """The bin of each magnitude, taken as float32; int64, of the same shape."""
    bits = np.abs(np.asarray(magnitudes, np.float32)).view(np.int32).astype(np.int64)
    first = (LOWEST_EXPONENT + 127) << MANTISSA_BITS
    numbers: np.ndarray = np.clip((bits >> (23 - MANTISSA_BITS)) - first + 1, 0, NUM_BINS - 1)
    return numbers


def histogram(magnitudes: np.ndarray) -> np.ndarray:
    """int64 [NUM_BINS]: how many magnitudes each bin holds."""
    return np.bincount(bin_numbers(magnitudes).ravel(), minlength=NUM_BINS).astype(np.int64)


def quantile_bins(counts: np.ndarray, percent: float) -> np.ndarray:
    """For each histogram of `counts` [G, NUM_BINS] the bin of its percentile: int64 [G].

    The percentile is the smallest value that `percent` of 100 values do not exceed (the inverse of the empirical distribution).
    """
    cumulative = np.cumsum(counts, axis=1)
    wanted = np.ceil(cumulative[:, -1] * (percent / 100) * (1 - 1e-12))  # 99.9 % of 1000 values are 999, not 1000
    return np.argmax(cumulative >= np.maximum(wanted, 1)[:, None], axis=1)
