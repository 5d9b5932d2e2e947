"""The numeric smoke test: each kernel that may be chosen here, on one small shape, against its reference on the same device.

Owns the probes and the measure of an error. Drivers and compilers have given wrong numbers without a word
(jax-ml/jax#40633), so whoever serves runs `check` first. Must not know who that is.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning
from pallas_kernels.dispatch import REFERENCE, Implementation, Operation, UnsupportedShape
from pallas_kernels.flash_attention import FLASH_ATTENTION
from pallas_kernels.flash_attention import shapes as flash_shapes
from pallas_kernels.flash_attention.xla import Biases, Rows
from pallas_kernels.fused_layer import FUSED_LAYER, MEETINGS, LayerParams, NextParams
from pallas_kernels.fused_norm import RESIDUAL_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from pallas_kernels.int8_matmul import INT8_DENSE, W8A8, W8A16
from pallas_kernels.matmul import DENSE, GATED_DENSE, RESIDUAL_DENSE
from pallas_kernels.paged_attention import PAGED_ATTENTION
from pallas_kernels.paged_attention.shapes import Case, make_inputs
from pallas_kernels.quantized import pack, quantize, quantize_tokens
from pallas_kernels.quantized_pages import QuantizedPages, quantize_heads
from pallas_kernels.rope_kv_write import ROPE_KV_WRITE

if TYPE_CHECKING:
    from jax import Array

TOLERANCE = 0.05
"""Largest error of `worst_error` that rounding to bfloat16 explains: the output is rounded by 0.4 % of itself, and so are the
operands and what lies between two fused operations. A wrong element is off by about 1."""


class WrongNumbers(ArithmeticError):
    """An implementation differs from its reference by more than rounding. The message names it, the shape and the error."""


class Call(NamedTuple):
    """The arguments of one call of an operation."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Probe(NamedTuple):
    """An operation, what makes a small call of it from a random generator, and what of a call's result counts."""

    operation: Operation
    make: Callable[[np.random.Generator], Call]
    result: Callable[[Any], Any] = lambda result: result


def worst_error(got: Any, expected: Any) -> Array:
    """The largest |got - expected|, over |expected| or over its root mean square along the last axis, whichever is larger: a
    float32 scalar.

    Trees of arrays. Infinite where anything is not finite, and where something stands in place of a row of zeros.
    """
    worst = jnp.float32(0)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        size = jnp.sqrt(jnp.mean(jnp.square(other), axis=-1, keepdims=True))
        error = jnp.where(one == other, 0.0, jnp.abs(one - other) / jnp.maximum(size, jnp.abs(other)))
        worst = jnp.maximum(worst, jnp.where(jnp.isfinite(error), error, jnp.inf).max())
    return worst


def reference(operation: Operation, call: Call) -> Any:
    """The reference's result for the same call with every floating argument widened to float32."""
    args, kwargs = jax.tree.map(_widened, (call.args, call.kwargs))
    return operation(*args, implementation=REFERENCE, **kwargs)


def check(probes: Sequence[Probe] | None = None) -> list[str]:
    """Compare every implementation that the tuning table of this device names, in its default configuration, with its
    reference; returns what was compared. (`bench.kernels --tune` compares each configuration before it enters the table.)

    Probes default to those of all operations. The device compiles one small program for each, side by side; numbers and
    reference are the host's own where JAX has a CPU beside the device: for a GPU their matmuls would be tuned first, and a
    compiler that is wrong there would be asked about itself.
    Raises WrongNumbers for the first that is wrong; the message has the seed of its numbers.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    device, host = _device(), _host()
    pairs = [
        (probe, name)
        for probe in (PROBES if probes is None else probes)
        for name in sorted({entry["implementation"] for entry in tuning.entries(probe.operation.name)} - {REFERENCE})
    ]
    with concurrent.futures.ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="check") as threads:
        compared = list(threads.map(lambda pair: _compare(*pair, seed, device, host), pairs))
    return [name for name in compared if name is not None]


def _compare(probe: Probe, name: str, seed: int, device: jax.Device, host: jax.Device) -> str | None:
    """What was compared; None where another probe of the operation is for this implementation."""
    operation, make, result = probe
    with jax.default_device(host):
        call = make(np.random.default_rng(seed))
    with jax.default_device(device):  # what an implementation serves depends on the device
        if not serves(operation.implementations[name], call):
            return None
        got = _run(lambda call: result(operation(*call.args, implementation=name, **call.kwargs)), call, device)
    with jax.default_device(host):
        expected = _run(lambda call: result(reference(operation, call)), call, host)
        error = float(worst_error(jax.device_put(got, host), expected))
    if not error <= TOLERANCE:
        size = f"{error:.2g} of itself or of a token's root mean square"
        if math.isinf(error):
            size = "NaN, infinity, or something where zeros must be"
        raise WrongNumbers(
            f"{operation.name}: {name} differs from {REFERENCE} by {size} (allowed {TOLERANCE}) for {_shapes(call)}, seed {seed}"
        )
    return f"{operation.name}/{name}"


def _run(function: Callable[[Call], Any], call: Call, device: jax.Device) -> Any:
    program, arrays = as_program(function, call)
    return jax.jit(program)(jax.device_put(arrays, device))


def as_program(function: Callable[[Call], Any], call: Call) -> tuple[Callable[[list[Array]], Any], list[Array]]:
    """`function` of `call` as one of the call's arrays alone, to be traced, and these arrays."""
    leaves, tree = jax.tree.flatten(call)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def program(arrays: list[Array]) -> Any:
        given = dict(zip(places, arrays, strict=True))
        return function(jax.tree.unflatten(tree, [given.get(index, leaf) for index, leaf in enumerate(leaves)]))

    return program, [leaves[index] for index in places]


def _device() -> jax.Device:
    """The one that computes here by default."""
    chosen = jax.config.jax_default_device
    return chosen if isinstance(chosen, jax.Device) else jax.devices(chosen)[0]


def _host() -> jax.Device:
    """A CPU, or where JAX was told to have none, the default device."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return _device()


def serves(implementation: Implementation, call: Call) -> bool:
    """Whether an implementation takes a call: an operation may have several, each for calls of another kind."""
    try:
        return implementation.shape_key is None or bool(implementation.shape_key(*call.args, **call.kwargs))
    except UnsupportedShape:
        return False


def _dense(random: np.random.Generator) -> Call:
    x, w = random.standard_normal((24, 1024)), random.standard_normal((1024, 1024))
    return Call((jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), None), {"out_dtype": None})


def _residual_dense(random: np.random.Generator) -> Call:
    x, w, _ = _dense(random).args
    return Call((x, w, jnp.asarray(random.standard_normal(x.shape), jnp.bfloat16), None), {})


def _gated_dense(random: np.random.Generator) -> Call:
    x, w, _ = _dense(random).args
    return Call((x, w, "silu"), {})


def _int8_dense(random: np.random.Generator) -> Call:
    """Activations that nothing is lost of when they are quantised: both ways have the same result."""
    x, w = random.integers(-127, 128, (40, 1024)) / 64, random.standard_normal((1024, 1024))
    x[:, 0] = 127 / 64
    residual = jnp.asarray(random.standard_normal((40, 1024)), jnp.bfloat16)
    args = (jnp.asarray(x, jnp.bfloat16), pack(quantize(jnp.asarray(w, jnp.float32))), None, residual)
    return Call(args, {"activation": None, "out_dtype": jnp.bfloat16})


def _w8a8(random: np.random.Generator) -> Call:
    """More tokens than one kernel must have, and fewer than the other can: both are compared."""
    (x, *others), options = _int8_dense(random)
    return Call((*quantize_tokens(x), *others), options)


def _norm_quantize(random: np.random.Generator) -> Call:
    x = jnp.asarray(random.uniform(-1.7, 1.7, (9, 1024)), jnp.bfloat16)
    return Call((x, jnp.asarray(random.uniform(0.5, 1.5, 1024), jnp.float32), 1e-5), {})


def _residual_norm_quantize(random: np.random.Generator) -> Call:
    (x, *others), options = _norm_quantize(random)
    return Call((x, x[::-1], *others), options)


def _dequantized(result: Any) -> Any:
    qvalue, scale, *stream = result
    return [qvalue.astype(jnp.float32) * scale[..., None], *stream]


def _paged_attention(random: np.random.Generator, rows: tuple[tuple[int, int], ...], **options: Any) -> Call:
    """Rows of (keys, queries), in a cache of two layers."""
    case = Case(
        name="probe", num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, rows=rows, layers=2, layer=1, **options
    )  # fmt: skip
    inputs, offset = make_inputs(case, seed=int(random.integers(2**31)))
    args = (*(jnp.asarray(a, jnp.bfloat16) for a in inputs[:3]), *map(jnp.asarray, inputs[3:]))
    kwargs = {"page_offset": jnp.int32(offset), "scale": case.scale, "window": 0, "soft_cap": 0.0, "decode": case.decode}
    return Call(args, kwargs | ({"max_queries": case.max_queries} if case.max_queries else {}))


def _decode_attention(random: np.random.Generator) -> Call:
    lengths = (0, 1, 15, 16, 17, 64, 65, 300)
    return _paged_attention(random, tuple((length, min(length, 1)) for length in lengths), decode=True)


def _verify_attention(random: np.random.Generator) -> Call:
    """A row's last token and as many drafts as there may be, in two query tiles; fewer of other rows."""
    return _paged_attention(random, ((9, 9), (0, 0), (300, 9), (33, 4), (65, 1)), padded_tokens=4, max_queries=9)


def _int8_decode_attention(random: np.random.Generator) -> Call:
    (q, k_cache, v_cache, *batch), kwargs = _decode_attention(random)
    factors = np.exp2(random.integers(-3, 1, (2, *k_cache.shape[1::2])))  # of two layers, a head and a channel
    rounded = (quantize_heads(cache.swapaxes(1, 2), None) for cache in (k_cache, v_cache))
    k, v = (QuantizedPages(qvalue.swapaxes(1, 2), scale.swapaxes(1, 2)) for qvalue, scale in rounded)
    return Call((q, dataclasses.replace(k, channels=jnp.asarray(factors, jnp.float32)), v, *batch), kwargs)


def _extend_attention(random: np.random.Generator) -> Call:
    """Prompts, a chunk on a prefix and a decoding row, over several blocks of keys."""
    return _paged_attention(random, ((70, 70), (0, 0), (300, 45), (33, 1)), padded_tokens=4)


def _flash_attention(random: np.random.Generator) -> Call:
    case = flash_shapes.Case(
        name="probe", num_heads=8, num_kv_heads=2, head_dim=128, rows=((70, 70), (0, 0), (300, 45), (33, 1)), padded_tokens=4
    )
    inputs = flash_shapes.make_inputs(case, seed=int(random.integers(2**31)))
    rows = Rows(jnp.asarray(inputs.query_starts), jnp.asarray(inputs.key_starts), jnp.int32(0))
    args = (*(jnp.asarray(a, jnp.bfloat16) for a in inputs[:3]), Biases(None, None, None), rows)
    return Call(args, {"causal": True, "scale": case.scale, "soft_cap": 0.0, "return_lse": False})


def _rope_kv_write(random: np.random.Generator) -> Call:
    """Tokens on pages of their own, and one whose page does not exist."""
    tokens, heads, kv_heads, dim = 9, 8, 2, 128

    def normal(*shape: int) -> Array:
        return jnp.asarray(random.standard_normal(shape), jnp.bfloat16)

    angles = random.uniform(0, 6, (tokens, dim // 2))
    tables = (jnp.asarray(function(angles), jnp.float32) for function in (np.cos, np.sin))
    pages, offsets = random.permutation(tokens).astype(np.int32), random.integers(0, 16, tokens, np.int32)
    pages[-1] = tokens
    norms = (jnp.asarray(random.uniform(0.5, 1.5, dim), jnp.float32) for _ in "qk")
    cache = (2 * tokens, kv_heads, 16, dim)
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim)
    args = (qkv, normal(*cache), normal(*cache), *tables, jnp.asarray(pages), jnp.asarray(offsets), *norms)
    return Call(args, {"page_offset": jnp.int32(tokens), "eps": 1e-6})


_LAYER_TOKENS = 8


def _layer(random: np.random.Generator) -> Call:
    """Large enough that the kernel's ring of weights goes round three times."""
    hidden, mlp, qkv = 1024, 2816, 1536

    def normal(*shape: int) -> Array:
        return jnp.asarray(random.standard_normal(shape) * shape[-1] ** -0.5, jnp.bfloat16)

    norm = jnp.asarray(random.uniform(0.5, 1.5, hidden), jnp.float32)
    params = LayerParams(normal(hidden, hidden), None, norm, normal(2 * mlp, hidden), None, normal(hidden, mlp), None)
    following = NextParams(norm, normal(qkv, hidden), normal(qkv))
    stream = jnp.asarray(random.standard_normal((2, _LAYER_TOKENS, hidden)), jnp.bfloat16)
    meetings = jnp.zeros((2 * MEETINGS,), jnp.int32)
    return Call((stream[0], stream[1], meetings, jnp.int32(1), params, following), {"activation": "silu", "eps": 1e-5})


def _layer_result(result: Any) -> Any:
    return [part[:_LAYER_TOKENS] for part in result[:2]]


FLOAT_PROBES = (
    Probe(DENSE, _dense),
    Probe(RESIDUAL_DENSE, _residual_dense),
    Probe(GATED_DENSE, _gated_dense),
    Probe(PAGED_ATTENTION, _decode_attention),
    Probe(PAGED_ATTENTION, _verify_attention),
    Probe(PAGED_ATTENTION, _extend_attention),
    Probe(FLASH_ATTENTION, _flash_attention),
    Probe(ROPE_KV_WRITE, _rope_kv_write),
    Probe(FUSED_LAYER, _layer, _layer_result),
)
INT8_PROBES = (
    Probe(W8A16, _int8_dense),
    Probe(W8A8, _w8a8),
    Probe(INT8_DENSE, _int8_dense),
    Probe(RMS_NORM_QUANTIZE, _norm_quantize, _dequantized),
    Probe(RESIDUAL_RMS_NORM_QUANTIZE, _residual_norm_quantize, _dequantized),
    Probe(PAGED_ATTENTION, _int8_decode_attention),
)
"""Of what is chosen only for int8 weights, or int8 keys and values."""
PROBES = (*FLOAT_PROBES, *INT8_PROBES)


def _widened(leaf: Any) -> Any:
    floating = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return leaf.astype(jnp.float32) if floating else leaf


def _shapes(call: Call) -> str:
    arrays = [leaf for leaf in jax.tree.leaves((call.args, call.kwargs)) if isinstance(leaf, jax.Array) and leaf.ndim]
    return ", ".join(f"{array.dtype}{list(array.shape)}" for array in arrays)
