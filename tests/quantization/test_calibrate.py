"""Calibration runs: the statistics are those of the inputs, whole or cut off and resumed, and bad input is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from llmjax.errors import ConfigError, ModelError, NonFiniteError, StoreError
from llmjax.quantization import log_bins
from llmjax.quantization.calibrate import CHECKPOINT, CalibrateSettings, calibrate
from llmjax.quantization.calibration import Calibration
from llmjax.quantization.layer_walk import embed, linear_names, pack, run_layer

CONFIG = CONFIGS["qwen2"]
PARAMS = random_params(CONFIG)
RANDOM = np.random.default_rng(0)
SAMPLES = [RANDOM.integers(0, 290, length).tolist() for length in (3, 40, 1, 9, 64, 17, 30, 30, 5, 70, 2)]
SETTINGS = CalibrateSettings(sequence_length=64, checkpoint_every=1)


class CutOffError(Exception):
    """Somebody pulls the plug."""


def equal(one: Calibration, other: Calibration) -> bool:
    numbers = ("identity", "samples", "tokens", "cut", "empty")
    same = all(getattr(one, name) == getattr(other, name) for name in numbers) and list(one.linears) == list(other.linears)
    same = same and np.array_equal(one.lengths, other.lengths)
    for name, linear in one.linears.items():
        theirs = other.linears[name]
        for ours, its in ((linear.tensor, theirs.tensor), (linear.token, theirs.token)):
            same = same and np.array_equal(ours.counts, its.counts) and np.array_equal(ours.absmax, its.absmax)
        same = same and np.array_equal(linear.channel_absmax, theirs.channel_absmax)
    return same


def exact_inputs(samples: list[list[int]]) -> dict[str, np.ndarray]:
    """What goes into each linear, all of it kept, each sample run alone."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in linear_names(CONFIG)}
    for sample in samples:
        packed = pack([sample])
        x = embed(PARAMS, packed, config=CONFIG)
        for index in range(CONFIG.num_layers):
            x, inputs = run_layer(PARAMS, index, x, packed, config=CONFIG)
            for given in inputs:
                found[given.name].append(np.asarray(given.x)[: len(sample)])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def test_statistics_are_those_of_the_inputs() -> None:
    calibration = calibrate(PARAMS, CONFIG, SAMPLES, SETTINGS)
    exact = exact_inputs([sample[:64] for sample in SAMPLES])
    assert list(calibration.linears) == linear_names(CONFIG)
    assert (calibration.samples, calibration.tokens, calibration.cut) == (11, 265, 1)
    np.testing.assert_array_equal(calibration.lengths, log_bins.histogram(np.asarray([len(s) for s in SAMPLES])))
    for name, linear in calibration.linears.items():
        x = np.abs(exact[name].astype(np.float64))
        assert linear.tensor.counts.sum() == x.size
        assert linear.token.counts.sum() == len(x) == 265
        np.testing.assert_allclose(linear.channel_absmax, x.max(0), rtol=1e-4)
        np.testing.assert_allclose(linear.tensor.absmax, x.max(), rtol=1e-4)
        for observer, values in ((linear.tensor, x), (linear.token, x.max(1))):
            want = np.percentile(values, 90, method="inverted_cdf")
            got = observer.range("percentile", percent=90)[0]
            assert want * (1 - 1e-4) <= got <= want * (1 + log_bins.RELATIVE_ERROR) * (1 + 1e-4)


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_cut_off_goes_on_with_the_same_numbers(tmp_path: Path, after: int) -> None:
    whole = calibrate(PARAMS, CONFIG, SAMPLES, SETTINGS)
    calls: list[int] = []

    def pull_the_plug(done: int, total: int) -> None:
        assert total == 11
        calls.append(done)
        if len(calls) == after + 1:
            raise CutOffError

    with pytest.raises(CutOffError):
        calibrate(PARAMS, CONFIG, SAMPLES, SETTINGS, directory=tmp_path, progress=pull_the_plug)
    begun: list[int] = []
    resumed = calibrate(PARAMS, CONFIG, SAMPLES, SETTINGS, directory=tmp_path, progress=lambda done, _: begun.append(done))
    assert begun[0] == calls[-1] > 0  # it went on, and did not begin again
    assert begun[-1] == 11
    assert equal(whole, resumed)
    assert equal(whole, Calibration.load(tmp_path / CHECKPOINT))
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    again = calibrate({**PARAMS, "embed": None}, CONFIG, SAMPLES, SETTINGS, directory=tmp_path)  # nothing is run any more
    assert equal(whole, again)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    def run(samples: list[list[int]] = SAMPLES[:2], length: int = 64, model: str = "a") -> Calibration:
        settings = CalibrateSettings(sequence_length=length)
        return calibrate(PARAMS, CONFIG, samples, settings, model_identity=model, directory=tmp_path)

    run()
    changes: list[dict[str, Any]] = [{"samples": SAMPLES[1:3]}, {"length": 63}, {"model": "b"}]
    for change in changes:
        with pytest.raises(ConfigError, match="is of another model, other samples or settings"):
            run(**change)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"no archive at all"])
def test_a_damaged_checkpoint_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(StoreError, match="is damaged or no calibration") as error:
        calibrate(PARAMS, CONFIG, SAMPLES, SETTINGS, directory=tmp_path)
    assert "\n" not in str(error.value)


def test_a_checkpoint_cut_anywhere_is_told(tmp_path: Path) -> None:
    calibrate(PARAMS, CONFIG, SAMPLES[:2], SETTINGS, directory=tmp_path)
    data = (tmp_path / CHECKPOINT).read_bytes()
    for share in (0.1, 0.5, 0.99):
        (tmp_path / CHECKPOINT).write_bytes(data[: int(len(data) * share)])
        with pytest.raises(StoreError, match="is damaged"):
            Calibration.load(tmp_path / CHECKPOINT)
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 0x55
    (tmp_path / CHECKPOINT).write_bytes(flipped)
    with pytest.raises(StoreError, match="is damaged"):
        Calibration.load(tmp_path / CHECKPOINT)


def test_long_and_empty_samples_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        calibration = calibrate(PARAMS, CONFIG, [[], SAMPLES[4], SAMPLES[9], []], CalibrateSettings(sequence_length=63))
    assert (calibration.samples, calibration.tokens, calibration.cut, calibration.empty) == (2, 126, 2, 2)
    assert "2 of 2 samples are longer than 63 tokens" in caplog.text
    assert "2 samples are empty" in caplog.text
    short = calibrate(PARAMS, CONFIG.replace(max_positions=10), SAMPLES[4:5], SETTINGS)
    assert (short.tokens, short.cut) == (10, 1)


def test_samples_are_chosen_by_the_seed() -> None:
    def lengths(seed: int) -> list[int]:
        settings = CalibrateSettings(samples=4, seed=seed, sequence_length=64)
        return calibrate(PARAMS, CONFIG, SAMPLES, settings).lengths.tolist()

    assert lengths(1) == lengths(1) != lengths(2)
    assert sum(lengths(1)) == 4


@pytest.mark.parametrize("samples", [[], [[]], [[], []]])
def test_nothing_to_run_is_an_error_of_one_line(samples: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give at least one text with a token"):
        calibrate(PARAMS, CONFIG, samples, SETTINGS, directory=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_ids_of_another_vocabulary_are_refused() -> None:
    for bad in ([1, 290], [-1, 3]):
        with pytest.raises(ConfigError, match=r"sample 1 has token ids from .* the model knows 0 to 289"):
            calibrate(PARAMS, CONFIG, [[1], bad], SETTINGS)


@pytest.mark.parametrize("name", ["samples", "sequence_length", "checkpoint_every"])
def test_settings_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
        CalibrateSettings(**{name: 0})


def test_inputs_that_are_not_finite_are_refused_by_the_linear(tmp_path: Path) -> None:
    params = random_params(CONFIG)
    calibrate(params, CONFIG, SAMPLES[:1], SETTINGS, directory=tmp_path)
    params["layers"][1]["mlp_norm"]["weight"] = params["layers"][1]["mlp_norm"]["weight"].at[3].set(jnp.inf)
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.gate_up: \d+ of its inputs are NaN or infinite in samples 0 to 2"):
        calibrate(params, CONFIG, SAMPLES[:3], SETTINGS, directory=tmp_path / "bad")
    assert not (tmp_path / "bad" / CHECKPOINT).exists()


@pytest.mark.parametrize("value", [jnp.nan, -jnp.inf])
def test_a_bad_weight_is_refused_by_its_name(value: float) -> None:
    """Of the last linear, whose output goes into no other."""
    params = random_params(CONFIG)
    node = params["layers"][1]["mlp"]["down"]
    node["weight"] = node["weight"].at[4, 7].set(value)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down\.weight: 1 values are NaN or infinite, the first at \[4, 7\]"):
        calibrate(params, CONFIG, SAMPLES[:1], SETTINGS)
