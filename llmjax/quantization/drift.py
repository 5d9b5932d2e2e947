"""Drift: how far live traffic is from the samples of a calibration, as one statistic in 0..1 a linear. Host only.

The statistic is Kolmogorov's and Smirnov's D: the largest difference between two cumulative distributions, here of histograms on
the grid of `log_bins`. 0 is the same, 1 is apart altogether; 0.2 means that some bound is met by 20 more of 100 tokens on one
side than on the other. It does not grow with the number of tokens. Two sets of one source differ too, by chance: `noise` is what
D exceeds once in a hundred times for that many independent values. Tokens of one text are not independent, so for activations
the samples are what is counted, which is the cautious way.

What is compared are ranges, which is what a calibration depends on: texts of another kind whose activations are as large as those
calibrated with are no drift.

Source: Smirnov, Table for estimating the goodness of fit of empirical distributions, 1948; Massey, 1951.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from llmjax.errors import ConfigError
from llmjax.quantization.calibration import Calibration

_ONCE_IN_A_HUNDRED = 1.63  # of Kolmogorov's distribution


@dataclasses.dataclass(frozen=True)
class Drift:
    """How live traffic differs from the calibration's samples.

    Attributes:
        linears: D of the tokens' largest magnitudes in front of each linear, by its name.
        beyond: share of live tokens whose largest magnitude lies in a bin above all of the calibration's, by linear.
        lengths: D of the samples' lengths in tokens.
        noise: what D exceeds by chance once in a hundred times, for as many samples as there are.
    """

    linears: Mapping[str, float]
    beyond: Mapping[str, float]
    lengths: float
    noise: float

    @property
    def worst(self) -> tuple[str, float]:
        """Name and D of what drifted most, a linear or "lengths"."""
        return max([*self.linears.items(), ("lengths", self.lengths)], key=lambda pair: pair[1])

    def above(self, limit: float) -> list[str]:
        """Names of what drifted further than `limit`, and further than chance explains; the furthest first.

        Raises `ConfigError` for a limit outside 0..1.
        """
        if not 0 <= limit <= 1:
            raise ConfigError(f"drift_above lies between 0 and 1, got {limit}")
        found = [(name, d) for name, d in [*self.linears.items(), ("lengths", self.lengths)] if d > max(limit, self.noise)]
        return [name for name, _ in sorted(found, key=lambda pair: -pair[1])]


def drift(calibrated: Calibration, live: Calibration) -> Drift:
    """How far `live` is from what was calibrated. Both are of one model, and have samples.

    Live activations are collected as those of a calibration are, by `calibrate.begin` and `calibrate.collect`.
    Raises `ConfigError` when the two are of different models, or one has no samples.
    """
    if list(calibrated.linears) != list(live.linears):
        raise ConfigError("drift: the two sets of statistics are of different models: calibrate the model that serves")
    if not (calibrated.samples and live.samples):
        raise ConfigError("drift: one side has no samples: collect some first")
    pairs = {name: (linear.token.counts[0], live.linears[name].token.counts[0]) for name, linear in calibrated.linears.items()}
    return Drift(
        linears={name: largest_difference(*pair) for name, pair in pairs.items()},
        beyond={name: _share_beyond(*pair) for name, pair in pairs.items()},
        lengths=largest_difference(calibrated.lengths, live.lengths),
        noise=chance_level(calibrated.samples, live.samples),
    )


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """D of two histograms over the same bins, none empty: in 0..1, symmetric, and never above that of the values themselves."""
    first, second = np.cumsum(one), np.cumsum(other)
    if not (first[-1] and second[-1]):
        raise ConfigError("drift: one of two histograms is empty: collect some values first")
    return float(np.abs(first / first[-1] - second / second[-1]).max())


def chance_level(one: int, other: int) -> float:
    """What D of two sets of independent values of one source exceeds once in a hundred times, at most 1."""
    return min(1.0, _ONCE_IN_A_HUNDRED * math.sqrt((one + other) / (one * other)))


def _share_beyond(calibrated: np.ndarray, live: np.ndarray) -> float:
    last = int(np.flatnonzero(calibrated)[-1])
    return float(live[last + 1 :].sum() / live.sum())
