"""int8 weights on their way between files and the device. Imports JAX.

Owns in which order of columns a weight lies on which device: packed where kernels want it so, and in its own order everywhere
else, files included.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.quantized import PACKED_BLOCK, QuantizedTensor, pack

if TYPE_CHECKING:
    from llmjax.model.param_spec import Shape


def weight_struct(shape: Shape, dtype: str) -> jax.ShapeDtypeStruct | QuantizedTensor:
    """A leaf of the parameter tree as it lies on JAX's default device, without its values."""
    if dtype != "int8":
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    qvalue, scale = jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    return QuantizedTensor(qvalue, scale, packed=_is_packed(shape))


def in_kernel_order(w: QuantizedTensor) -> QuantizedTensor:
    """The weight as it lies on JAX's default device. The argument's values are given up where they are reordered."""
    return _pack(w) if _is_packed(w.shape) and not w.packed else w


def _is_packed(shape: Shape) -> bool:
    return tuning.target() is not None and shape[1] % PACKED_BLOCK == 0


@functools.partial(jax.jit, donate_argnums=0)
def _pack(w: QuantizedTensor) -> QuantizedTensor:
    return pack(w)
