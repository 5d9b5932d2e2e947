"""Weights in int8 with a float32 scale a channel: what they are, how they are made, and the order in which kernels want them.

Owns the container and its two orders of columns. Must not know which weights of a model are quantised, nor who multiplies them.

Quantisation is symmetric: value = qvalue * scale with qvalue in -127..127, so that zero is zero. The observer is absmax: a
channel's largest magnitude becomes 127, and no other value is off by more than half a scale. Weights that others quantised may
hold -128: whoever multiplies takes it like any other value.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int8

LARGEST = 127
"""The largest quantised magnitude."""

PACKED_BLOCK = 16
"""Columns that `pack` reorders among themselves."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """An int8 weight. A pytree of its two arrays; nothing is checked here, as a tree may hold shapes or shardings instead.

    Attributes:
        qvalue: -127..127 (-128 too if it was made elsewhere), stored [out, in] so that a contraction runs along memory.
        scale: finite, positive (or zero, in a file of others); [out] for a scale a channel, [] for one of the whole tensor.
        packed: whether the columns are in the order of `pack`. Static: it is part of the tree's structure.
    """

    qvalue: Int8[Array, "out in"]
    scale: Float[Array, "*channels"]
    packed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, whatever its order."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def channel_scale(self) -> Float[Array, "out"]:
        """The scale of each row."""
        return jnp.broadcast_to(self.scale, self.qvalue.shape[:1])


def quantize(w: Float[Array, "out in"], *, axis: int | None = 1) -> QuantizedTensor:
    """Rounds to the nearest step of a scale that makes the largest magnitude 127.

    Args:
        axis: what shares a scale: 1 (the inputs of a row: a scale a channel), or None (the whole tensor).

    A row of zeros gets scale 1. Arithmetic is float32; halves round to even. NaN and infinity have no scale: the caller refuses
    them first, by `check_finite`.
    Raises ValueError for another axis or number of dimensions.
    """
    if w.ndim != 2 or axis not in (1, None):
        raise ValueError(f"quantize takes a weight [out, in] and axis 1 or None, got {w.shape} and {axis!r}")
    wide = w.astype(jnp.float32)
    scale = scale_of(jnp.max(jnp.abs(wide), axis=axis))
    return QuantizedTensor(rounded(wide, scale if axis is None else scale[:, None]), scale)


def quantize_tokens(x: Float[Array, "... D"]) -> tuple[Int8[Array, "... D"], Float[Array, "..."]]:
    """(int8, scale): activations with a scale a token, rounded as `quantize` does. That of a token with NaN is NaN, with infinity
    infinite."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=-1)
    scale = scale_of(jnp.where(jnp.isnan(wide).any(axis=-1), jnp.nan, largest))  # XLA's maximum of many may hide NaN on a CPU
    return rounded(wide, scale[..., None]), scale


def scale_of(largest: Float[Array, "..."]) -> Float[Array, "..."]:
    """float32 scales for the largest magnitudes; 1 where there is nothing but zeros, or so small that no scale is normal. NaN
    stays NaN: int8 cannot say it, so that the scale has to."""
    scale = largest * jnp.float32(1 / LARGEST)
    return jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)


def rounded(wide: Float[Array, "..."], scale: Float[Array, "..."]) -> Int8[Array, "..."]:
    """wide / scale to the nearest integer, halves to even, within -127..127."""
    return jnp.clip(jnp.round(wide / scale), -LARGEST, LARGEST).astype(jnp.int8)


def dequantize(w: QuantizedTensor, dtype: DTypeLike = jnp.float32) -> Float[Array, "out in"]:
    """The weight that a quantised one stands for, its columns in their own order."""
    qvalue = unpack(w).qvalue.astype(jnp.float32)
    return (qvalue * w.channel_scale[:, None]).astype(dtype)


def check_finite(name: str, w: Float[Array, "..."]) -> None:
    """Raises ValueError that names the weight and its first bad place if it holds NaN or infinity. Reads the array."""
    bad = np.asarray(~jnp.isfinite(w))
    if bad.any():
        place = [int(i) for i in np.unravel_index(int(bad.argmax()), bad.shape)]
        raise ValueError(f"{name}: {int(bad.sum())} values are NaN or infinite, the first at {place}; it cannot be quantised")


def pack(w: QuantizedTensor) -> QuantizedTensor:
    """Puts the columns into the order in which a warpgroup loads int8 and multiplies bfloat16 without moving anything between
    its threads. Once, when weights are loaded. Its result and its argument are the same weight.

    Raises ValueError when the number of columns is not a multiple of 16.
    """
    return w if w.packed else QuantizedTensor(reorder(w.qvalue), w.scale, packed=True)


def unpack(w: QuantizedTensor) -> QuantizedTensor:
    """The weight with its columns in their own order."""
    return QuantizedTensor(reorder(w.qvalue), w.scale) if w.packed else w


def reorder(x: Array) -> Array:
    """Swaps the last axis between its own order and the packed one: the permutation is its own inverse.

    In each block of 16, pairs of neighbours stay together; of a pair's number, three bits, the first and the last are swapped.
    """
    columns = x.shape[-1]
    if columns % PACKED_BLOCK:
        raise ValueError(f"packed columns come in blocks of {PACKED_BLOCK}, got {columns}")
    return x.reshape(*x.shape[:-1], columns // PACKED_BLOCK, 2, 2, 2, 2).swapaxes(-4, -2).reshape(x.shape)
