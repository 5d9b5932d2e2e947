"""The kernel that norms and quantises: in the interpreter against its reference, and lowered for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.fused_norm import (
    RMS_NORM_QUANTIZE,
    residual_rms_norm,
    residual_rms_norm_quantize,
    rms_norm,
    rms_norm_quantize,
)
from pallas_kernels.fused_norm.mosaic import Config, candidates

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


@pytest.fixture
def draw():
    random = np.random.default_rng()

    def array(*shape, dtype="bfloat16"):
        return jnp.asarray(random.standard_normal(shape), dtype)

    return array


def wide(x):
    return np.asarray(x, np.float64)


def close(qvalue, scale, normed):
    """Half a step, and what rounding the norm to bfloat16 may differ by where the sum of squares was added in another order."""
    normed, step = wide(normed), wide(scale)[..., None]
    assert qvalue.dtype == jnp.int8
    assert scale.shape == normed.shape[:-1]
    assert (np.abs(wide(qvalue)) <= 127).all()
    np.testing.assert_allclose(step[..., 0], np.abs(normed).max(-1) / 127, rtol=2.0**-7)
    assert (np.abs(wide(qvalue) * step - normed) <= 0.501 * step + 2.0**-7 * np.abs(normed)).all()


def test_a_norm_and_a_stream(draw):
    x, residual, weight = draw(2, 3, 1024) * 30, draw(2, 3, 1024), draw(1024, dtype="float32")
    x = x.at[0, 1].set(0).at[1, 1, 17].set(1e4).at[1, 2, 17].set(jnp.nan)
    residual = residual.at[0, 1].set(0)
    with plgpu.force_gpu_interpret_mode():
        plain = rms_norm_quantize(x, weight, 1e-5, implementation="mosaic")
        qvalue, scale, total = residual_rms_norm_quantize(x, residual, weight, 1e-5, implementation="mosaic")
    normed = rms_norm(x, weight, 1e-5)
    some = np.array([[True, False, True], [True, True, False]])
    assert np.isnan(plain[1][1, 2])
    assert np.isnan(scale[1, 2])
    close(plain[0][some], plain[1][some], normed[some])
    assert plain[1][0, 1] == 1
    assert not plain[0][0, 1].any()
    normed, expected = residual_rms_norm(x, residual, weight, 1e-5)
    np.testing.assert_array_equal(wide(total), wide(expected))
    close(qvalue[some], scale[some], normed[some])


@pytest.mark.parametrize(
    ("reason", "shape", "dtype", "config"),
    [
        ("not float32", (2, 1024), "float32", None),
        ("hidden size of 576", (2, 576), "bfloat16", None),
        ("hidden size of 32768", (2, 32768), "bfloat16", None),
        ("no tokens", (0, 1024), "bfloat16", None),
        ("does not divide", (2, 512), "bfloat16", Config(8)),
    ],
)
def test_what_is_not_served_says_why(reason, shape, dtype, config):
    with pytest.raises(UnsupportedShape, match=reason):
        RMS_NORM_QUANTIZE(jnp.ones(shape, dtype), jnp.ones(shape[-1]), 1e-5, implementation="mosaic", config=config)


def test_a_float32_stream_is_not_served():
    x = jnp.ones((2, 1024), jnp.bfloat16)
    with pytest.raises(UnsupportedShape, match="residual is float32"):
        residual_rms_norm_quantize(x, x.astype(jnp.float32), jnp.ones(1024), 1e-5, implementation="mosaic")


@pytest.mark.parametrize("hidden", [1536, 4096])
def test_it_lowers(hidden):
    x, weight = jax.ShapeDtypeStruct((2048, hidden), jnp.bfloat16), jax.ShapeDtypeStruct((hidden,), jnp.float32)

    def program(x, residual, weight):
        return residual_rms_norm_quantize(x, residual, weight, 1e-5, implementation="mosaic")

    with use_abstract_mesh(H200):
        text = jax.jit(program).trace(x, x, weight).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert {config.vector for config in candidates({"hidden": hidden})} == ({8, 4, 2} if hidden == 4096 else {4, 2})
