"""W8A8 on Hopper for many tokens: which calls the kernel serves.

Owns the checks and the tuning key. Must not know how the kernel works inside, nor what was measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.dispatch import UnsupportedShape
from pallas_kernels.int8_matmul.mosaic import served_key
from pallas_kernels.int8_matmul.mosaic_tiles_plan import BLOCK, TilesConfig, candidates, fits, make_plan
from pallas_kernels.quantized import reorder

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    from pallas_kernels.quantized import QuantizedTensor

MIN_TOKENS = 33
"""Below it, more than half of the rows that are multiplied would be nobody's."""


def w8a8(
    xq: Array,
    x_scale: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
    config: TilesConfig | None = None,
) -> Array:
    """See `pallas_kernels.int8_matmul.w8a8`; rounded once. The hint is not taken: a call this long ends with less to hide.

    Raises UnsupportedShape with the reason where it cannot serve.
    """
    key = w8a8_key(xq, x_scale, w, bias, residual, activation=activation, out_dtype=out_dtype, upcoming=upcoming)
    config = candidates(key)[0] if config is None else config
    plan = make_plan(key, config)
    if not fits(plan):
        raise UnsupportedShape(
            f"{config} takes {plan.shared_bytes} bytes of shared memory and {plan.accumulators} registers of sums"
        )
    if config.rows % BLOCK or config.columns % BLOCK or config.columns > 256 or plan.tile_tokens > 256:
        raise UnsupportedShape(f"{config} has a tile that is no multiple of {BLOCK}, or larger than 256")
    tokens = xq.shape[0]
    xq = _padded(reorder(xq) if w.packed else xq)
    from pallas_kernels.int8_matmul.mosaic_tiles import multiply  # only where a kernel is wanted: it takes a second to import

    return multiply(
        xq, w.qvalue, _padded(x_scale), w.channel_scale, bias, None if residual is None else _padded(residual),
        plan=plan, activation=activation, out_dtype=out_dtype if residual is None else residual.dtype,
    )[:tokens]  # fmt: skip


def w8a8_key(
    xq: Array,
    x_scale: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
) -> dict[str, int | str]:
    """Key of a `w8a8` call in the tuning table, the same as of the kernel for few tokens. UnsupportedShape as `w8a8`."""
    del x_scale, upcoming
    if xq.shape[0] < MIN_TOKENS:
        raise UnsupportedShape(f"{xq.shape[0]} tokens; the kernel takes {MIN_TOKENS} or more")
    return {**served_key(xq, w, bias, residual, activation, out_dtype), "operands": "w8a8"}


def _padded(array: Array) -> Array:
    """With rows of zeros up to a multiple of 64: a ragged rest of tokens is a pass of its own."""
    ragged = -array.shape[0] % BLOCK
    return jnp.pad(array, ((0, ragged), *((0, 0),) * (array.ndim - 1))) if ragged else array
