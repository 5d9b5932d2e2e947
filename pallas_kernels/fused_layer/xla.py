"""A layer from one attention to the next as the other operations in a row, each with its own choice of implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.fused_norm import rms_norm
from pallas_kernels.gated_activation import gated
from pallas_kernels.matmul import dense, gated_dense, residual_dense

if TYPE_CHECKING:
    from jax import Array

    from pallas_kernels.fused_layer import LayerParams, NextParams
    from pallas_kernels.gated_activation import Activation


def fused_layer(
    attention: Array,
    residual: Array,
    meetings: Array,
    layer: Array,
    params: LayerParams,
    following: NextParams | None,
    *,
    activation: Activation,
    eps: float,
) -> tuple[Array, Array | None, Array]:
    """See `pallas_kernels.fused_layer.fused_layer`; its results have T rows."""
    del layer  # nobody meets here
    gate_up, down, qkv = params.gate_up, params.down, None if following is None else following.qkv
    residual = residual_dense(attention, params.out, residual[: len(attention)], params.out_bias, upcoming=gate_up)
    x = rms_norm(residual, params.norm, eps)
    if params.gate_up_bias is None:
        x = gated_dense(x, gate_up, activation, upcoming=down)
    else:
        x = gated(dense(x, gate_up, params.gate_up_bias, upcoming=down), activation)
    residual = residual_dense(x, down, residual, params.down_bias, upcoming=qkv)
    if following is None:
        return residual, None, meetings
    return residual, dense(rms_norm(residual, following.norm, eps), following.qkv, following.qkv_bias), meetings
