"""Rotary frequencies against independent float64 formulas: every kind, every spelling, positions around the trained length."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_checkpoints import tiny_config

from llmjax.errors import UnsupportedModelError
from llmjax.model.config import ModelConfig, RopeScaling
from llmjax.model.hf_config import parse_hf_config
from llmjax.model.rope import cos_sin, inv_frequencies, yarn_attention_factor

ORIGINAL = 1024
CONTEXT = 4096


def base_frequencies(theta: float, size: int) -> np.ndarray:
    return np.array([theta ** (-2 * i / size) for i in range(size // 2)])


def llama3(theta: float, size: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    out = []
    for frequency in base_frequencies(theta, size):
        turns = original * frequency / (2 * math.pi)  # how often a pair turns within the trained length
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        out.append(frequency * (share + (1 - share) / factor))
    return np.array(out)


def yarn(
    theta: float, size: int, factor: float, original: int, fast: float = 32, slow: float = 1, truncate: bool = True
) -> np.ndarray:
    def pair(turns: float) -> float:  # the (fractional) pair that turns so often within the trained length
        return size / 2 * math.log(original / (2 * math.pi * turns), theta)

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    out = []
    for i, frequency in enumerate(base_frequencies(theta, size)):
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append(frequency * (1 - stretched) + frequency / factor * stretched)
    return np.array(out)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# name, scaling settings without the kind's key, kind, expected frequencies (theta, size) -> [H/2], expected attention factor
TABLE = [
    ("none", None, None, base_frequencies, 1.0),
    ("default", {}, "default", base_frequencies, 1.0),
    ("linear", {"factor": 4.0}, "linear", lambda t, s: base_frequencies(t, s) / 4.0, 1.0),
    ("dynamic", {"factor": 2.0}, "dynamic", base_frequencies, 1.0),
    (
        "llama3",
        {**LLAMA3, "original_max_position_embeddings": ORIGINAL},
        "llama3",
        lambda t, s: llama3(t, s, 8.0, 1.0, 4.0, ORIGINAL),
        1.0,
    ),
    ("llama3 without original", LLAMA3, "llama3", lambda t, s: llama3(t, s, 8.0, 1.0, 4.0, CONTEXT), 1.0),
    (
        "yarn",
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        "yarn",
        lambda t, s: yarn(t, s, 4.0, ORIGINAL),
        0.1 * math.log(4.0) + 1,
    ),
    ("yarn without original", {"factor": 4.0}, "yarn", lambda t, s: yarn(t, s, 4.0, CONTEXT), 0.1 * math.log(4.0) + 1),
    (
        "yarn without factor",
        {"original_max_position_embeddings": ORIGINAL},
        "yarn",
        lambda t, s: yarn(t, s, 4.0, ORIGINAL),
        0.1 * math.log(4.0) + 1,
    ),
    (
        "yarn mscale",
        {
            "factor": 40.0,
            "original_max_position_embeddings": ORIGINAL,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
            "beta_fast": 24,
            "beta_slow": 2,
            "truncate": False,
        },
        "yarn",
        lambda t, s: yarn(t, s, 40.0, ORIGINAL, 24, 2, truncate=False),
        (0.1 * math.log(40.0) + 1) / (0.08 * math.log(40.0) + 1),
    ),
    (
        "yarn attention_factor",
        {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3, "mscale": 1.0},
        "yarn",
        lambda t, s: yarn(t, s, 4.0, ORIGINAL),
        1.3,
    ),
]  # fmt: skip


def spelled(spelling: str, settings: dict | None, kind: str | None, theta: float, head_dim: int) -> ModelConfig:
    common = {"head_dim": head_dim, "max_position_embeddings": CONTEXT, "rope_theta": None}
    if spelling == "rope_parameters":
        rope = {"rope_parameters": {"rope_theta": theta, **({"rope_type": kind} if kind else {}), **(settings or {})}}
    else:
        rope = {"rope_scaling": None if settings is None else {spelling: kind, **settings}, "rope_theta": theta}
    return parse_hf_config({**tiny_config(**common), **rope})


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize(("settings", "kind", "expected", "factor"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 16), (500000.0, 80)])
def test_frequencies_of_every_kind_and_spelling(spelling, settings, kind, expected, factor, theta, head_dim):
    config = spelled(spelling, settings, kind, theta, head_dim)
    frequencies, attention_factor = inv_frequencies(config)
    assert frequencies.dtype == np.float32
    assert frequencies.shape == (head_dim // 2,)
    wanted = expected(theta, head_dim)
    np.testing.assert_allclose(frequencies, wanted, rtol=2e-6)  # yarn blends in float32, as transformers does
    assert attention_factor == pytest.approx(factor, rel=1e-12)

    positions = np.array([0, ORIGINAL - 1, ORIGINAL, 4 * ORIGINAL - 1])
    cos, sin = cos_sin(jnp.asarray(positions), config)
    assert cos.dtype == sin.dtype == jnp.float32
    # float32 angles of size p carry an error of a few p * 2**-24.
    angles = positions[:, None] * wanted
    np.testing.assert_allclose(cos, factor * np.cos(angles), atol=2e-3)
    np.testing.assert_allclose(sin, factor * np.sin(angles), atol=2e-3)


def test_an_original_length_at_top_level_comes_first():
    config = tiny_config(max_position_embeddings=CONTEXT, original_max_position_embeddings=ORIGINAL)
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    assert parse_hf_config(config).rope_scaling.original_max_positions == ORIGINAL


def test_dynamic_stretches_by_the_tokens_own_position():
    size, theta, factor = 16, 10000.0, 4.0
    config = spelled("type", {"factor": factor}, "dynamic", theta, size)
    assert config.max_positions == factor * CONTEXT
    positions = np.array([0, CONTEXT - 1, CONTEXT, 4 * CONTEXT])
    cos, sin = cos_sin(jnp.asarray(positions), config)
    for row, position in enumerate(positions):
        length = max(int(position) + 1, CONTEXT)
        base = theta * (factor * length / CONTEXT - (factor - 1)) ** (size / (size - 2))
        angles = position * base_frequencies(base, size)
        np.testing.assert_allclose(cos[row], np.cos(angles), atol=4e-3)
        np.testing.assert_allclose(sin[row], np.sin(angles), atol=4e-3)
    # Chunking and batching change nothing: each position alone gives the same bits.
    for row, position in enumerate(positions):
        np.testing.assert_array_equal(cos_sin(jnp.asarray([position]), config)[0][0], cos[row])


def test_frequency_factors_divide_pair_by_pair():
    factors = tuple(float(2**i) for i in range(8))
    config = parse_hf_config(tiny_config()).replace(rope_scaling=RopeScaling(kind="factors", frequency_factors=factors))
    np.testing.assert_allclose(inv_frequencies(config)[0], base_frequencies(10000.0, 16) / factors, rtol=3e-7)
    with pytest.raises(UnsupportedModelError, match="8 rope frequency factors for 16 rotated pairs"):
        inv_frequencies(config.replace(head_dim=32))


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize("kind", ["longrope", "su", "proportional", "mrope", "yarn2"])
def test_an_unknown_kind_is_refused_by_name(spelling, kind):
    with pytest.raises(UnsupportedModelError, match=f"'{kind}' is not supported; known: .*yarn"):
        spelled(spelling, {"factor": 4.0}, kind, 10000.0, 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be a positive number"),
        ({"rope_type": "linear", "factor": math.nan}, "factor must be a positive number"),
        ({"rope_type": "yarn", "factor": 1e400}, "factor must be a positive number"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor is missing"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor 4.0 above"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": -5}, "max_position_embeddings must be"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}, "differs by layer type"),
        ([4.0], "must be an object"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(UnsupportedModelError, match=message):
        parse_hf_config({**tiny_config(), "rope_scaling": settings})


def test_scaling_without_a_trained_length_is_refused():
    with pytest.raises(UnsupportedModelError, match="needs original_max_positions"):
        RopeScaling(kind="yarn", factor=2.0)


def test_yarn_factor_of_no_stretch_is_one():
    assert yarn_attention_factor(RopeScaling(kind="yarn", factor=1.0, original_max_positions=64)) == 1.0


def test_tables_can_be_traced():
    config = spelled("type", {"factor": 2.0}, "dynamic", 10000.0, 16)
    positions = jnp.asarray([0, 5, 9000])
    traced = jax.jit(lambda p: cos_sin(p, config))(positions)
    np.testing.assert_allclose(traced[0], cos_sin(positions, config)[0], atol=1e-3)
