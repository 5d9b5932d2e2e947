"""Norms that are quantised, on NVIDIA GPUs: which calls the kernel serves.

Owns the checks, the tuning key and the configuration. Must not know how the kernel works inside, nor what was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels.dispatch import UnsupportedShape

if TYPE_CHECKING:
    from jax import Array

_THREADS = 128
_VECTORS = (8, 4, 2)  # elements that a thread loads at once
_MAX_HIDDEN = 16384  # a row lies in the registers of its threads


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
        vector: neighbouring elements that a thread loads at once; 128 times as many divide a row.
    """

    vector: int = 4


def rms_norm_quantize(x: Array, weight: Array, eps: float, *, config: Config | None = None) -> tuple[Array, Array]:
    """See `pallas_kernels.fused_norm.rms_norm_quantize`. Raises UnsupportedShape with the reason where it cannot serve."""
    qvalue, scale, _ = _run(norm_key(x, weight, eps), config, x, None, weight, eps)
    return qvalue, scale


def residual_rms_norm_quantize(
    x: Array, residual: Array, weight: Array, eps: float, *, config: Config | None = None
) -> tuple[Array, Array, Array]:
    """See `pallas_kernels.fused_norm.residual_rms_norm_quantize`. Raises UnsupportedShape with the reason where it cannot
    serve."""
    return _run(residual_norm_key(x, residual, weight, eps), config, x, residual, weight, eps)


def norm_key(x: Array, weight: Array, eps: float) -> dict[str, int | str]:
    """Key of an `rms_norm_quantize` call in the tuning table. UnsupportedShape for what the kernel never serves."""
    del weight, eps
    if x.dtype != jnp.bfloat16:
        raise UnsupportedShape(f"the kernel norms bfloat16, not {x.dtype}")
    hidden = x.shape[-1]
    if not 0 < hidden <= _MAX_HIDDEN or hidden % (_THREADS * _VECTORS[-1]):
        raise UnsupportedShape(f"a hidden size of {hidden} is no multiple of {_THREADS * _VECTORS[-1]}, or above {_MAX_HIDDEN}")
    if x.size == 0:
        raise UnsupportedShape("no tokens")
    return {"tokens": x.size // hidden, "hidden": hidden}


def residual_norm_key(x: Array, residual: Array, weight: Array, eps: float) -> dict[str, int | str]:
    """Key of a `residual_rms_norm_quantize` call in the tuning table. UnsupportedShape for what the kernel never serves."""
    if residual.dtype != jnp.bfloat16:
        raise UnsupportedShape(f"the residual is {residual.dtype}; the kernel adds bfloat16")
    return norm_key(x, weight, eps)


def candidates(key: Mapping[str, int | str]) -> list[Config]:
    """The configurations of a key, the widest loads first, which is the default."""
    return [Config(vector) for vector in _VECTORS if int(key["hidden"]) % (_THREADS * vector) == 0]


def _run(
    key: Mapping[str, int | str], config: Config | None, x: Array, residual: Array | None, weight: Array, eps: float
) -> tuple[Array, Array, Array]:
    config = candidates(key)[0] if config is None else config
    hidden = int(key["hidden"])
    if hidden % (_THREADS * config.vector):
        raise UnsupportedShape(f"{config} does not divide a hidden size of {hidden}")
    from pallas_kernels.fused_norm.mosaic_kernel import (
        norm_quantize,
    )  # only where a kernel is wanted: it takes a second to import

    rows = x.reshape(-1, hidden)
    stream = None if residual is None else residual.reshape(-1, hidden)
    qvalue, scale, *total = norm_quantize(rows, stream, weight.astype(jnp.float32), eps=float(eps), vector=config.vector)
    return qvalue.reshape(x.shape), scale.reshape(x.shape[:-1]), total[0].reshape(x.shape) if total else x
