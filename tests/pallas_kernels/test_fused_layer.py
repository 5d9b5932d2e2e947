"""A layer from one attention to the next: the reference in float64, the kernel in the interpreter, and its lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.fused_layer import MEETINGS, LayerParams, NextParams, fused_layer, mosaic

EPS = 1e-5
H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))


def make(tokens, *, hidden=64, mlp=64, heads=64, qkv=72, bias=True, rows=None, dtype=jnp.bfloat16, poison=float("nan")):
    """Random arguments; rows of the residual stream beyond the tokens are poisoned."""
    random = np.random.default_rng()

    def normal(*shape):
        return jnp.asarray(random.standard_normal(shape) * shape[-1] ** -0.5, dtype)

    def norm():
        return jnp.asarray(random.uniform(0.5, 1.5, hidden), jnp.float32)

    stream = random.standard_normal((rows or tokens, hidden))
    stream[tokens:] = poison
    params = LayerParams(normal(hidden, heads), None, norm(), normal(2 * mlp, hidden), None, normal(hidden, mlp), None)
    following = NextParams(norm(), normal(qkv, hidden), normal(qkv) if bias else None)
    return jnp.asarray(random.standard_normal((tokens, heads)), dtype), jnp.asarray(stream, dtype), params, following


def oracle(attention, residual, params, following, activation="silu"):
    """float64, one step after the other."""
    attention, residual, *rest = (np.asarray(a, np.float64) for a in (attention, residual, *params, *following) if a is not None)
    out, mlp_norm, gate_up, down, next_norm, qkv, *bias = rest
    residual = residual[: len(attention)]

    def normed(x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight

    act = {
        "silu": lambda x: x / (1 + np.exp(-x)),
        "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    }[activation]
    residual = residual + attention @ out.T
    gate, up = np.split(normed(residual, mlp_norm) @ gate_up.T, 2, axis=-1)
    residual = residual + (act(gate) * up) @ down.T
    return residual, normed(residual, next_norm) @ qkv.T + (bias[0] if bias else 0)


def error(got, expected):
    got = np.asarray(got[: len(expected)], np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_reference_against_float64(activation):
    attention, residual, params, following = make(5, rows=9, dtype=jnp.float32)
    meetings = jnp.arange(2 * MEETINGS, dtype=jnp.int32)
    got = fused_layer(
        attention, residual, meetings, jnp.int32(1), params, following, activation=activation, eps=EPS, implementation="xla"
    )
    for one, expected in zip(got, oracle(attention, residual, params, following, activation), strict=False):
        assert error(one, expected) < 1e-5
    assert (got[2] == meetings).all()


def test_reference_without_a_next_layer():
    attention, residual, params, following = make(5, dtype=jnp.float32)
    new, qkv, _ = fused_layer(
        attention, residual, jnp.zeros(3, jnp.int32), jnp.int32(0), params, None, activation="silu", eps=EPS
    )
    assert qkv is None
    assert error(new, oracle(attention, residual, params, following)[0]) < 1e-5


@pytest.mark.parametrize(
    ("tokens", "sizes", "activation", "last"),
    [
        (8, {"heads": 1088}, "silu", False),  # more slots than the ring has; the last owner of q, k, v moves back
        (5, {"heads": 128, "mlp": 192, "bias": False}, "gelu_tanh", False),
        (16, {}, "silu", True),
    ],
)
def test_kernel_in_the_interpreter(tokens, sizes, activation, last):
    attention, residual, params, following = make(tokens, rows=20, **sizes)
    with plgpu.force_gpu_interpret_mode():
        new, qkv, _ = mosaic.fused_layer(
            attention, residual, jnp.zeros(3, jnp.int32), jnp.int32(0), params, None if last else following,
            activation=activation, eps=EPS, config=mosaic.Config(ctas=8, x_slots=2, ahead=3),
        )  # fmt: skip
    expected = oracle(attention, residual, params, following, activation)
    assert error(new, expected[0]) < 1e-2
    assert qkv is None if last else error(qkv, expected[1]) < 1e-2


LLAMA_8B = {"hidden": 4096, "mlp": 14336, "heads": 4096, "qkv": 6144, "bias": False}
QWEN_1_5B = {"hidden": 1536, "mlp": 8960, "heads": 1536, "qkv": 2048}
QWEN_0_5B = {"hidden": 896, "mlp": 4864, "heads": 896, "qkv": 1152}


@pytest.mark.parametrize(
    ("model", "tokens"), [(LLAMA_8B, 8), (LLAMA_8B, 64), (LLAMA_8B, 1), (QWEN_1_5B, 8), (QWEN_1_5B, 33), (QWEN_0_5B, 16)]
)
@pytest.mark.parametrize("last", [False, True])
def test_production_shapes_lower(model, tokens, last):
    if last and tokens != 8:
        pytest.skip("the last layer once a model")
    shapes = jax.eval_shape(lambda: make_shapes(tokens, **model))
    attention, residual, params, following = shapes
    call = functools.partial(fused_layer, activation="silu", eps=EPS, implementation="mosaic")
    meetings, layer = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    with use_abstract_mesh(H200):
        traced = jax.jit(call).trace(attention, residual, meetings, layer, params, None if last else following)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize("model", [LLAMA_8B, QWEN_1_5B])
def test_weights_asked_for_ahead_lower(model):
    shapes = jax.eval_shape(lambda: make_shapes(8, **model))
    key = {"tokens": 8, "attention": model["heads"], "next": model["qkv"], "activation": "silu"} | model
    config = next(config for config in mosaic.candidates(key) if config.ahead)
    call = functools.partial(mosaic.fused_layer, activation="silu", eps=EPS, config=config)
    meetings, layer = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    with use_abstract_mesh(H200):
        text = jax.jit(call).trace(*shapes[:2], meetings, layer, *shapes[2:]).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 1


def make_shapes(tokens, *, hidden, mlp, heads, qkv, bias=True):
    zeros, norm = functools.partial(jnp.zeros, dtype=jnp.bfloat16), jnp.zeros(hidden, jnp.float32)
    params = LayerParams(zeros((hidden, heads)), None, norm, zeros((2 * mlp, hidden)), None, zeros((hidden, mlp)), None)
    following = NextParams(norm, zeros((qkv, hidden)), zeros(qkv) if bias else None)
    return zeros((tokens, heads)), zeros((tokens, hidden)), params, following


@pytest.mark.parametrize(("model", "tokens"), [(LLAMA_8B, t) for t in (8, 16, 32, 64)] + [(QWEN_1_5B, t) for t in (8, 64)])
def test_every_candidate_has_room_for_a_ring(model, tokens):
    key = {"tokens": tokens, "attention": model["heads"], "next": model["qkv"], "activation": "silu"} | model
    found = mosaic.candidates(key)
    assert len(set(found)) == len(found) > 1
    for config in found:
        assert config.x_slots <= mosaic.SLOTS - mosaic.MIN_STAGES
        for phase in mosaic.plan_phases(key, config):
            assert phase.x_stages >= 2
            assert phase.width <= phase.rows
            assert phase.x_stages * phase.boxes * tokens <= config.x_slots * mosaic.SLOT
            last_read = (phase.x_stages - 1) * tokens + mosaic.TOKENS
            assert last_read <= mosaic.SLOTS * phase.rows, "a matmul would read beyond the memory"


@pytest.mark.parametrize("columns", [8, 64, 72, 1536, 4096, 8960, 14336])
def test_every_column_has_an_owner(columns):
    phase = mosaic.make_phase(columns, 1024, 8, mosaic.Config())
    first = [min(cta * phase.width, columns - phase.width) for cta in range(phase.owners)]
    covered = {column for start in first for column in range(start, start + phase.width)}
    assert covered == set(range(columns))
    assert phase.owners <= 132
    assert phase.boxes * phase.steps * mosaic.STEP == 1024


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "bfloat16"),
        ({"tokens": 65}, "at most 64 tokens"),
        ({"hidden": 72, "heads": 72}, "multiples of 64"),
        ({"hidden": 4096 + 64}, "evenly"),
        ({"mlp": 128 * 132 + 64}, "132 CTAs"),
        ({"config": mosaic.Config(x_slots=12)}, "do not leave room"),
    ],
)
def test_what_the_kernel_cannot_serve(change, reason):
    arguments = {"tokens": 8} | change
    config = arguments.pop("config", None)
    attention, residual, params, following = jax.eval_shape(lambda: make(**arguments))
    with pytest.raises(UnsupportedShape, match=reason):
        jax.eval_shape(
            functools.partial(mosaic.fused_layer, activation="silu", eps=EPS, config=config),
            attention, residual, jnp.zeros(3, jnp.int32), jnp.int32(0), params, following,
        )  # fmt: skip


def test_a_device_with_fewer_multiprocessors_is_refused():
    """CTAs that wait for one that never starts would wait for ever."""
    small = AbstractDevice(device_kind="NVIDIA H100 PCIe", platform="gpu", num_cores=114)
    attention, residual, params, following = jax.eval_shape(lambda: make_shapes(8, **LLAMA_8B))
    meetings, layer = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    with use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=small)), pytest.raises(UnsupportedShape, match="114"):
        jax.jit(functools.partial(fused_layer, activation="silu", eps=EPS, implementation="mosaic")).trace(
            attention, residual, meetings, layer, params, following
        )


@pytest.mark.parametrize("meetings", [jnp.zeros(1, jnp.int32), jnp.zeros(0, jnp.int32), jnp.zeros(3, jnp.float32)])
def test_meetings_that_do_not_fit_are_refused(meetings):
    attention, residual, params, following = make(4)
    with pytest.raises(ValueError, match="meetings are 3 int32"):
        fused_layer(attention, residual, meetings, jnp.int32(0), params, following, activation="silu", eps=EPS)


def test_a_residual_stream_of_more_rows_than_the_kernel_has():
    shapes = jax.eval_shape(lambda: make(8, rows=128, hidden=1024, mlp=1024, heads=1024, qkv=1536))
    attention, residual, params, following = shapes
    meetings, layer = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    with use_abstract_mesh(H200):
        new, _, _ = jax.eval_shape(
            functools.partial(fused_layer, activation="silu", eps=EPS, implementation="mosaic"),
            attention, residual, meetings, layer, params, following,
        )  # fmt: skip
    assert new.shape == (64, 1024)


def test_shapes_that_do_not_fit_are_refused():
    attention, residual, params, following = make(4)
    with pytest.raises(ValueError, match="do not fit"):
        fused_layer(attention, residual[:3], jnp.zeros(3, jnp.int32), jnp.int32(0), params, following, activation="silu", eps=EPS)
