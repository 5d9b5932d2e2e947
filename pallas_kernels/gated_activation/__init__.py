"""The gate of an MLP: activation(gate) * up, on the output of one joint matmul."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pallas_kernels.dispatch import Operation
from pallas_kernels.gated_activation import xla

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

Activation = Literal["silu", "gelu", "gelu_tanh"]

GATED = Operation("gated", xla.gated)


def gated(
    gate_up: Float[Array, "... F2"], activation: Activation = "silu", *, implementation: str | None = None
) -> Float[Array, "... F"]:
    """activation(gate) * up, where gate is the first and up the second half of the last axis (F2 = 2 F).

    Computed in float32, returned in gate_up's dtype. "gelu" is the exact form with erf, "gelu_tanh" the approximation.
    Raises ValueError for another activation or an odd last axis.
    Source: Shazeer, GLU Variants Improve Transformer, 2020; Hendrycks and Gimpel, Gaussian Error Linear Units, 2016.
    """
    if activation not in xla.ACTIVATIONS:
        raise ValueError(f"activation {activation!r}; choose one of {', '.join(xla.ACTIVATIONS)}")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up's last axis holds gate and up side by side, so it must be even, got {gate_up.shape[-1]}")
    return GATED(gate_up, activation, implementation=implementation)
