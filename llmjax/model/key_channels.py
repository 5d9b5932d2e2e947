"""The factors by which an int8 cache divides the channels of keys before it rounds them, told by the weights alone.

Owns the estimate. Must not know the cache, nor how keys are rounded. Device code, run once at a start.

Of the shared decoder's keys we know, before any text is read, about how large each channel will be: behind an RMSNorm the inputs
of the projection are about N(0, 1) times the norm's weight g, so that E[k_c^2] = b_c^2 + sum_d (W_cd g_d)^2 in front of the
rotation. The bias b is what matters: it reaches 354 in some Qwen2.5 models, and is the same for every token. The rotation turns
channel i and i + H/2 into one another, so the two share the root mean square of both; a norm of the keys makes a head's mean
square 1 and multiplies by its own weight.

Factors are rounded to powers of two, by which queries are multiplied exactly, and at most one, so that none overflows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from llmjax.model.config import ModelConfig
from pallas_kernels.quantized import QuantizedTensor, dequantize

SMALLEST = -10
"""Exponent of the smallest factor: a channel 1000 times smaller than its head's largest has no say in a score anyway."""


def key_channels(params: dict[str, Any], config: ModelConfig) -> Float[Array, "L K H"]:
    """Factors for the keys of every layer, from the shared decoder's parameters: float32 powers of two from 2^-10 to 1, of which
    each head has a 1. Weights that are not finite, and a head of zeros, give ones."""
    layers = [params["layers"][index] for index in range(config.num_layers)]
    sizes = (config.num_heads * config.head_dim, config.num_kv_heads)
    return jnp.stack([_of_layer(layer["attention_norm"], layer["attention"], *sizes) for layer in layers])


@functools.partial(jax.jit, static_argnames=("q_size", "kv_heads"))
def _of_layer(norm: dict[str, Array], attention: dict[str, Any], q_size: int, kv_heads: int) -> Float[Array, "K H"]:
    weight, bias = attention["qkv"]["weight"], attention["qkv"].get("bias")
    rows = slice(q_size, q_size + (weight.shape[0] - q_size) // 2)
    squares = jnp.square(_rows(weight, rows) * norm["weight"].astype(jnp.float32)).sum(axis=1)
    if bias is not None:
        squares = squares + jnp.square(bias[rows].astype(jnp.float32))
    squares = squares.reshape(kv_heads, -1)
    if "k_norm" in attention:
        own = attention["k_norm"]["weight"].astype(jnp.float32)
        squares = squares / squares.mean(axis=1, keepdims=True) * jnp.square(own)
    first, second = jnp.split(squares, 2, axis=1)
    pairs = jnp.tile(first + second, 2)
    exponents = jnp.round(0.5 * jnp.log2(pairs / pairs.max(axis=1, keepdims=True)))
    return jnp.where(jnp.isnan(exponents), 1.0, jnp.exp2(jnp.maximum(exponents, SMALLEST)))


def _rows(weight: Array | QuantizedTensor, rows: slice) -> Float[Array, "rows in"]:
    if isinstance(weight, QuantizedTensor):
        return dequantize(QuantizedTensor(weight.qvalue[rows], weight.channel_scale[rows], weight.packed))
    return weight[rows].astype(jnp.float32)
