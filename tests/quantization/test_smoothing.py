"""Smoothing leaves the float model as it is, and takes the outliers out of its activations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, naive_logits, random_params

from llmjax.errors import ConfigError
from llmjax.quantization.calibrate import CalibrateSettings, calibrate
from llmjax.quantization.fitted_smoothing import fit_smoothing
from llmjax.quantization.smoothing import smooth, smoothing_factors

IDS = list(range(3, 40))


def with_outliers(name: str) -> dict:
    """A tiny model one channel of whose norms and of whose up projections is far larger than the others, and one is zero."""
    params = random_params(CONFIGS[name])
    for layer in params["layers"].values():
        for norm in ("attention_norm", "mlp_norm"):
            layer[norm]["weight"] = layer[norm]["weight"].at[5].set(100.0).at[6].set(0.0)
        up = CONFIGS[name].mlp_size + np.asarray([9, 6])  # of what the down projection reads, likewise
        for part, value in layer["mlp"]["gate_up"].items():
            layer["mlp"]["gate_up"][part] = value.at[up[0]].multiply(1000.0).at[up[1]].set(0.0)
        layer["mlp"]["down"]["weight"] = layer["mlp"]["down"]["weight"].at[:, 9].multiply(0.001)
    return params


@pytest.mark.parametrize("name", ["qwen2", "mixed-window"])
@pytest.mark.parametrize(("alpha", "rounding"), [(0.5, 2e-5), (0.85, 2e-5), (None, 5e-5)])
def test_the_float_model_is_unchanged(name: str, alpha: float | None, rounding: float) -> None:
    config, params = CONFIGS[name], with_outliers(name)
    before = jax.tree.map(np.array, params)
    calibration = calibrate(params, config, [IDS], CalibrateSettings())
    if alpha is None:
        smoothed = fit_smoothing(params, config, [IDS], scheme="w8a8", sequence_length=64)
    else:
        smoothed = smooth(params, config, calibration, alpha=alpha)
    jax.tree.map(np.testing.assert_array_equal, before, params)  # the given tree is as it was
    assert jax.tree.structure(smoothed) == jax.tree.structure(params)
    assert [a.dtype for a in jax.tree.leaves(smoothed)] == [a.dtype for a in jax.tree.leaves(params)]
    want, got = (
        naive_logits(p, IDS, config)[:, : config.num_tokens] for p in (params, smoothed)
    )  # float64: only the factors' folding rounds
    np.testing.assert_allclose(got, want, rtol=0, atol=rounding * np.abs(want).max())
    again = calibrate(smoothed, config, [IDS], CalibrateSettings())
    for linear in ("layers.0.attention.qkv", "layers.1.mlp.gate_up", "layers.1.mlp.down"):
        old, new = (c.linears[linear].channel_absmax for c in (calibration, again))
        assert old.max() / np.median(old) > 50
        assert new.max() / np.median(new) < old.max() / np.median(old) / 5
        assert new[6] == old[6] == 0


def test_factors_are_those_of_the_paper() -> None:
    random = np.random.default_rng(0)
    weight, absmax = random.standard_normal((7, 5)).astype(np.float32), random.uniform(0.1, 9, 5).astype(np.float32)
    absmax[3], weight[:, 4] = 0, 0
    got = smoothing_factors(absmax, weight, alpha=0.3)
    for channel in range(3):
        want = float(absmax[channel]) ** 0.3 / float(np.abs(weight[:, channel]).max()) ** 0.7
        assert got[channel] == pytest.approx(want, rel=1e-6)
    assert got[3] == got[4] == 1
    np.testing.assert_allclose(smoothing_factors(absmax, weight, alpha=1)[:3], absmax[:3], rtol=1e-6)


def test_wrong_use_is_told() -> None:
    with pytest.raises(ConfigError, match=r"between 0 and 1, got 1\.5"):
        smoothing_factors(np.ones(3), np.ones((2, 3)), alpha=1.5)
    with pytest.raises(ConfigError, match="4 activation channels for a weight of 3 columns"):
        smoothing_factors(np.ones(4), np.ones((2, 3)), alpha=0.5)
    with pytest.raises(ConfigError, match="NaN or infinite"):
        smoothing_factors(np.ones(3), np.full((2, 3), np.nan), alpha=0.5)
    with pytest.raises(ConfigError, match="NaN or infinite"):
        smoothing_factors(np.ones(96), jnp.ones((300, 96)).at[2, 5].set(np.nan), alpha=0.5)
    config, params = CONFIGS["qwen2"], random_params(CONFIGS["qwen2"])
    calibration = calibrate(params, config, [[1]], CalibrateSettings())
    del calibration.linears["layers.1.mlp.gate_up"]
    with pytest.raises(ConfigError, match=r"has no layers\.1\.mlp\.gate_up"):
        smooth(params, config, calibration)


def test_a_factor_that_does_not_fit_float16_is_refused() -> None:
    calibration = calibrate(random_params(CONFIGS["qwen2"]), CONFIGS["qwen2"], [[1, 2]], CalibrateSettings())
    config = CONFIGS["qwen2"].replace(dtype="float16")
    params = random_params(config)
    calibration.linears["layers.0.attention.qkv"].channel_absmax[:] = 1e7
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.qkv: smoothing: a factor does not fit"):
        smooth(params, config, calibration, alpha=1.0)
