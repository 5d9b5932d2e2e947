"""Factors of least expected error make that of real rounding smaller than any alpha does, on inputs they were not fitted to."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from llmjax.errors import ConfigError, ModelError, NonFiniteError
from llmjax.model.quantization import Scheme
from llmjax.quantization.fitted_smoothing import MOST_TOKENS, fit_smoothing, fitted_factors
from llmjax.quantization.smoothing import smoothing_factors

IN, OUT, DEAD = 96, 64, 7


def linear(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs to fit to, others of the same kind, and a weight: channels of very different sizes in both, some tokens with spikes,
    one channel of zeros."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(0, 1.2, IN))
    x = rng.standard_normal((600, IN)) * sizes * (1 + 30 * (rng.random((600, IN)) < 0.002))
    x[:, DEAD] = 0
    weight = rng.standard_normal((OUT, IN)) * np.exp(rng.normal(0, 0.5, IN))
    return (*np.split(x.astype(np.float32), 2), weight.astype(np.float32))


def rounded(a: np.ndarray) -> np.ndarray:
    step = np.abs(a).max(1, keepdims=True) / 127
    return np.round(a / step) * step


def error(x: np.ndarray, weight: np.ndarray, factors: np.ndarray, scheme: Scheme) -> float:
    """Mean over tokens of the squared relative error of the output, in float64."""
    x, weight, factors = x.astype(np.float64), weight.astype(np.float64), factors.astype(np.float64)
    inputs = rounded(x / factors) if scheme == "w8a8" else x / factors
    want = x @ weight.T
    off = inputs @ rounded(weight * factors).T - want
    return float(np.mean((off**2).sum(1) / (want**2).sum(1)))


@pytest.mark.parametrize("scheme", ["w8a8", "w8a16"])
def test_no_alpha_does_as_well(scheme: Scheme) -> None:
    seed = np.random.SeedSequence().entropy
    x, fresh, weight = linear(seed)
    size = jnp.sum((jnp.asarray(x) @ weight.T) ** 2, axis=1)
    factors = fitted_factors(jnp.asarray(x), jnp.asarray(weight), size, alpha=0.5, scheme=scheme, name="it")
    assert factors.dtype == np.float32
    alphas = [smoothing_factors(np.abs(x).max(0), jnp.asarray(weight), alpha=alpha / 10) for alpha in range(11)]
    best = min(error(fresh, weight, other, scheme) for other in [np.ones(IN), *alphas])
    least = factors**2 / alphas[5] if scheme == "w8a8" else factors  # without the way back to SmoothQuant's
    assert error(fresh, weight, least, scheme) < 0.95 * best, seed
    assert error(fresh, weight, factors, scheme) < 0.8 * error(fresh, weight, alphas[5], scheme), seed


def test_channels_that_tell_nothing_get_a_middling_factor() -> None:
    x, _, weight = linear(3)
    weight[:, 11] = 0
    size = jnp.ones(len(x))
    factors = fitted_factors(jnp.asarray(x), jnp.asarray(weight), size, alpha=0.5, scheme="w8a8", name="it")
    others = np.delete(factors, [DEAD, 11])
    assert factors[DEAD] == factors[11] == pytest.approx(np.median(others), rel=1e-2)
    assert len(set(others.tolist())) > IN / 2
    nothing = fitted_factors(jnp.zeros_like(x), jnp.asarray(weight), size, alpha=0.5, scheme="w8a8", name="it")
    np.testing.assert_array_equal(nothing, 1)


def test_tokens_that_hide_their_error_count_less() -> None:
    """Of two halves with different outliers the one with the smaller weight is served worse."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((200, IN)).astype(np.float32)
    x[:100, 3] *= 40
    x[100:, 60] *= 40
    weight = rng.standard_normal((OUT, IN)).astype(np.float32)
    errors = []
    for size in (np.repeat([1.0, 1e6], 100), np.repeat([1e6, 1.0], 100)):
        factors = fitted_factors(
            jnp.asarray(x), jnp.asarray(weight), jnp.asarray(size, jnp.float32), alpha=0.5, scheme="w8a8", name="it"
        )
        errors.append([error(half, weight, factors, "w8a8") for half in np.split(x, 2)])
    assert errors[0][0] < errors[1][0]
    assert errors[1][1] < errors[0][1]


def test_wrong_use_is_told() -> None:
    config, params = CONFIGS["qwen2"], random_params(CONFIGS["qwen2"])
    x, _, weight = linear(1)
    for bad in ((np.nan, x, weight), (np.inf, weight, x)):
        broken = bad[1].copy()
        broken[2, 5] = bad[0]
        a, b = (broken, weight) if bad[1] is x else (x, broken)
        with pytest.raises(NonFiniteError, match=r"layers\.0\.it: its inputs or weights are NaN or infinite"):
            fitted_factors(jnp.asarray(a), jnp.asarray(b), jnp.ones(len(a)), alpha=0.5, scheme="w8a8", name="layers.0.it")
    for nothing in ([], [[]]):
        with pytest.raises(ConfigError, match="need samples, and the calibration has none"):
            fit_smoothing(params, config, nothing, scheme="w8a8", sequence_length=64)
    node = params["layers"][1]["mlp"]["down"]
    node["weight"] = node["weight"].at[3, 4].set(np.nan)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down\.weight"):
        fit_smoothing(params, config, [[1, 2]], scheme="w8a8", sequence_length=64)


def test_samples_are_cut_and_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many tokens in all, and of each: what is behind them changes nothing."""
    monkeypatch.setattr("llmjax.quantization.fitted_smoothing.MOST_TOKENS", 40)
    assert MOST_TOKENS > 40
    config, params = CONFIGS["qwen2"], random_params(CONFIGS["qwen2"])
    told: list[tuple[int, int]] = []
    samples = [[*range(1, 31)], [], [*range(40, 80)]]
    cut = [[*range(1, 26)], [*range(40, 55)]]
    one, other = (
        fit_smoothing(
            params, config, given, scheme="w8a8", sequence_length=25, progress=lambda done, total: told.append((done, total))
        )
        for given in (samples, cut)
    )
    assert told == [(1, 2), (2, 2)] * 2
    for name in ("attention_norm", "mlp_norm"):
        np.testing.assert_array_equal(one["layers"][1][name]["weight"], other["layers"][1][name]["weight"])
