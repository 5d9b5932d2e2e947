"""Drift: the statistic is Kolmogorov's and Smirnov's, small for one source and large for two."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from llmjax.errors import ConfigError
from llmjax.quantization.calibrate import CalibrateSettings, begin, calibrate, collect
from llmjax.quantization.calibration import Calibration, LinearStatistics
from llmjax.quantization.drift import chance_level, drift, largest_difference
from llmjax.quantization.log_bins import histogram
from llmjax.quantization.observers import Summary

CONFIG = CONFIGS["qwen2"]


def exact_difference(one: np.ndarray, other: np.ndarray) -> float:
    values = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(side), values, side="right") / len(side) for side in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def made_of(values: np.ndarray, lengths: np.ndarray) -> Calibration:
    linear = LinearStatistics.empty(1)
    linear.token.add(Summary(histogram(values)[None], np.float32([values.max()]), 0))
    return Calibration("", {"layers.0.mlp.down": linear}, lengths=histogram(lengths), samples=len(lengths))


def test_it_is_that_of_the_values_but_for_the_bins() -> None:
    random = np.random.default_rng(0)
    for shift in (1.0, 1.1, 1.5, 4.0):
        one, other = random.lognormal(0, 0.5, 3000), shift * random.lognormal(0, 0.5, 5000)
        got, want = largest_difference(histogram(one), histogram(other)), exact_difference(one, other)
        assert want - 0.02 < got <= want + 1e-12
        assert got == largest_difference(histogram(other), histogram(one))
    assert largest_difference(histogram(np.float32([1])), histogram(np.float32([2]))) == 1
    assert largest_difference(histogram(np.float32([1, 2])), histogram(np.float32([1, 1, 2, 2]))) == 0


def test_one_source_is_below_chance_and_two_are_above() -> None:
    random = np.random.default_rng(1)
    above = 0
    for _ in range(300):
        one, other = random.lognormal(0, 1, 200), random.lognormal(0, 1, 300)
        above += largest_difference(histogram(one), histogram(other)) > chance_level(200, 300)
    assert above <= 9  # 3 expected
    different = made_of(2 * random.lognormal(0, 0.5, 500), random.integers(10, 100, 500))
    same = [made_of(random.lognormal(0, 0.5, 500), random.integers(10, 100, 500)) for _ in range(2)]
    assert drift(*same).above(0.2) == []
    found = drift(same[0], different)
    assert found.above(0.2) == ["layers.0.mlp.down"]
    assert found.worst[0] == "layers.0.mlp.down"
    longer = drift(same[0], made_of(random.lognormal(0, 0.5, 500), random.integers(80, 400, 500)))
    assert longer.above(0.2) == ["lengths"]


def test_few_samples_raise_no_alarm() -> None:
    one, other = made_of(np.float32([1.0]), np.asarray([3])), made_of(np.float32([2.0]), np.asarray([9]))
    found = drift(one, other)
    assert found.worst[1] == found.noise == 1
    assert found.above(0.2) == []


def test_a_model_with_other_traffic() -> None:
    """Tokens whose embeddings have an outlier channel: found in front of what sees them, and not in lengths."""
    params = random_params(CONFIG)
    params["embed"]["weight"] = params["embed"]["weight"].at[150:, 3].multiply(30.0)
    random = np.random.default_rng(2)

    def traffic(first: int, last: int) -> Calibration:
        samples = [random.integers(first, last, random.integers(4, 17)).tolist() for _ in range(60)]
        return calibrate(params, CONFIG, samples, CalibrateSettings(sequence_length=64))

    before, same, other = traffic(0, 150), traffic(0, 150), traffic(150, 290)
    assert drift(before, same).above(0.2) == []
    found = drift(before, other)
    assert found.above(0.2)[0] == "layers.0.attention.qkv"
    assert found.linears["layers.0.attention.qkv"] > 0.5
    assert "lengths" not in found.above(0.2)


def test_live_traffic_is_collected_as_it_comes() -> None:
    params = random_params(CONFIG)
    samples = [list(range(length, 2 * length)) for length in (3, 9, 30)]
    calibrated = calibrate(params, CONFIG, samples, CalibrateSettings(sequence_length=16))
    live = begin("", params, CONFIG)
    for sample in samples:
        collect(live, params, CONFIG, [sample], limit=16)
    assert (live.samples, live.tokens, live.cut) == (calibrated.samples, calibrated.tokens, calibrated.cut) == (3, 28, 1)
    assert drift(calibrated, live).lengths == 0
    assert drift(calibrated, live).worst[1] <= 2 / 28  # rounding may move a token to the next bin


def test_tokens_beyond_all_that_was_seen() -> None:
    one = made_of(np.float32([1.0, 2.0]), np.asarray([5]))
    found = drift(one, made_of(np.float32([1.0, 2.0, 2.001, 3.0]), np.asarray([5])))
    assert found.beyond == {"layers.0.mlp.down": 0.25}  # 2.001 is in the bin of 2


def test_what_cannot_be_compared_is_told() -> None:
    one = made_of(np.float32([1.0]), np.asarray([5]))
    with pytest.raises(ConfigError, match="different models"):
        drift(one, Calibration("", {"layers.0.mlp.gate_up": one.linears["layers.0.mlp.down"]}, samples=1))
    with pytest.raises(ConfigError, match="no samples"):
        drift(one, Calibration("", one.linears))
    with pytest.raises(ConfigError, match="empty"):
        largest_difference(one.lengths, np.zeros_like(one.lengths))
    with pytest.raises(ConfigError, match="between 0 and 1, got 20"):
        drift(one, one).above(20)
