"""The calls that a step of each preset makes if its weights are int8: of matmuls with each kind of activations and of the
operation that chooses between them, and of norms that quantise what they hand on.

The floor of a call is its bytes over what a read reaches, or its operations over what int8 matmuls reach: `flops` are the bf16
operations that take as long, so 1474 TOP/s are printed as 797. Data come from a seed; nothing here times anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernel_cases import L2_IS_COLD, Case, Group
from llmjax.model.checkpoint.presets import preset_config
from pallas_kernels.dispatch import Operation
from pallas_kernels.fused_norm import RESIDUAL_RMS_NORM_QUANTIZE, RMS_NORM_QUANTIZE
from pallas_kernels.int8_matmul import INT8_DENSE, W8A8, W8A16
from pallas_kernels.quantized import QuantizedTensor, quantize_tokens
from pallas_kernels.smoke import Call

AS_BF16 = 797 / 1474
"""A bf16 operation for each int8 one, by the rates that matmuls of either reach on an H200."""

FEW = (8, 32, 1, 64, 16)  # by value: the first ones are timed even when there is little time
MANY = (256, 2048, 64, 8192, 128, 512, 32)
ALL = (8, 256, 32, 64, 2048, 128, 1, 16, 512, 8192)

SQUARE = "square"  # beside the presets: what matmuls are compared by


def w8a16_groups(model: str, tokens: Sequence[int] = FEW) -> Iterator[Group]:
    """Activations in bfloat16."""
    return _groups(W8A16, model, tokens)


def w8a8_groups(model: str, tokens: Sequence[int] = MANY) -> Iterator[Group]:
    """Activations that were quantised before; and, once for all models, 8192 x 8192 x 8192."""
    yield from _groups(W8A8, model, tokens)
    if model == "llama-8b":
        yield _group(W8A8, SQUARE, "8192 cubed", 8192, 8192, "plain", (8192,), 1, 0)


def int8_groups(model: str, tokens: Sequence[int] = ALL) -> Iterator[Group]:
    """The choice between the two, with the quantisation of activations where it is needed. Tune it after both."""
    return _groups(INT8_DENSE, model, tokens)


def _groups(operation: Operation, model: str, tokens: Sequence[int]) -> Iterator[Group]:
    config = preset_config(model)
    q, kv, hidden = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.hidden_size
    parts = {
        "gate_up": (2 * config.mlp_size, hidden, "gate"),
        "down": (hidden, config.mlp_size, "residual"),
        "qkv": (q + 2 * kv, hidden, "bias" if config.qkv_bias else "plain"),
        "out": (hidden, q, "residual"),
    }
    for rank, (part, (out, contracted, epilogue)) in enumerate(parts.items()):
        yield _group(operation, model, part, out, contracted, epilogue, tokens, config.num_layers, rank)


def _group(
    operation: Operation,
    model: str,
    part: str,
    out: int,
    contracted: int,
    epilogue: str,
    tokens: Sequence[int],
    count: int,
    rank: int,
) -> Group:
    """Cases of one weight, packed."""
    dtype = jnp.dtype(jnp.bfloat16)
    size = out * contracted
    columns = out // 2 if epilogue == "gate" else out
    activation = preset_config(model).activation if epilogue == "gate" else None
    large = size > 50_000_000

    def data(seed: int) -> list[dict[str, Any]]:
        def one(key: jax.Array) -> dict[str, Any]:
            w_key, scale_key, bias_key, residual_key = jax.random.split(key, 4)
            qvalue = jax.random.randint(w_key, (out, contracted), -127, 128, jnp.int8)
            scale = jax.random.uniform(scale_key, (out,), jnp.float32, 0.5, 1.5) * contracted**-0.5 / 73
            bias = jax.random.normal(bias_key, (out,), dtype) if epilogue == "bias" else None
            residual = jax.random.normal(residual_key, (max(tokens), out), dtype) if epilogue == "residual" else None
            return {"w": QuantizedTensor(qvalue, scale, packed=True), "bias": bias, "residual": residual}

        return [one(key) for key in jax.random.split(jax.random.key(seed), max(2, -(-L2_IS_COLD // size)))]

    def query(n: int, key: jax.Array) -> Any:
        # Quantising these loses nothing, so that both ways have the same result, and are compared as strictly as one.
        x = (jax.random.randint(key, (n, contracted), -127, 128) / 64).at[:, 0].set(127 / 64).astype(dtype)
        return quantize_tokens(x) if operation is W8A8 else (x,)

    def arguments(x: Any, _: Any, turn: dict[str, Any], __: jax.Array) -> Call:
        residual = None if turn["residual"] is None else turn["residual"][: len(x[0])]
        return Call((*x, turn["w"], turn["bias"], residual), {"activation": activation, "out_dtype": dtype})

    cases = tuple(
        Case(
            name=f"{part} {out}x{contracted}, {n} tokens",
            operation=operation,
            model=model,
            rows=n,
            count=count,
            bytes=size + n * contracted * (1 if operation is W8A8 else 2) + n * columns * 2,
            flops=int(2 * n * size * AS_BF16) if n >= 256 else 0,
            goal=(3.4 if large else 2.6) if operation is W8A16 and model == "llama-8b" and 8 <= n <= 32 else None,
            query=functools.partial(query, n),
            arguments=arguments,
        )
        for n in tokens
    )
    return Group(name=f"{model} {operation.name} {part}", cases=cases, data=data, turns=lambda weights: weights, rank=rank)


def norm_groups(operation: Operation, model: str, tokens: Sequence[int] = ALL) -> Iterator[Group]:
    """Norms that are quantised, with the residual addition in front of them or without."""
    config = preset_config(model)
    hidden, dtype = config.hidden_size, jnp.dtype(jnp.bfloat16)
    streams = operation is RESIDUAL_RMS_NORM_QUANTIZE
    for rank, n in enumerate(tokens):
        size = n * hidden
        copies = min(32, max(2, -(-L2_IS_COLD // (2 * size))))  # of few tokens the cache keeps all, as it does in a step

        def data(seed: int, n: int = n, copies: int = copies) -> list[tuple[jax.Array, ...]]:
            def one(key: jax.Array) -> jax.Array:
                return jax.random.uniform(key, (n, hidden), jnp.float32, -1.7, 1.7).astype(dtype)

            keys = jax.random.split(jax.random.key(seed), (copies, 2 if streams else 1))
            return [tuple(map(one, row)) for row in keys]

        def query(key: jax.Array) -> jax.Array:
            return jax.random.uniform(key, (hidden,), jnp.float32, 0.5, 1.5)

        def arguments(weight: jax.Array, _: Any, turn: tuple[jax.Array, ...], __: jax.Array) -> Call:
            return Call((*turn, weight, config.norm_eps), {})

        case = Case(
            name=f"{n} tokens",
            operation=operation,
            model=model,
            rows=n,
            count=config.num_layers,
            bytes=size * (7 if streams else 3) + n * 4,
            query=query,
            arguments=arguments,
            result=lambda result: [result[0].astype(jnp.float32) * result[1][:, None], *result[2:]],
        )
        yield Group(
            name=f"{model} {operation.name} {case.name}", cases=(case,), data=data, turns=lambda inputs: inputs, rank=rank
        )


INT8_GROUPS: dict[str, Callable[[str], Iterator[Group]]] = {
    W8A16.name: w8a16_groups,
    W8A8.name: w8a8_groups,
    INT8_DENSE.name: int8_groups,
    **{
        operation.name: functools.partial(norm_groups, operation) for operation in (RMS_NORM_QUANTIZE, RESIDUAL_RMS_NORM_QUANTIZE)
    },
}
