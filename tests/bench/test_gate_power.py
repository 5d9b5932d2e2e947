"""The sabotages do what they say to a copy, and nothing else; sound models are within half a step of the weights."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from bench.gate_power import KINDS, LINEARS, Written, linears, sabotages, sound_models
from llmjax.quantization.calibrate import CalibrateSettings, calibrate
from llmjax.quantization.loops import is_loop
from llmjax.quantization.smoothing import smooth

CONFIG = CONFIGS["llama"]


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


def weights(params) -> dict[tuple[int, str, str], np.ndarray]:
    return {place: np.asarray(params["layers"][place[0]][place[1]][place[2]]["weight"]) for place in linears(CONFIG)}


def test_each_sabotage_changes_what_it_says(params):
    before = copy.deepcopy(jax.tree.map(np.asarray, params))
    own, seen = weights(params), []
    for kind, what, bad in sabotages(params, CONFIG, 4 * len(KINDS), seed=5):
        found = weights(bad)
        changed = {place for place in own if not np.array_equal(own[place], found[place])}
        seen.append(kind)
        if kind == "scale":
            ((layer, _, name),) = changed
            assert what.startswith(f"layer {layer} {name} x")
            factor = found[changed.pop()] / next(own[place] for place in own if place[0] == layer and place[2] == name)
            assert factor == pytest.approx(float(what.rpartition("x")[2]), abs=0.006)
            assert 2 <= factor.mean() <= 8
        elif kind == "swap":
            assert all(np.array_equal(found[place], own[(1 - place[0], *place[1:])]) for place in own)
        elif kind == "head":
            (place,) = changed
            lost = np.flatnonzero((found[place] == 0).all(0))
            assert len(lost) == CONFIG.head_dim
            assert what == f"layer {place[0]} head {lost[0] // CONFIG.head_dim}"
        elif kind == "blind":
            assert len(changed) == len(LINEARS) * int(what.split()[0])
        else:
            assert bad is params
    assert seen == list(KINDS) * 4
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(old, new)


def test_sound_models_are_within_half_a_step(params):
    """Smoothed ones of the smoothed weights, which compute the same."""
    random = np.random.default_rng(4)
    seen = calibrate(params, CONFIG, [random.integers(0, CONFIG.num_tokens, 40).tolist()], CalibrateSettings())
    for number, (what, good) in enumerate(sound_models(params, CONFIG, 6, seed=5, seen=seen)):
        alpha = float(what.rpartition(" ")[2]) if "smoothed" in what else None
        own, found = weights(params if alpha is None else smooth(params, CONFIG, seen, alpha=alpha)), weights(good)
        assert (alpha is None) == (number % 2 == 1 or number == 0)
        changed = [place for place in own if not np.array_equal(own[place], found[place])]
        if number == 0:
            assert (what, changed) == ("the model itself", [])
        else:
            assert what.startswith(f"int8 in {len(changed)} of {len(own)} linears")
            assert len(changed) >= len(own) // 2
        for place in changed:
            step = np.abs(own[place]).max(1, keepdims=True) / 127
            assert (np.abs(own[place] - found[place]) <= step * 0.5001).all()


def test_written_outputs_loop_only_when_they_are_to():
    text = list(range(200))
    assert not any(is_loop(one.token_ids) for one in Written(text).greedy(["a"] * 9, 64))
    assert all(is_loop(one.token_ids) and len(one.token_ids) == 64 for one in Written(text, 5).greedy(["a"] * 9, 64))
