"""Observers against exact float64 computations over everything that was seen."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.errors import ConfigError, NonFiniteError
from llmjax.quantization import log_bins
from llmjax.quantization.log_bins import LOWER_EDGES, NUM_BINS, RELATIVE_ERROR, UPPER_EDGES
from llmjax.quantization.observers import Granularity, Observer
from llmjax.quantization.summaries import observe, summarise


def heavy_tailed(seed: int, shape: tuple[int, int], scale: float = 1.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    channels = np.exp(random.standard_normal(shape[1]))
    return (random.standard_t(3, shape) * channels * scale).astype(np.float32)


def observed(parts: list[np.ndarray], granularity: Granularity, channel_axis: int = 1) -> Observer:
    observer = Observer(granularity, parts[0].shape[channel_axis])
    for part in parts:
        observe(observer, jnp.asarray(part), "x", channel_axis=channel_axis)
    return observer


def groups_of(x: np.ndarray, granularity: Granularity, channel_axis: int = 1) -> np.ndarray:
    """float64 magnitudes [G, n] of the exact computation."""
    wide = np.abs(x.astype(np.float64))
    if granularity == "token":
        return wide.max(1)[None]
    if granularity == "tensor":
        return wide.reshape(1, -1)
    return wide.T if channel_axis == 1 else wide


def test_bins_hold_what_their_edges_say() -> None:
    random = np.random.default_rng(0)
    x = np.exp2(random.uniform(-34, 22, 5000)).astype(np.float32)
    x = np.concatenate([x, LOWER_EDGES.astype(np.float32), np.nextafter(LOWER_EDGES[1:].astype(np.float32), np.float32(0))])
    bins = log_bins.bin_numbers(-x)
    assert (LOWER_EDGES[bins] <= x).all()
    assert (x < UPPER_EDGES[bins]).all()
    inner = UPPER_EDGES[1:-1] / LOWER_EDGES[1:-1]
    assert inner.max() <= 1 + RELATIVE_ERROR
    counts, *_ = summarise(jnp.asarray(x)[None], granularity="tensor")
    np.testing.assert_array_equal(np.asarray(counts)[0], log_bins.histogram(x))  # device and host have the same bins


@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 3e3])
def test_absmax_is_exact_and_a_percentile_within_its_bound(granularity: Granularity, scale: float) -> None:
    x = heavy_tailed(1, (701, 13), scale)
    observer = observed([x[:1], x[1:300], x[300:]], granularity)
    exact = groups_of(x, granularity)
    np.testing.assert_array_equal(observer.range("absmax"), exact.max(1))
    for percent in (0.1, 50, 99.0, 99.9, 99.999, 100):
        want = np.percentile(exact, percent, axis=1, method="inverted_cdf")
        got = observer.range("percentile", percent=percent)
        assert (got >= want).all()
        assert (got <= want * (1 + RELATIVE_ERROR)).all()


@pytest.mark.parametrize(("granularity", "channel_axis"), [("tensor", 1), ("channel", 1), ("channel", 0), ("token", 1)])
def test_mse_is_as_good_as_a_search_over_all_values(granularity: Granularity, channel_axis: int) -> None:
    x = heavy_tailed(2, (8000, 4) if channel_axis else (4, 8000))
    got = observed([x], granularity, channel_axis).range("mse")
    exact = groups_of(x, granularity, channel_axis)
    for values, largest in zip(exact, got, strict=True):
        best = min(squared_error(values, c) for c in values.max() * np.exp2(-np.arange(0, 6, 1 / 32)))
        assert squared_error(values, float(largest)) <= 1.03 * best
    if granularity != "token":
        assert (got < exact.max(1)).any()  # of heavy tails something is clipped


def squared_error(values: np.ndarray, largest: float) -> float:
    scale = largest / 127
    return float(np.mean((values - np.minimum(np.rint(values / scale), 127) * scale) ** 2))


def test_one_outlier_of_ten_thousand() -> None:
    x = np.random.default_rng(3).standard_normal((4000, 8)).astype(np.float32)
    x[17, 3] = 1e4
    observer = observed([x], "tensor")
    assert observer.range("absmax") == 1e4
    assert observer.range("percentile") < 4
    exact = np.abs(x.astype(np.float64)).ravel()
    best = min(squared_error(exact, c) for c in 1e4 * np.exp2(-np.arange(0, 12, 1 / 32)))
    assert squared_error(exact, float(observer.range("mse")[0])) <= 1.03 * best
    channels = observed([x], "channel").range("absmax")
    assert channels[3] == 1e4
    assert np.delete(channels, 3).max() < 7


def test_zeros_and_equal_rows() -> None:
    x = np.zeros((5, 4), np.float32)
    x[:, 1], x[:, 2] = 0.75, 1e-20
    observer = observed([x], "channel")
    for rule in ("absmax", "percentile", "mse"):
        np.testing.assert_array_equal(observer.range(rule), np.float32([0, 0.75, 1e-20, 0]))


def test_very_large_values_end_in_the_last_bin() -> None:
    x = np.float32([[3e5, 1e6, 1e30]])
    observer = observed([x], "tensor")
    assert observer.counts[0, -1] == 3
    assert observer.range("percentile", percent=10) == np.float32(1e30)
    assert np.isfinite(observer.range("mse")).all()


@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
def test_merged_and_restored_equal_one_pass(granularity: Granularity) -> None:
    x = heavy_tailed(4, (60, 5))
    whole, left, right = (observed([part], granularity) for part in (x, x[:23], x[23:]))
    left = Observer.restored(granularity, {name: array.copy() for name, array in left.arrays().items()})
    left.merge(right)
    for name, array in whole.arrays().items():
        np.testing.assert_array_equal(left.arrays()[name], array)


def test_rows_that_do_not_count_change_nothing() -> None:
    x = heavy_tailed(5, (9, 6))
    padded = np.concatenate([x, np.full((3, 6), np.nan, np.float32)])
    counted = jnp.arange(12) < 9
    for granularity in ("tensor", "channel", "token"):
        observer = Observer(granularity, 6)
        observe(observer, jnp.asarray(padded), "x", counted)
        np.testing.assert_array_equal(observer.counts, observed([x], granularity).counts)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    x = heavy_tailed(6, (9, 6))
    observer = observed([x], "token")
    before = observer.counts.copy()
    x[4, 2] = value
    with pytest.raises(NonFiniteError, match=r"layers\.7\.mlp\.down: 1 values"):
        observe(observer, jnp.asarray(x), "layers.7.mlp.down")
    np.testing.assert_array_equal(observer.counts, before)


def test_wrong_use_is_told() -> None:
    observer = Observer("tensor")
    with pytest.raises(ConfigError, match="no values"):
        observer.range("absmax")
    observe(observer, jnp.ones((1, 1)), "x")
    with pytest.raises(ConfigError, match="at most 100"):
        observer.range("percentile", percent=100.5)
    with pytest.raises(ConfigError, match="absmax, percentile, mse"):
        observer.range("median")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="choose tensor, channel or token"):
        Observer("row")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot take in"):
        observer.merge(Observer("channel", 3))
    assert observer.counts.shape == (1, NUM_BINS)
