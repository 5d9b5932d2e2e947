"""The weight-streaming kernel lowers for an H200 in every production shape: layouts, TMA boxes, wgmma, shared memory."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.matmul import DENSE, GATED_DENSE, RESIDUAL_DENSE
from pallas_kernels.matmul.mosaic_plan import candidates

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))
TOKENS = (1, 8, 16, 32, 64, 128, 256)

# name -> operation, rows of the weights, their columns, and the rest of the call
SHAPES = {
    "8b-qkv": ("dense", 6144, 4096),
    "8b-o": ("residual", 4096, 4096),
    "8b-gate-up": ("gated", 28672, 4096),
    "8b-down": ("residual", 4096, 14336),
    "8b-head": ("head", 128256, 4096),
    "1.5b-qkv": ("bias", 2048, 1536),
    "1.5b-o": ("residual", 1536, 1536),
    "1.5b-gate-up": ("gated", 17920, 1536),
    "1.5b-down": ("residual", 1536, 8960),
    "1.5b-head": ("head", 151936, 1536),
}


def spec(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def call_of(kind, tokens, out, depth):
    """(operation, arguments) of one call as shapes."""
    x, w = spec(tokens, depth), spec(out, depth)
    match kind:
        case "dense":
            return functools.partial(DENSE, out_dtype=None), (x, w, None)
        case "bias":
            return functools.partial(DENSE, out_dtype=None), (x, w, spec(out))
        case "head":
            return functools.partial(DENSE, out_dtype=jnp.float32), (x, w, None)
        case "residual":
            return RESIDUAL_DENSE, (x, w, spec(tokens, out), None)
        case "gated":
            return functools.partial(GATED_DENSE, activation="silu"), (x, w)


def lowered(operation, args, **options):
    def program(upcoming, *args):
        return operation(*args, upcoming=upcoming, implementation="mosaic", **options)

    with use_abstract_mesh(H200):
        text = jax.jit(program).trace(spec(4096, 4096), *args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    return text


@pytest.mark.parametrize(
    "tokens", [tokens if tokens in (1, 8, 64, 256) else pytest.param(tokens, marks=pytest.mark.slow) for tokens in TOKENS]
)
@pytest.mark.parametrize("name", SHAPES)
def test_the_default_of_every_production_shape_lowers(name, tokens):
    kind, out, depth = SHAPES[name]
    lowered(*call_of(kind, tokens, out, depth))


def key_of(kind, tokens, out, depth):
    extra = {"gated": {"activation": "silu"}, "head": {"out_dtype": "float32"}}.get(kind, {})
    return {"tokens": tokens, "in": depth, "out": out // 2 if kind == "gated" else out, **extra}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_every_candidate_lowers(name, tokens):
    kind, out, depth = SHAPES[name]
    for config in candidates(key_of(kind, tokens, out, depth)):
        lowered(*call_of(kind, tokens, out, depth), config=config)


def test_layers_share_one_kernel():
    """A model of many layers lowers each shape once."""
    x, w = spec(8, 4096), spec(4096, 4096)

    def layers(stream, *weights):
        stream = stream + 1  # arguments of a program and results in it are different types under an abstract mesh
        for w in weights:
            stream = RESIDUAL_DENSE(stream * 2, w, stream, None, implementation="mosaic")
        return stream

    with use_abstract_mesh(H200):
        text = jax.jit(layers).trace(x, *[w] * 4).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
