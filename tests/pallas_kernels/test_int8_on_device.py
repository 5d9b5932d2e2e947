"""What only a card can show of the int8 kernels: registers as wgmma reads them, clusters, many CTAs at once. With `-m gpu`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int8_matmul import W8A8, W8A16, quantize_activations
from pallas_kernels.quantized import QuantizedTensor
from pallas_kernels.smoke import worst_error

pytestmark = pytest.mark.gpu


def weight(random, out, depth, packed):
    qvalue = jnp.asarray(random.integers(-127, 128, (out, depth)), jnp.int8)
    scale = jnp.asarray(random.uniform(0.5, 1.5, out) * depth**-0.5 / 73, jnp.float32)
    return QuantizedTensor(qvalue, scale, packed)


def epilogue(random, kind, tokens, out):
    """(bias, residual, activation)"""
    bias = jnp.asarray(random.standard_normal(out), jnp.float32) if kind == "bias" else None
    residual = jnp.asarray(random.standard_normal((tokens, out)), jnp.bfloat16) if kind == "residual" else None
    return bias, residual, "silu" if kind == "gate" else None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 13, 32, 64, 100])
@pytest.mark.parametrize(("kind", "out", "depth"), [("bias", 1536, 1024), ("residual", 1024, 3584), ("gate", 2048, 1024)])
def test_w8a16_every_candidate(kind, out, depth, tokens, packed):
    random = np.random.default_rng()
    x, w = jnp.asarray(random.standard_normal((tokens, depth)), jnp.bfloat16), weight(random, out, depth, packed)
    bias, residual, activation = epilogue(random, kind, tokens, out)
    args, options = (w, bias, residual), {"activation": activation, "out_dtype": jnp.bfloat16}
    expected = jax.jit(lambda x, *args: W8A16(x, *args, implementation="xla", **options))(x.astype(jnp.float32), *args)
    kernel = W8A16.implementations["mosaic"]
    for config in kernel.candidates(kernel.shape_key(x, *args, **options)):
        run = jax.jit(lambda *args, config=config: kernel.function(*args, config=config, **options))
        got = run(x, *args)
        assert float(worst_error(got, expected)) < 0.02, config
        for _ in range(20):  # no result depends on who arrives first
            again = run(x, *args)
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tokens", [1, 13, 64, 200, 1000])
@pytest.mark.parametrize(("kind", "out", "depth"), [("plain", 1536, 1024), ("residual", 1088, 3584), ("gate", 2176, 1024)])
def test_w8a8_every_candidate_of_both_kernels(kind, out, depth, tokens, packed):
    """float32 results without more than scales are the reference's to the last bit."""
    random = np.random.default_rng()
    xq, x_scale = quantize_activations(jnp.asarray(random.standard_normal((tokens, depth)), jnp.bfloat16))
    w = weight(random, out, depth, packed)
    bias, residual, activation = epilogue(random, kind, tokens, out)
    out_dtype = jnp.float32 if kind == "plain" else jnp.bfloat16
    args, options = (xq, x_scale, w, bias, residual), {"activation": activation, "out_dtype": out_dtype}
    wide = None if residual is None else residual.astype(jnp.float32)
    right = jax.jit(lambda *args: W8A8(*args, implementation="xla", **{**options, "out_dtype": jnp.float32}))
    expected = right(*args[:-1], wide)
    for name, kernel in W8A8.implementations.items():
        if name == "xla" or (tokens > 256 and name == "mosaic") or (tokens < 33 and name == "mosaic_tiles"):
            continue
        for config in kernel.candidates(kernel.shape_key(*args, **options)):
            run = jax.jit(lambda *args, kernel=kernel, config=config: kernel.function(*args, config=config, **options))
            got = run(*args)
            if kind == "plain":
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {config}")
            else:
                assert float(worst_error(got, expected)) < 0.02, (name, config)
