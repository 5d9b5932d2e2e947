"""The int8 kernels lower for an H200 in the shapes of production: layouts, TMA boxes, wgmma, shared memory."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.int8_matmul import W8A8, W8A16
from pallas_kernels.matmul.mosaic_plan import Config, make_plan
from pallas_kernels.quantized import QuantizedTensor

H200 = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132))

# name -> epilogue, rows of the weights, their columns
SHAPES = {
    "8b-qkv": ("plain", 6144, 4096),
    "8b-o": ("residual", 4096, 4096),
    "8b-gate-up": ("gate", 28672, 4096),
    "8b-down": ("residual", 4096, 14336),
    "1.5b-qkv": ("bias", 2048, 1536),
    "1.5b-gate-up": ("gate", 17920, 1536),
    "1.5b-down": ("residual", 1536, 8960),
}
WAYS = {"w8a16": (W8A16, "mosaic"), "w8a8": (W8A8, "mosaic"), "tiles": (W8A8, "mosaic_tiles")}


def spec(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def weight(out, depth, packed):
    return QuantizedTensor(spec(out, depth, dtype=jnp.int8), spec(out, dtype=jnp.float32), packed)


def call_of(way, kind, tokens, out, depth, packed):
    """(operation, arguments) of a call as shapes."""
    operation, implementation = WAYS[way]
    x = (spec(tokens, depth),)
    if operation is W8A8:
        x = (spec(tokens, depth, dtype=jnp.int8), spec(tokens, dtype=jnp.float32))
    bias = spec(out) if kind == "bias" else None
    residual = spec(tokens, out) if kind == "residual" else None
    activation = "silu" if kind == "gate" else None
    run = functools.partial(operation, activation=activation, out_dtype=jnp.bfloat16, implementation=implementation)
    return run, (*x, weight(out, depth, packed), bias, residual)


def lowered(way, name, tokens, *, packed=True, **options):
    run, args = call_of(way, *SHAPES[name][:1], tokens, *SHAPES[name][1:], packed)

    def program(upcoming, *args):
        return run(*args, upcoming=upcoming, **options)

    with use_abstract_mesh(H200):
        text = jax.jit(program).trace(weight(4096, 4096, packed), *args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


@pytest.mark.parametrize(
    ("way", "name", "tokens", "packed"),
    [
        ("w8a16", "8b-gate-up", 8, True),
        ("w8a16", "1.5b-qkv", 64, False),
        ("w8a8", "8b-down", 64, True),
        ("tiles", "8b-gate-up", 8192, True),
        ("tiles", "1.5b-down", 333, True),
    ],
)
def test_defaults_lower(way, name, tokens, packed):
    lowered(way, name, tokens, packed=packed)


def test_warpgroups_that_divide_a_step_lower():
    lowered("w8a16", "8b-gate-up", 32, config=Config(rows=2, depth=2, block_k=128, stages=4))
    lowered("w8a16", "8b-down", 8, config=Config(depth=3, block_k=384, splits=2, clusters=66, reduce="after"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "tokens"),
    [
        *(("w8a16", n) for n in (1, 8, 16, 32, 64, 128)),
        *(("w8a8", n) for n in (1, 8, 64, 128, 256)),
        *(("tiles", n) for n in (64, 256, 2048, 8192)),
    ],
)
@pytest.mark.parametrize("name", SHAPES)
def test_every_default_lowers(way, tokens, name):
    lowered(way, name, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "tokens"),
    [("w8a16", 8), ("w8a16", 64), ("w8a16", 100), ("w8a8", 64), ("w8a8", 200), ("tiles", 64), ("tiles", 2048)],
)
@pytest.mark.parametrize("name", ["8b-o", "8b-gate-up", "1.5b-qkv"])
def test_every_candidate_lowers(way, tokens, name):
    operation, implementation = WAYS[way]
    run, args = call_of(way, *SHAPES[name][:1], tokens, *SHAPES[name][1:], True)
    found = operation.implementations[implementation]
    for config in found.candidates(found.shape_key(*args, **{k: run.keywords[k] for k in ("activation", "out_dtype")})):
        lowered(way, name, tokens, config=config)


@pytest.mark.parametrize("tokens", [*range(1, 257, 5), 256])
def test_int8_products_have_sizes_of_the_instruction(tokens):
    """Only the card's assembler knows them: 8, 16, 24, 32, then every sixteenth."""
    for name, out in (("plain", 6144), ("gate", 14336)):
        kernel = W8A8.implementations["mosaic"]
        run, args = call_of("w8a8", name, tokens, out * (1 + (name == "gate")), 4096, True)
        key = kernel.shape_key(*args, **{k: run.keywords[k] for k in ("activation", "out_dtype")})
        for config in kernel.candidates(key):
            each = make_plan(key, config).tokens_each
            assert each <= 256
            assert each % (8 if each <= 32 else 16) == 0


def test_layers_share_one_kernel():
    """A model of many layers lowers each shape once."""
    x, w = spec(8, 4096), weight(4096, 4096, True)

    def layers(stream, *weights):
        stream = stream + 1  # arguments of a program and results in it are different types under an abstract mesh
        for w in weights:
            stream = W8A16(stream * 2, w, None, stream, activation=None, out_dtype=stream.dtype, implementation="mosaic")
        return stream

    with use_abstract_mesh(H200):
        text = jax.jit(layers).trace(x, *[w] * 4).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
