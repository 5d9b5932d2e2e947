"""RMSNorm, alone or together with the residual addition in front of it and the quantisation behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Operation
from pallas_kernels.fused_norm import mosaic, xla

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int8

RMS_NORM = Operation("rms_norm", xla.rms_norm)
RESIDUAL_RMS_NORM = Operation("residual_rms_norm", xla.residual_rms_norm)
RMS_NORM_QUANTIZE = Operation("rms_norm_quantize", xla.rms_norm_quantize)
RESIDUAL_RMS_NORM_QUANTIZE = Operation("residual_rms_norm_quantize", xla.residual_rms_norm_quantize)

RMS_NORM_QUANTIZE.register(
    "mosaic", mosaic.rms_norm_quantize, shape_key=mosaic.norm_key, config_type=mosaic.Config, candidates=mosaic.candidates
)
RESIDUAL_RMS_NORM_QUANTIZE.register(
    "mosaic",
    mosaic.residual_rms_norm_quantize,
    shape_key=mosaic.residual_norm_key,
    config_type=mosaic.Config,
    candidates=mosaic.candidates,
)


def rms_norm(
    x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float, *, implementation: str | None = None
) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32, returned in x's dtype.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.
    """
    return RMS_NORM(x, weight, eps, implementation=implementation)


def residual_rms_norm(
    x: Float[Array, "... D"],
    residual: Float[Array, "... D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
    """Adds x to the residual stream and norms the sum: (normed, new_residual).

    The new residual has the residual's dtype; the norm is taken of it as stored, in float32, and has x's dtype.
    """
    return RESIDUAL_RMS_NORM(x, residual, weight, eps, implementation=implementation)


def rms_norm_quantize(
    x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float, *, implementation: str | None = None
) -> tuple[Int8[Array, "... D"], Float[Array, "..."]]:
    """`rms_norm`, and `int8_matmul.quantize_activations` of it, rounded to x's dtype between: (int8, scale a token)."""
    return RMS_NORM_QUANTIZE(x, weight, eps, implementation=implementation)


def residual_rms_norm_quantize(
    x: Float[Array, "... D"],
    residual: Float[Array, "... D"],
    weight: Float[Array, "D"],
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[Int8[Array, "... D"], Float[Array, "..."], Float[Array, "... D"]]:
    """`residual_rms_norm` with its norm quantised: (int8, scale a token, new_residual)."""
    return RESIDUAL_RMS_NORM_QUANTIZE(x, residual, weight, eps, implementation=implementation)
