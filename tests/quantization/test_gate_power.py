"""The gate tells good from bad, on a model that has learnt something: random sabotages are refused, sound int8 models are not.

`bench/gate_power.py` does the same to SmolLM2.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from trained_model import CONFIG, texts, trained_params

from bench.gate_power import KINDS, Kept, sabotages, sound_models, verdict_of
from llmjax.quantization.agreement import compare
from llmjax.quantization.forward_model import ForwardModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    """Trained, and with the few large channels that real models have: what blind int8 breaks on."""
    return with_outliers(trained_params(120))


def with_outliers(params: dict[str, Any], factor: float = 128.0, channels: int = 3) -> dict[str, Any]:
    """The same function exactly: some channels of each MLP are larger by a power of two going in, and smaller going out."""
    layers = {}
    for index, layer in params["layers"].items():
        which = np.random.default_rng(index).permutation(CONFIG.mlp_size)[:channels]
        scale = jnp.ones(CONFIG.mlp_size).at[which].set(factor)
        gate, up = jnp.split(layer["mlp"]["gate_up"]["weight"], 2)
        gate_up = {"weight": jnp.concatenate([gate, up * scale[:, None]])}
        down = {"weight": layer["mlp"]["down"]["weight"] / scale}
        layers[index] = layer | {"mlp": {"gate_up": gate_up, "down": down}}
    return params | {"layers": layers}


def test_of_50_sabotages_95_percent_are_refused_and_of_20_sound_models_none(params):
    held_out = texts(32, seed=7)
    baseline = Kept(ForwardModel(params, CONFIG))
    seed = int(np.random.default_rng(3).integers(2**31))
    missed, asked = [], Counter[str]()
    for kind, what, candidate in sabotages(params, CONFIG, 50, seed):
        asked[kind] += 1
        verdict = verdict_of(baseline, candidate, CONFIG, held_out, loop=kind == "loop")
        assert verdict.quality.agreement.baseline_perplexity < 8  # of 64 tokens: it has learnt something
        if kind == "loop":
            assert verdict.refused == ("loop_rate_increase",)
        if verdict.passed:
            missed.append(f"{kind}: {what}")
    assert set(asked.values()) == {50 // len(KINDS)}
    assert len(missed) <= 2, missed
    for what, candidate in sound_models(params, CONFIG, 20, seed):
        verdict = verdict_of(baseline, candidate, CONFIG, held_out, loop=False)
        assert verdict.passed, f"{what}: {verdict.line()}"


def test_the_outliers_change_nothing_but_the_weights(params):
    held_out = texts(4, seed=8)
    plain = with_outliers(params, factor=1 / 128)
    found = compare(ForwardModel(params, CONFIG), ForwardModel(plain, CONFIG), held_out)
    assert found.kl_max < 1e-6
