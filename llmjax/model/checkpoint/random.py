"""Random weights, generated on the device: a model of any shape without files. Imports JAX.

For measuring speed and for tests. One small program a distinct leaf shape is compiled; no host memory is used.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from llmjax.model.checkpoint.int8 import in_kernel_order
from llmjax.model.config import ModelConfig
from llmjax.model.param_spec import Path, Shape, is_norm, iter_params
from pallas_kernels.quantized import LARGEST, QuantizedTensor

DEFAULT_SCALE = 1e-3  # what vLLM's dummy loader fills with: the values change the power draw and so the clock


def random_params(config: ModelConfig, *, seed: int = 0, scale: float = DEFAULT_SCALE) -> dict[str, Any]:
    """A parameter tree for `config` on JAX's default device, in `config.dtype` (norms float32).

    Args:
        config: shapes and dtype.
        seed: the same seed, shapes and dtype give the same weights.
        scale: matrices are uniform in [-scale, scale), as int8 with one step for all; norm weights are ones, biases zeros.
    """
    key = jax.random.key(seed)
    params: dict[str, Any] = {}
    for index, (path, shape, dtype) in enumerate(iter_params(config)):
        node = params
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = _leaf(path, shape, dtype, key, index, scale)
    return params


def _leaf(path: Path, shape: Shape, dtype: str, key: jax.Array, index: int, scale: float) -> jax.Array | QuantizedTensor:
    if is_norm(path):
        return jnp.ones(shape, dtype)
    if path[-1] == "bias":
        return jnp.zeros(shape, dtype)
    if dtype == "int8":
        return in_kernel_order(_uniform_int8(key, index, scale, shape=shape))
    return _uniform(key, index, scale, shape=shape, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _uniform(key: jax.Array, index: int, scale: float, *, shape: Shape, dtype: str) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(key, index), shape, jnp.dtype(dtype), -scale, scale)


@functools.partial(jax.jit, static_argnames="shape")
def _uniform_int8(key: jax.Array, index: int, scale: float, *, shape: Shape) -> QuantizedTensor:
    """Made as int8: the weight in a wider dtype is never there."""
    bits = jax.random.bits(jax.random.fold_in(key, index), shape, jnp.uint8)
    qvalue = jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.int8), -LARGEST)
    return QuantizedTensor(qvalue, jnp.full(shape[:1], scale / LARGEST, jnp.float32))
