"""The two ways to multiply by an int8 weight, as implementations of one operation.

Owns what such a call is tuned by. Must not know which way is faster: `tuning` keeps what was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    from pallas_kernels.dispatch import Operation
    from pallas_kernels.quantized import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to configure: each way looks its own kernel's configuration up."""


def candidates(key: Mapping[str, int | str]) -> list[Config]:
    """The only configuration, for every key."""
    del key
    return [Config()]


def via_w8a16(operation: Operation) -> Callable[..., Array]:
    """The weights dequantised, x as it is."""

    def run(
        x: Array, w: QuantizedTensor, bias: Array | None, residual: Array | None, *, config: Config | None = None, **epilogue: Any
    ) -> Array:
        del config
        return operation(x, w, bias, residual, **epilogue)

    return run


def via_w8a8(quantize: Operation, operation: Operation) -> Callable[..., Array]:
    """x quantised token by token."""

    def run(
        x: Array, w: QuantizedTensor, bias: Array | None, residual: Array | None, *, config: Config | None = None, **epilogue: Any
    ) -> Array:
        del config
        xq, x_scale = quantize(x)
        return operation(xq, x_scale, w, bias, residual, **epilogue)

    return run


def shape_key(
    x: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    *,
    activation: str | None,
    out_dtype: DTypeLike,
    upcoming: QuantizedTensor | None = None,
) -> dict[str, int | str]:
    """What a call is tuned by; the hint is no part of it. Of x only the shape counts, whether it is quantised or not."""
    del upcoming
    key = {
        "tokens": x.shape[0],
        "in": x.shape[1],
        "out": w.shape[0] // (1 if activation is None else 2),
        "bias": "none" if bias is None else bias.dtype.name,
        "residual": "none" if residual is None else residual.dtype.name,
        "out_dtype": jnp.dtype(out_dtype).name,
        "packed": int(w.packed),
    }
    return key if activation is None else {**key, "activation": activation}
