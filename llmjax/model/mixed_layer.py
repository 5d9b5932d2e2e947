"""Products with weights that are not all alike: int8, or a dtype other than the activations'.

Owns which operation multiplies by which weight, and what is fused around it. A layer whose weights are all in the activations'
dtype never comes here (`is_uniform`): `fused_layer` has it. Activations are quantised token by token, so that what a token gets
depends on no other token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from pallas_kernels.fused_norm import rms_norm, rms_norm_quantize
from pallas_kernels.gated_activation import gated
from pallas_kernels.int8_matmul import faster_way, quantize_activations, w8a8, w8a16
from pallas_kernels.matmul import dense, gated_dense, residual_dense
from pallas_kernels.quantized import QuantizedTensor, reorder

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from llmjax.model.quantization import Quantization
    from pallas_kernels.fused_layer import LayerParams, NextParams
    from pallas_kernels.gated_activation import Activation

Weight = Float[Array, "out in"] | QuantizedTensor


def is_uniform(dtype: DTypeLike, behind: LayerParams, in_front: NextParams | None) -> bool:
    """Whether all weights are arrays in the activations' dtype."""
    weights = [behind.out, behind.gate_up, behind.down, *([] if in_front is None else [in_front.qkv])]
    return all(not isinstance(w, QuantizedTensor) and w.dtype == dtype for w in weights)


def mixed_layer(
    attention: Float[Array, "T NH"],
    residual: Float[Array, "R D"],
    params: LayerParams,
    following: NextParams | None,
    *,
    quantization: Quantization | None,
    activation: Activation,
    eps: float,
) -> tuple[Float[Array, "T D"], Float[Array, "T Q"] | None]:
    """What `fused_layer` computes, one operation after the other, whatever each weight is: (residual, q k v of the next layer).

    Residual and gate activation are in the epilogue of the product in front of them, the quantisation of activations in the norm
    in front of it.
    """
    hidden = multiply(attention, params.out, params.out_bias, quantization=quantization, residual=residual[: len(attention)])
    gates = _multiply_normed(
        hidden, params.norm, params.gate_up, params.gate_up_bias, eps=eps, quantization=quantization, activation=activation
    )
    hidden = multiply(gates, params.down, params.down_bias, quantization=quantization, residual=hidden)
    return hidden, None if following is None else project_normed(hidden, following, eps=eps, quantization=quantization)


def project_normed(
    x: Float[Array, "T D"], params: NextParams, *, eps: float, quantization: Quantization | None
) -> Float[Array, "T Q"]:
    """q, k and v of the norm of x."""
    return _multiply_normed(x, params.norm, params.qkv, params.qkv_bias, eps=eps, quantization=quantization)


def multiply(
    x: Float[Array, "T in"],
    w: Weight,
    bias: Float[Array, "out"] | None,
    *,
    quantization: Quantization | None,
    residual: Float[Array, "T out"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "T out"]:
    """x @ w.T + bias; then the residual is added, or gate and up of it become one. In `out_dtype`, else that of the activations.

    An int8 weight needs the quantization that it is of, for its scheme.
    """
    if activation is not None and bias is not None:  # no operation has both in its epilogue
        return gated(multiply(x, w, bias, quantization=quantization), activation)
    epilogue: dict[str, Any] = {"residual": residual, "activation": activation, "out_dtype": out_dtype}
    if not isinstance(w, QuantizedTensor):
        return _multiply_plain(x, w, bias, **epilogue)
    if _takes_int8(x, w, bias, quantization, **epilogue):
        return _multiply_int8(*quantize_activations(x), x.dtype, w, bias, **epilogue)
    return w8a16(x, w, bias, **epilogue)


def embed(w: Weight, tokens: Int[Array, "T"], dtype: jnp.dtype) -> Float[Array, "T D"]:
    """Rows of the embedding, in the activations' dtype. Ids outside the table are clipped to it."""
    if not isinstance(w, QuantizedTensor):
        return jnp.take(w, tokens, axis=0, mode="clip").astype(dtype)
    rows = jnp.take(w.qvalue, tokens, axis=0, mode="clip")
    scale = jnp.take(w.channel_scale, tokens, axis=0, mode="clip")
    return ((reorder(rows) if w.packed else rows).astype(jnp.float32) * scale[:, None]).astype(dtype)


def _multiply_normed(
    x: Float[Array, "T D"],
    norm: Float[Array, "D"],
    w: Weight,
    bias: Float[Array, "out"] | None,
    *,
    eps: float,
    quantization: Quantization | None,
    activation: Activation | None = None,
) -> Float[Array, "T out"]:
    """`multiply` of the norm of x, which is quantised as it is computed where the product takes it so."""
    if activation is not None and bias is not None:
        return gated(_multiply_normed(x, norm, w, bias, eps=eps, quantization=quantization), activation)
    if isinstance(w, QuantizedTensor) and _takes_int8(x, w, bias, quantization, activation=activation):
        return _multiply_int8(*rms_norm_quantize(x, norm, eps), x.dtype, w, bias, activation=activation)
    return multiply(rms_norm(x, norm, eps), w, bias, quantization=quantization, activation=activation)


def _takes_int8(x: Array, w: QuantizedTensor, bias: Array | None, quantization: Quantization | None, **epilogue: Any) -> bool:
    if quantization is None:
        raise ValueError("an int8 weight, but the config has no quantization: give the config that came with the parameters")
    return quantization.scheme == "w8a8" and faster_way(x, w, bias, **epilogue) != "w8a16"


def _multiply_int8(
    xq: Int8[Array, "T in"],
    x_scale: Float[Array, "T"],
    dtype: DTypeLike,
    w: QuantizedTensor,
    bias: Array | None,
    *,
    residual: Array | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """`dtype` is that of the activations that were quantised."""
    dtype = dtype if out_dtype is None else out_dtype
    return w8a8(xq, x_scale, w, bias, residual=residual, activation=activation, out_dtype=dtype)


def _multiply_plain(
    x: Array,
    w: Array,
    bias: Array | None,
    *,
    residual: Array | None,
    activation: Activation | None,
    out_dtype: DTypeLike | None,
) -> Array:
    """In the wider of the two dtypes, and back."""
    wide = jnp.promote_types(x.dtype, w.dtype)
    operands = x.astype(wide), w.astype(wide)
    if residual is not None:
        return residual_dense(*operands, residual, bias)
    if activation is not None:
        return gated_dense(*operands, activation).astype(x.dtype)
    return dense(*operands, bias, out_dtype=x.dtype if out_dtype is None else out_dtype)
