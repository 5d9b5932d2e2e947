"""Matmuls against int8 weights [out, in]: with activations as they are (W8A16), or quantised token by token (W8A8).

`int8_dense` takes the one that was measured to be faster. Scales of activations are per token, so that no token changes another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.dispatch import Operation
from pallas_kernels.gated_activation.xla import ACTIVATIONS
from pallas_kernels.int8_matmul import choice, mosaic, mosaic_many, mosaic_tiles_plan, xla
from pallas_kernels.matmul.mosaic_plan import Config, candidates
from pallas_kernels.quantized import QuantizedTensor, quantize_tokens

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int8

    from pallas_kernels.gated_activation import Activation

QUANTIZE_ACTIVATIONS = Operation("quantize_activations", quantize_tokens)
W8A16 = Operation("w8a16", xla.w8a16)
W8A8 = Operation("w8a8", xla.w8a8)
INT8_DENSE = Operation("int8_dense", xla.w8a16)

W8A16.register("mosaic", mosaic.w8a16, shape_key=mosaic.w8a16_key, config_type=Config, candidates=candidates)
W8A8.register("mosaic", mosaic.w8a8, shape_key=mosaic.w8a8_key, config_type=Config, candidates=candidates)
W8A8.register(
    "mosaic_tiles",
    mosaic_many.w8a8,
    shape_key=mosaic_many.w8a8_key,
    config_type=mosaic_tiles_plan.TilesConfig,
    candidates=mosaic_tiles_plan.candidates,
)
INT8_DENSE.register(
    "w8a16", choice.via_w8a16(W8A16), shape_key=choice.shape_key, config_type=choice.Config, candidates=choice.candidates
)
INT8_DENSE.register(
    "w8a8",
    choice.via_w8a8(QUANTIZE_ACTIVATIONS, W8A8),
    shape_key=choice.shape_key,
    config_type=choice.Config,
    candidates=choice.candidates,
)


def quantize_activations(
    x: Float[Array, "... D"], *, implementation: str | None = None
) -> tuple[Int8[Array, "... D"], Float[Array, "..."]]:
    """(int8, scale): x to the nearest step of a float32 scale a token, which makes the token's largest magnitude 127.

    A token of zeros gets scale 1. Arithmetic is float32, halves round to even. The scale of a token with NaN or infinity is not
    finite, so that nothing multiplied by it is a number that looks right.
    """
    return QUANTIZE_ACTIVATIONS(x, implementation=implementation)


def w8a16(
    x: Float[Array, "T in"],
    w: QuantizedTensor,
    bias: Float[Array, "out"] | None = None,
    *,
    residual: Float[Array, "T out"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    upcoming: QuantizedTensor | None = None,
    implementation: str | None = None,
) -> Float[Array, "T out"]:
    """x @ dequantised(w).T + bias, and what is asked for behind it.

    The products of x with int8 are accumulated in float32; then sums * scale and + bias, in float32. Then one of:

    - nothing: rounded to `out_dtype` (default: x's dtype);
    - `residual`: added in float32, the result in the residual's dtype;
    - `activation`: w holds gate's rows and then up's; activation(gate) * up in float32, in x's dtype: [T, out / 2].

    The reference rounds to x's dtype in front of residual and activation, as separate operations do; an implementation may leave
    that rounding out, and rounds at least the result. `upcoming` is a hint: the weight that the program's next matmul reads. No
    result depends on it.
    Raises ValueError when shapes do not fit, and for epilogues that exclude each other.
    """
    _check("w8a16", x, w, bias, residual, activation, out_dtype, upcoming)
    dtype = x.dtype if out_dtype is None else out_dtype
    return W8A16(
        x, w, bias, residual, activation=activation, out_dtype=dtype, upcoming=upcoming, implementation=implementation
    )  # fmt: skip


def w8a8(
    xq: Int8[Array, "T in"],
    x_scale: Float[Array, "T"],
    w: QuantizedTensor,
    bias: Float[Array, "out"] | None = None,
    *,
    residual: Float[Array, "T out"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    upcoming: QuantizedTensor | None = None,
    implementation: str | None = None,
) -> Float[Array, "T out"]:
    """(xq * x_scale) @ dequantised(w).T + bias, and what is asked for behind it, as in `w8a16`.

    The contraction is exact, in int32 (so at most 132,000 inputs). The sum is rounded to float32, multiplied by the token's
    scale, then by the channel's, then the bias is added; each is a rounding. `out_dtype` is what `w8a16` takes from x.
    xq and x_scale come from `quantize_activations`, the columns in their own order whether w is packed or not.
    Raises ValueError when shapes or dtypes do not fit, and for epilogues that exclude each other.
    """
    if xq.dtype != jnp.int8 or x_scale.shape != xq.shape[:1]:
        raise ValueError(f"w8a8 takes int8 [T, in] and a scale [T], got {xq.dtype} {xq.shape} and {x_scale.shape}")
    _check("w8a8", xq, w, bias, residual, activation, None, upcoming)
    return W8A8(
        xq, x_scale, w, bias, residual,
        activation=activation, out_dtype=out_dtype, upcoming=upcoming, implementation=implementation,
    )  # fmt: skip


def int8_dense(
    x: Float[Array, "T in"],
    w: QuantizedTensor,
    bias: Float[Array, "out"] | None = None,
    *,
    residual: Float[Array, "T out"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
    upcoming: QuantizedTensor | None = None,
    implementation: str | None = None,
) -> Float[Array, "T out"]:
    """`w8a16`, or `w8a8` of x quantised token by token: whichever the device's table says is faster for the shape, `w8a16`
    without an entry. "w8a16" or "w8a8" as `implementation` insists on one. Arguments and errors as `w8a16`."""
    _check("int8_dense", x, w, bias, residual, activation, out_dtype, upcoming)
    dtype = x.dtype if out_dtype is None else out_dtype
    return INT8_DENSE(
        x, w, bias, residual, activation=activation, out_dtype=dtype, upcoming=upcoming, implementation=implementation
    )  # fmt: skip


def faster_way(
    x: Float[Array, "T in"],
    w: QuantizedTensor,
    bias: Float[Array, "out"] | None = None,
    *,
    residual: Float[Array, "T out"] | None = None,
    activation: Activation | None = None,
    out_dtype: DTypeLike | None = None,
) -> str | None:
    """ "w8a16" or "w8a8", whichever the device's table says is faster for such a call of `int8_dense`; None without an entry.

    For a caller that quantises earlier, as `rms_norm_quantize` does, and so asks before it has what it multiplies.
    """
    dtype = x.dtype if out_dtype is None else out_dtype
    key = choice.shape_key(x, w, bias, residual, activation=activation, out_dtype=dtype)
    entry = tuning.lookup("int8_dense", key)
    return None if entry is None else "w8a8" if entry["implementation"] == "w8a8" else "w8a16"


def _check(
    name: str,
    x: Array,
    w: QuantizedTensor,
    bias: Array | None,
    residual: Array | None,
    activation: str | None,
    out_dtype: DTypeLike | None,
    upcoming: QuantizedTensor | None,
) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name} takes x [T, in] and w [out, in], got {x.shape} and {w.shape}")
    if w.qvalue.dtype != jnp.int8 or w.scale.shape not in ((), w.shape[:1]):
        raise ValueError(f"{name}: w is {w.qvalue.dtype} with scales {w.scale.shape}; int8 with [] or {list(w.shape[:1])} fits")
    if bias is not None and bias.shape != (w.shape[0],):
        raise ValueError(f"{name}: bias {bias.shape} does not fit w {w.shape}")
    if residual is not None and residual.shape != (x.shape[0], w.shape[0]):
        raise ValueError(f"{name}: residual {residual.shape} does not fit x {x.shape} and w {w.shape}")
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if w.shape[0] % 2:
            raise ValueError(f"{name}: w holds the rows of gate and up, an even number, got {w.shape[0]}")
    if sum(given is not None for given in (residual, activation, out_dtype)) > 1:
        raise ValueError(f"{name}: residual, activation and out_dtype exclude each other")
    if activation is not None and bias is not None:
        raise ValueError(f"{name}: a bias in front of an activation is not served")
    if upcoming is not None and upcoming.ndim != 2:
        raise ValueError(f"{name}: upcoming is a weight [out, in], got {upcoming.shape}")
