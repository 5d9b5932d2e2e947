"""Gated activations in plain JAX; XLA fuses them into one elementwise pass."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def gated(gate_up: Array, activation: str) -> Array:
    """See `pallas_kernels.gated_activation.gated`."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (ACTIVATIONS[activation](gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate_up.dtype)
