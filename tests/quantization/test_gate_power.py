"""The gate tells good from bad, on a model that has learnt something: random sabotages are refused, sound int8 models are not.

`bench/gate_power.py` does the same to SmolLM2.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from trained_model import CONFIG, texts, trained_params

from bench.gate_power import KINDS, LIMITS, Kept, quality_of, sabotages, sound_models
from llmjax.quantization.agreement import compare
from llmjax.quantization.calibrate import CalibrateSettings, calibrate
from llmjax.quantization.calibration import Calibration
from llmjax.quantization.forward_model import ForwardModel
from llmjax.quantization.gate import judge

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    """Trained, and with the few large channels that real models have: what blind int8 breaks on."""
    return with_outliers(trained_params(160))


def with_outliers(params: dict[str, Any], factor: float = 128.0) -> dict[str, Any]:
    """The same function exactly: of each layer one pair of dimensions that turn together is larger in a group's queries by a
    power of two, and smaller in its keys. A scale a channel takes that up, one scale a tensor does not."""
    heads, groups, size = CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
    layers = {}
    for index, layer in params["layers"].items():
        scale = np.ones((heads + 2 * groups, size), np.float32)
        pair = [index % (size // 2), index % (size // 2) + size // 2]
        scale[: heads // groups, pair] = factor
        scale[heads, pair] = 1 / factor
        qkv = {"weight": layer["attention"]["qkv"]["weight"] * scale.reshape(-1, 1)}
        layers[index] = layer | {"attention": layer["attention"] | {"qkv": qkv}}
    return params | {"layers": layers}


@pytest.fixture(scope="module")
def baseline(params) -> Kept:
    return Kept(ForwardModel(params, CONFIG))


@pytest.fixture(scope="module")
def seen(params) -> Calibration:
    return calibrate(params, CONFIG, texts(16, seed=9), CalibrateSettings(sequence_length=256))


@pytest.mark.parametrize("seed", [1742692732, 20, 21])
def test_of_50_sabotages_95_percent_are_refused_and_of_20_sound_models_none(baseline, seen, seed):
    """By the default limits. What the whole model says refuses nine of ten by itself: a lost head turns over few words."""
    held_out, params = texts(32, seed=7), baseline.model.params
    asked, missed = Counter[str](), {name: list[str]() for name in LIMITS}
    for kind, what, candidate in sabotages(params, CONFIG, 50, seed):
        quality = quality_of(baseline, candidate, held_out, loop=kind == "loop")
        assert quality.agreement.baseline_perplexity < 8  # of 64 tokens: it has learnt something
        asked[kind] += 1
        if kind == "loop":
            assert judge(quality, LIMITS["default"]).refused == ("loop_rate_increase",)
        for name, own in LIMITS.items():
            missed[name] += [f"{kind}: {what}"] * judge(quality, own).passed
    assert set(asked.values()) == {50 // len(KINDS)}
    assert len(missed["default"]) <= 2, missed
    assert len(missed["said"]) <= 6, missed
    assert all(one.startswith("head") for one in missed["said"]), missed
    for what, candidate in sound_models(params, CONFIG, 20, seed, seen):
        quality = quality_of(baseline, candidate, held_out, loop=False)
        for name, own in LIMITS.items():
            assert (verdict := judge(quality, own)).passed, f"{what}, {name}: {verdict.line()}"


def test_the_outliers_change_nothing_but_the_weights(params):
    held_out = texts(4, seed=8)
    plain = with_outliers(params, factor=1 / 128)
    found = compare(ForwardModel(params, CONFIG), ForwardModel(plain, CONFIG), held_out)
    assert found.kl_max < 1e-6
