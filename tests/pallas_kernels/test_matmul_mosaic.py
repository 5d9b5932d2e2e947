"""The weight-streaming kernel in the interpreter against float64: every epilogue, split, and way to share work, on few tiles.

What is left unwritten reads as NaN there, and so do weights that belong to nobody.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.matmul import DENSE, GATED_DENSE, RESIDUAL_DENSE, dense, gated_dense, residual_dense
from pallas_kernels.matmul.mosaic_plan import COPY_REGISTERS, SHARED_BYTES, Config, candidates, default_config, make_plan

ONE = Config(rows=1, block_k=64, stages=2, clusters=2)
SPLIT = dataclasses.replace(ONE, splits=2, clusters=1, reduce="global")
AFTER = dataclasses.replace(ONE, splits=2, clusters=1, reduce="after")
PEERS = dataclasses.replace(ONE, share=2, clusters=1)


class Draw:
    """bfloat16 arrays of a test's own random stream, and the same numbers in float64."""

    def __init__(self, name: str) -> None:
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.random.standard_normal(shape), jnp.bfloat16)


@pytest.fixture
def draw(request):
    return Draw(request.node.name)


def wide(x):
    return np.asarray(x, np.float64)


def interpreted(operation, *args, **kwargs):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        result = np.asarray(operation(*args, implementation="mosaic", **kwargs))
    assert not interpret_pallas_call.get_races().races_found
    return result


def close(result, right, rounding=2.0**-8):
    """Within the rounding of the result and, near zero, the error of float32 sums."""
    np.testing.assert_allclose(wide(result), right, rtol=rounding, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    ("tokens", "out", "depth", "config"),
    [
        (1, 192, 192, ONE),  # one token, tiles that do not divide among the clusters
        (5, 128, 128, dataclasses.replace(ONE, rows=2, stages=3)),  # fewer steps than stages
        (8, 192, 320, dataclasses.replace(ONE, rows=2)),  # a tile beyond the last row; more steps than stages
        (17, 64, 128, dataclasses.replace(ONE, columns=2)),  # padded to 32
        (8, 128, 320, SPLIT),  # the second split ends beyond the contraction
        (16, 128, 256, dataclasses.replace(SPLIT, block_k=128)),  # both CTAs finish a part
        (16, 192, 192, PEERS),
        (8, 192, 320, dataclasses.replace(ONE, depth=2, block_k=128)),  # two warpgroups divide a step
    ],
)
def test_dense(draw, tokens, out, depth, config):
    x, w = draw(tokens, depth), draw(out, depth)
    result = interpreted(DENSE, x, w, None, out_dtype=None, config=config)
    assert result.shape == (tokens, out)
    assert result.dtype == jnp.bfloat16
    close(result, wide(x) @ wide(w).T)


@pytest.mark.parametrize("config", [ONE, SPLIT, AFTER], ids=["one", "split", "after"])
def test_residual_and_bias_are_added_before_the_only_rounding(draw, config):
    x, w, residual, bias = draw(8, 192), draw(128, 192), draw(8, 128), draw(128)
    result = interpreted(RESIDUAL_DENSE, x, w, residual, bias, config=config)
    assert result.dtype == jnp.bfloat16
    close(result, wide(x) @ wide(w).T + wide(bias) + wide(residual))


def test_parts_too_large_for_one_message_go_in_several(draw, monkeypatch):
    monkeypatch.setattr("pallas_kernels.matmul.mosaic_plan._INBOX", 2 * 64 * 4 * 8)
    config = dataclasses.replace(SPLIT, splits=2)
    x, w, residual = draw(24, 128), draw(128, 128), draw(24, 128)
    plan = make_plan({"tokens": 24, "in": 128, "out": 128}, config)
    assert (plan.parts, plan.part, plan.piece) == (1, 24, 8)
    result = interpreted(RESIDUAL_DENSE, x, w, residual, None, config=config)
    close(result, wide(x) @ wide(w).T + wide(residual))


@pytest.mark.parametrize(
    ("activation", "config"),
    [("silu", ONE), ("gelu_tanh", SPLIT), ("silu", AFTER)],
    ids=["one", "split", "after"],
)
def test_gate(draw, activation, config):
    x, w = draw(5, 192) * 0.3, draw(256, 192)
    result = interpreted(GATED_DENSE, x, w, activation, config=config)
    gate, up = np.split(wide(x) @ wide(w).T, 2, axis=-1)
    if activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    assert result.shape == (5, 128)
    close(result, gate * up)


def test_float32_output_keeps_the_sums(draw):
    x, w, bias = draw(8, 192), draw(128, 192), draw(128)
    result = interpreted(DENSE, x, w, bias, out_dtype=jnp.float32, config=SPLIT)
    assert result.dtype == jnp.float32
    close(result, wide(x) @ wide(w).T + wide(bias), rounding=1e-5)


def test_tokens_do_not_touch_each_other(draw):
    """A NaN in one token stays in its own row; one in the weights stays in its own column."""
    x, w = draw(8, 128), draw(128, 128)
    spoilt = interpreted(DENSE, x.at[3, 5].set(jnp.nan), w.at[70, 9].set(jnp.nan), None, out_dtype=None, config=SPLIT)
    hurt = np.zeros((8, 128), bool)
    hurt[3], hurt[:, 70] = True, True
    np.testing.assert_array_equal(np.isnan(wide(spoilt)), hurt)
    close(spoilt[~hurt], (wide(x) @ wide(w).T)[~hurt])


def test_the_hint_changes_nothing(draw):
    x, w = draw(8, 128), draw(128, 128)
    poison = jnp.full((128, 256), jnp.nan, jnp.bfloat16)
    plain = interpreted(DENSE, x, w, None, out_dtype=None, config=ONE)
    hinted = interpreted(DENSE, x, w, None, out_dtype=None, upcoming=poison, config=ONE)
    np.testing.assert_array_equal(wide(plain), wide(hinted))


def arrays(tokens=8, out=128, depth=128, dtype="bfloat16"):
    return jnp.ones((tokens, depth), dtype), jnp.ones((out, depth), dtype)


@pytest.mark.parametrize(
    ("reason", "call"),
    [
        ("not float32 by float32", lambda: dense(*arrays(dtype="float32"), implementation="mosaic")),
        ("not float16 by float16", lambda: dense(*arrays(dtype="float16"), implementation="mosaic")),
        ("257 tokens", lambda: dense(*arrays(tokens=257), implementation="mosaic")),
        ("0 tokens", lambda: dense(*arrays(tokens=0), implementation="mosaic")),
        ("inner size 96", lambda: dense(*arrays(depth=96), implementation="mosaic")),
        ("output's size 96", lambda: dense(*arrays(out=96), implementation="mosaic")),
        ("out_dtype is float16", lambda: dense(*arrays(), out_dtype="float16", implementation="mosaic")),
        ("bias is float16", lambda: dense(*arrays(), jnp.ones(128, "float16"), implementation="mosaic")),
        ("residual is float32", lambda: residual_dense(*arrays(), jnp.ones((8, 128)), implementation="mosaic")),
        ("'gelu' does not lower", lambda: gated_dense(*arrays(), "gelu", implementation="mosaic")),
        ("output's size 32", lambda: gated_dense(*arrays(out=64), "silu", implementation="mosaic")),
    ],
)
def test_what_is_not_served_says_why(reason, call):
    with pytest.raises(UnsupportedShape, match=reason):
        call()


@pytest.mark.parametrize(
    ("reason", "config"),
    [
        ("clusters of more than 8", Config(splits=8, share=2)),
        ("odd block", Config(block_k=96)),
        ("bytes of shared memory", Config(rows=4, block_k=256, stages=6)),
        ("do not divide among 2 CTAs", Config(share=2)),
        ("one of them at a time", Config(splits=2, depth=2)),
    ],
)
def test_a_configuration_that_does_not_fit_says_why(reason, config):
    with pytest.raises(UnsupportedShape, match=reason):
        DENSE(*arrays(), None, out_dtype=None, implementation="mosaic", config=config)


@pytest.mark.parametrize("tokens", [1, 64, 256])
@pytest.mark.parametrize("extra", [{}, {"activation": "silu"}, {"out_dtype": "float32"}])
def test_candidates_are_different_and_the_default_is_the_first(tokens, extra):
    key = {"tokens": tokens, "in": 4096, "out": 14336, **extra}
    found = candidates(key)
    assert len(found) == len(set(found)) > 5
    assert found[0] == default_config(key)
    for config in found:
        plan = make_plan(key, config)
        assert plan.tokens >= tokens
        assert config.reduce in ("cluster", "after")


@pytest.mark.parametrize("operands", ["bfloat16", "w8a8"])
def test_sums_that_are_added_later_leave_room_for_more_in_flight(operands):
    """They need no inbox; on an H200 four steps in flight instead of three are what a CTA of so many tokens waits for."""
    key = {"tokens": 256, "in": 14336, "out": 4096, "operands": operands}
    config = default_config(key)
    assert (config.reduce, config.splits, config.stages) == ("after", 4, 4)
    plan = make_plan(key, dataclasses.replace(config, reduce="cluster", clusters=16))
    assert plan.shared_bytes > SHARED_BYTES


def test_the_default_shares_work_evenly():
    """Most of the 132 multiprocessors (96 that need no sums of others were faster than more), and nine tenths of what each does
    is of use."""
    for out, depth in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 1536), (1536, 8960)):
        key = {"tokens": 8, "in": depth, "out": out}
        plan = make_plan(key, default_config(key))
        ctas = plan.clusters * plan.config.splits * plan.config.share
        steps = -(-plan.tiles // plan.clusters) * plan.steps * ctas
        assert out * depth / (plan.tile_rows * plan.config.block_k) / steps > 0.9, plan
        assert ctas >= 96, plan


@pytest.mark.parametrize("warpgroups", range(1, 8))
def test_no_warpgroup_asks_for_registers_that_a_launch_has_not(warpgroups):
    """It would wait for ever, on a card only: a launch gives every thread as many, in eights, of 512 a lane."""
    plan = make_plan({"tokens": 8, "in": 64, "out": 64}, dataclasses.replace(ONE, rows=warpgroups))
    launched = 512 // (warpgroups + 1) // 8 * 8
    assert plan.compute_registers % 8 == 0
    assert plan.compute_registers <= 240
    assert plan.compute_registers * warpgroups + COPY_REGISTERS <= launched * (warpgroups + 1)
