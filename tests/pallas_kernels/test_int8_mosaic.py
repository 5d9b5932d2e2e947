"""The int8 kernels in the interpreter against float64: both products, every epilogue, splits and shared tokens, on few tiles.

What is left unwritten reads as NaN there. That the registers of packed weights are where the tensor core wants them, which the
interpreter cannot see, is in test_quantized.
"""

import dataclasses
import itertools
import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.int8_matmul import W8A8, W8A16, quantize_activations, w8a8, w8a16
from pallas_kernels.int8_matmul.mosaic_tiles_plan import TilesConfig, fits
from pallas_kernels.int8_matmul.mosaic_tiles_plan import candidates as tiles_candidates
from pallas_kernels.int8_matmul.mosaic_tiles_plan import make_plan as make_tiles_plan
from pallas_kernels.matmul.mosaic_plan import Config, candidates, default_config, make_plan
from pallas_kernels.quantized import QuantizedTensor, pack, quantize, unpack

ONE = Config(rows=1, block_k=128, stages=2, clusters=2)
SPLIT = dataclasses.replace(ONE, splits=2, clusters=1, reduce="global")
AFTER = dataclasses.replace(ONE, splits=2, clusters=1, reduce="after")
DEEP = dataclasses.replace(ONE, depth=3, block_k=384)
HALVES = dataclasses.replace(ONE, rows=2, depth=2, stages=3)  # swizzled lines of half the length
TILES = TilesConfig(rows=64, columns=64, stages=2, band=2, clusters=2)


class Draw:
    """Arrays of a test's own random stream."""

    def __init__(self, name):
        self.random = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, *shape, dtype="bfloat16"):
        return jnp.asarray(self.random.standard_normal(shape), dtype)

    def weight(self, out, depth, *, packed=False):
        """With -128 in it, as files of others have it."""
        w = quantize(self(out, depth, dtype="float32"))
        w = dataclasses.replace(w, qvalue=w.qvalue.at[:, 3:40:9].set(-128))
        return pack(w) if packed else w


@pytest.fixture
def draw(request):
    return Draw(request.node.name)


def wide(x):
    return np.asarray(x, np.float64)


def interpreted(operation, *args, bias=None, residual=None, implementation="mosaic", **kwargs):
    kwargs = {"activation": None, "out_dtype": jnp.bfloat16, **kwargs}
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        result = np.asarray(operation(*args, bias, residual, implementation=implementation, **kwargs))
    assert not interpret_pallas_call.get_races().races_found
    return result


def product(x, w):
    return wide(x) @ (wide(unpack(w).qvalue) * wide(w.channel_scale)[:, None]).T


def of_quantized(xq, x_scale, w):
    return product(xq, w) * wide(x_scale)[:, None]


def gate(sums):
    gate, up = np.split(sums, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def close(result, right, rounding=2.0**-8):
    """Within the rounding of the result and, near zero, the error of float32 sums."""
    np.testing.assert_allclose(wide(result), right, rtol=rounding, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize(
    ("tokens", "out", "depth", "packed", "config"),
    [
        (1, 128, 256, False, ONE),
        (5, 192, 384, True, dataclasses.replace(ONE, rows=2, stages=3)),  # a tile beyond the last row
        (17, 64, 128, True, dataclasses.replace(ONE, columns=2)),  # padded to 32
        (8, 128, 384, True, SPLIT),  # the second split ends beyond the contraction
        (5, 320, 512, True, HALVES),  # more tiles than CTAs: places for sums are used again
        (17, 64, 256, False, dataclasses.replace(HALVES, rows=1, columns=2, block_k=256)),
        (8, 192, 640, True, dataclasses.replace(DEEP, clusters=1)),  # the last step ends beyond the contraction
    ],
)
def test_w8a16(draw, tokens, out, depth, packed, config):
    x, w, bias = draw(tokens, depth), draw.weight(out, depth, packed=packed), draw(out)
    result = interpreted(W8A16, x, w, bias=bias, config=config)
    assert result.shape == (tokens, out)
    assert result.dtype == jnp.bfloat16
    close(result, product(x, w) + wide(bias))


@pytest.mark.parametrize(
    "config",
    [ONE, AFTER, HALVES, dataclasses.replace(AFTER, depth=2, block_k=256)],
    ids=["one", "after", "deep", "deep, after"],
)
def test_w8a16_gate(draw, config):
    x, w = draw(5, 128) * 0.3, draw.weight(256, 128, packed=True)
    close(interpreted(W8A16, x, w, activation="silu", config=config), gate(product(x, w)))


@pytest.mark.parametrize("config", [ONE, dataclasses.replace(HALVES, clusters=1)], ids=["one", "deep"])
def test_w8a16_residual_is_added_before_the_only_rounding(draw, config):
    x, w, residual, bias = draw(8, 128), draw.weight(192, 128), draw(8, 192), draw(192, dtype="float32")
    result = interpreted(W8A16, x, w, bias=bias, residual=residual, config=config)
    close(result, product(x, w) + wide(bias) + wide(residual))


@pytest.mark.parametrize(
    ("tokens", "packed", "config"),
    [(5, True, ONE), (8, False, SPLIT), (8, True, AFTER), (5, True, DEEP)],
    ids=["one", "split", "after", "deep"],
)
def test_w8a8_is_the_reference_to_the_last_bit(draw, tokens, packed, config):
    """int32 sums are exact however they are split; then the same float32 products in the same order."""
    xq, x_scale = quantize_activations(draw(tokens, 384))
    w = draw.weight(128, 384, packed=packed)
    result = interpreted(W8A8, xq, x_scale, w, out_dtype=jnp.float32, config=config)
    expected = w8a8(xq, x_scale, w, out_dtype=jnp.float32, implementation="xla")
    np.testing.assert_array_equal(result, expected)


def test_w8a8_gate_and_residual(draw):
    xq, x_scale = quantize_activations(draw(8, 128) * 0.3)
    w, residual = draw.weight(128, 128), draw(8, 128)
    close(interpreted(W8A8, xq, x_scale, w, activation="silu", config=ONE), gate(of_quantized(xq, x_scale, w)))
    result = interpreted(W8A8, xq, x_scale, w, residual=residual, config=ONE)
    close(result, of_quantized(xq, x_scale, w) + wide(residual))


@pytest.mark.parametrize(
    ("tokens", "out", "depth", "packed", "config"),
    [
        (150, 192, 256, False, TILES),  # ragged in tokens; six tiles in two bands, for two CTAs
        (70, 192, 256, True, dataclasses.replace(TILES, columns=128, share=2, clusters=1)),  # and a peer beyond the last column
    ],
)
def test_w8a8_of_many_tokens_is_the_reference_to_the_last_bit(draw, tokens, out, depth, packed, config):
    xq, x_scale = quantize_activations(draw(tokens, depth))
    w = draw.weight(out, depth, packed=packed)
    result = interpreted(W8A8, xq, x_scale, w, out_dtype=jnp.float32, implementation="mosaic_tiles", config=config)
    np.testing.assert_array_equal(result, w8a8(xq, x_scale, w, out_dtype=jnp.float32, implementation="xla"))


def test_w8a8_of_many_tokens_with_bias_and_residual(draw):
    xq, x_scale = quantize_activations(draw(130, 128))
    w, bias, residual = draw.weight(64, 128), draw(64), draw(130, 64)
    config = dataclasses.replace(TILES, rows=128)
    result = interpreted(
        W8A8, xq, x_scale, w, bias=bias, residual=residual, implementation="mosaic_tiles", config=config
    )  # fmt: skip
    close(result, of_quantized(xq, x_scale, w) + wide(bias) + wide(residual))


def test_w8a8_of_many_tokens_with_a_gate(draw):
    xq, x_scale = quantize_activations(draw(130, 128) * 0.3)
    w = draw.weight(256, 128)
    result = interpreted(W8A8, xq, x_scale, w, activation="silu", implementation="mosaic_tiles", config=TILES)
    close(result, gate(of_quantized(xq, x_scale, w)))


def test_a_token_without_meaning_stays_in_its_row(draw):
    x, w = draw(8, 128).at[3, 5].set(jnp.nan), draw.weight(64, 128)
    result = interpreted(W8A16, x, w, config=ONE)
    np.testing.assert_array_equal(np.isnan(wide(result)).all(axis=1), np.arange(8) == 3)
    assert np.isfinite(wide(result)[np.arange(8) != 3]).all()


def call(tokens=8, out=128, depth=128, dtype="bfloat16", way="mosaic", **kwargs):
    w = QuantizedTensor(jnp.ones((out, depth), jnp.int8), jnp.ones(out))
    if dtype == "int8":
        return w8a8(jnp.ones((tokens, depth), dtype), jnp.ones(tokens), w, implementation=way, **kwargs)
    return w8a16(jnp.ones((tokens, depth), dtype), w, implementation=way, **kwargs)


@pytest.mark.parametrize(
    ("reason", "kwargs"),
    [
        ("not float32", {"dtype": "float32"}),
        ("129 tokens", {"tokens": 129}),
        ("257 tokens", {"tokens": 257, "dtype": "int8"}),
        ("32 tokens; the kernel takes 33", {"tokens": 32, "dtype": "int8", "way": "mosaic_tiles"}),
        ("inner size 192", {"depth": 192}),
        ("output's size 96", {"out": 96}),
        ("output's size 32", {"out": 64, "activation": "silu"}),
        ("out_dtype is float16", {"out_dtype": "float16"}),
        ("bias is float16", {"bias": jnp.ones(128, "float16")}),
        ("residual is float32", {"residual": jnp.ones((8, 128))}),
        ("'gelu' does not lower", {"activation": "gelu"}),
    ],
)
def test_what_is_not_served_says_why(reason, kwargs):
    with pytest.raises(UnsupportedShape, match=reason):
        call(**kwargs)


@pytest.mark.parametrize(
    ("reason", "operation", "config"),
    [
        ("odd block", W8A16, Config(block_k=64)),
        ("bytes of shared memory", W8A16, Config(rows=4, block_k=256, stages=16)),
        ("bytes of shared memory", W8A8, TilesConfig(stages=8)),
        ("registers of sums", W8A8, TilesConfig(columns=256)),
        ("no multiple of 64", W8A8, TilesConfig(columns=96)),
        ("larger than 256", W8A8, TilesConfig(rows=192, columns=64, stages=2)),
    ],
)
def test_a_configuration_that_does_not_fit_says_why(reason, operation, config):
    w = QuantizedTensor(jnp.ones((128, 128), jnp.int8), jnp.ones(128))
    x = (jnp.ones((64, 128), jnp.bfloat16),) if operation is W8A16 else (jnp.ones((64, 128), jnp.int8), jnp.ones(64))
    way = "mosaic_tiles" if isinstance(config, TilesConfig) else "mosaic"
    with pytest.raises(UnsupportedShape, match=reason):
        operation(*x, w, None, None, activation=None, out_dtype=jnp.bfloat16, implementation=way, config=config)


@pytest.mark.parametrize("operands", ["w8a16", "w8a8"])
@pytest.mark.parametrize(("tokens", "extra"), [(1, {}), (64, {"activation": "silu"}), (128, {"activation": "silu"}), (128, {})])
def test_candidates_that_stream_fit(operands, tokens, extra):
    key = {"tokens": tokens, "in": 4096, "out": 14336, "out_dtype": "bfloat16", "operands": operands, **extra}
    found = candidates(key)
    assert len(found) == len(set(found)) >= 3
    assert found[0] == default_config(key)
    assert found[0].depth == 1, "what has not been timed on a device keeps to what every device has shown"
    assert {config.depth for config in found} > {1} or operands == "w8a8" or tokens > 64
    assert all(config.block_k % 128 == 0 and make_plan(key, config).tokens >= tokens for config in found)


@pytest.mark.parametrize(("tokens", "extra"), [(64, {}), (2048, {"activation": "silu"}), (8192, {})])
def test_candidates_of_many_tokens_fit(tokens, extra):
    key = {"tokens": tokens, "in": 4096, "out": 14336, "out_dtype": "bfloat16", "operands": "w8a8", **extra}
    found = tiles_candidates(key)
    assert len(found) == len(set(found)) >= 3
    for config in found:
        assert fits(make_tiles_plan(key, config))


def test_every_part_of_the_output_is_one_tile():
    """The walk in bands, ragged along both axes, meets each place once."""
    from pallas_kernels.int8_matmul.mosaic_tiles import _Kernel

    plan = make_tiles_plan(
        {"tokens": 1500, "in": 128, "out": 1088, "out_dtype": "bfloat16"}, TilesConfig(rows=64, columns=128, band=5)
    )
    places = [tuple(map(int, _Kernel(plan, None, jnp.bfloat16, ())._place(jnp.int32(tile)))) for tile in range(plan.tiles)]
    assert sorted(places) == list(itertools.product(range(0, 1500, 128), range(0, 1088, 128)))
