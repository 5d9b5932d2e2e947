"""Dense matmuls against weights stored as [out, in]: both operands contract over their last axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.dispatch import Operation
from pallas_kernels.gated_activation import Activation
from pallas_kernels.gated_activation.xla import ACTIVATIONS
from pallas_kernels.matmul import mosaic, xla
from pallas_kernels.matmul.mosaic_plan import Config, candidates

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float

DENSE = Operation("dense", xla.dense)
RESIDUAL_DENSE = Operation("residual_dense", xla.residual_dense)
GATED_DENSE = Operation("gated_dense", xla.gated_dense)

DENSE.register("mosaic", mosaic.dense, shape_key=mosaic.dense_key, config_type=Config, candidates=candidates)
RESIDUAL_DENSE.register("mosaic", mosaic.residual_dense, shape_key=mosaic.residual_key, config_type=Config, candidates=candidates)
GATED_DENSE.register("mosaic", mosaic.gated_dense, shape_key=mosaic.gated_key, config_type=Config, candidates=candidates)


def dense(
    x: Float[Array, "T in"],
    w: Float[Array, "out in"],
    bias: Float[Array, "out"] | None = None,
    *,
    out_dtype: DTypeLike | None = None,
    upcoming: Float[Array, "next_out next_in"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T out"]:
    """x @ w.T + bias, accumulated in float32 whatever the dtypes, returned as `out_dtype` (default: x's).

    The bias is added before rounding to `out_dtype`. float32 operands are multiplied as float32 on every platform (no
    TF32). `upcoming` is a hint: the weights that the program's next matmul reads. An implementation may bring some of them
    into the cache while it ends; no result depends on it. Raises ValueError when the shapes do not fit.
    """
    _check("dense", x, w, bias, upcoming)
    return DENSE(x, w, bias, out_dtype=out_dtype, upcoming=upcoming, implementation=implementation)


def residual_dense(
    x: Float[Array, "T in"],
    w: Float[Array, "out in"],
    residual: Float[Array, "T out"],
    bias: Float[Array, "out"] | None = None,
    *,
    upcoming: Float[Array, "next_out next_in"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T out"]:
    """residual + (x @ w.T + bias), added in float32, in the residual's dtype: a new residual stream.

    The reference rounds x @ w.T + bias to x's dtype first, as separate operations do; an implementation may leave that
    rounding out, and rounds at least the result. `upcoming` as in `dense`. Raises ValueError when the shapes do not fit.
    """
    _check("residual_dense", x, w, bias, upcoming)
    if residual.shape != (x.shape[0], w.shape[0]):
        raise ValueError(f"residual_dense: residual {residual.shape} does not fit x {x.shape} and w {w.shape}")
    return RESIDUAL_DENSE(x, w, residual, bias, upcoming=upcoming, implementation=implementation)


def gated_dense(
    x: Float[Array, "T in"],
    w_gate_up: Float[Array, "F2 in"],
    activation: Activation = "silu",
    *,
    upcoming: Float[Array, "next_out next_in"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "T F"]:
    """activation(x @ gate.T) * (x @ up.T), where w_gate_up holds gate's rows and then up's (F2 = 2 F); in x's dtype.

    The activation and the product are float32. The reference rounds both matmuls to x's dtype first, as separate operations
    do; an implementation may leave that rounding out, and rounds at least the result. `upcoming` as in `dense`.
    Raises ValueError for another activation, an odd number of rows, or shapes that do not fit.
    Source: Shazeer, GLU Variants Improve Transformer, 2020.
    """
    _check("gated_dense", x, w_gate_up, None, upcoming)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}; choose one of {', '.join(ACTIVATIONS)}")
    if w_gate_up.shape[0] % 2:
        raise ValueError(f"gated_dense: w holds the rows of gate and up, an even number, got {w_gate_up.shape[0]}")
    return GATED_DENSE(x, w_gate_up, activation, upcoming=upcoming, implementation=implementation)


def _check(name: str, x: Array, w: Array, bias: Array | None, upcoming: Array | None) -> None:
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{name} takes x [T, in] and w [out, in], got {x.shape} and {w.shape}")
    if bias is not None and bias.shape != (w.shape[0],):
        raise ValueError(f"{name}: bias {bias.shape} does not fit w {w.shape}")
    if upcoming is not None and upcoming.ndim != 2:
        raise ValueError(f"{name}: upcoming is a weight [out, in], got {upcoming.shape}")
