"""Everything of a decoder layer from one attention to the next: four matmuls and what stands between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pallas_kernels.dispatch import Operation
from pallas_kernels.fused_layer import mosaic, xla

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from pallas_kernels.gated_activation import Activation

MEETINGS = mosaic.MEETINGS

FUSED_LAYER = Operation("fused_layer", xla.fused_layer)
FUSED_LAYER.register(
    "mosaic", mosaic.fused_layer, shape_key=mosaic.shape_key, config_type=mosaic.Config, candidates=mosaic.candidates
)


class LayerParams(NamedTuple):
    """The parameters of a layer behind its attention. Weights are stored [out, in]; norms are float32."""

    out: Float[Array, "D NH"]
    out_bias: Float[Array, "D"] | None
    norm: Float[Array, "D"]
    gate_up: Float[Array, "F2 D"]
    gate_up_bias: Float[Array, "F2"] | None
    down: Float[Array, "D F"]
    down_bias: Float[Array, "D"] | None


class NextParams(NamedTuple):
    """The parameters of the next layer in front of its attention."""

    norm: Float[Array, "D"]
    qkv: Float[Array, "Q D"]
    qkv_bias: Float[Array, "Q"] | None


def fused_layer(
    attention: Float[Array, "T NH"],
    residual: Float[Array, "R D"],
    meetings: Int[Array, "L3"],
    layer: Int[Array, ""],
    params: LayerParams,
    following: NextParams | None,
    *,
    activation: Activation,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "R D"], Float[Array, "R Q"] | None, Int[Array, "L3"]]:
    """From the heads' outputs of one layer to q, k and v of the next.

    residual += attention out^T; gate, up = norm(residual) gate_up^T; residual += (activation(gate) up) down^T;
    qkv = following.norm(residual) qkv^T. Matmuls accumulate in float32; the residual stream is rounded to its dtype at each
    addition, and norms are RMSNorms of it as rounded.

    Args:
        attention: T tokens.
        residual: at least T rows; what lies in the others reaches no row below T.
        meetings: int32 zeros at the start of a step, `MEETINGS` for each layer. A kernel counts there who has arrived at its
            grid-wide barriers. Pass on what comes back.
        layer: number of the layer, int32; may be traced. No two calls between which meetings are passed on may have the same:
            the second would find its barriers passed, and read what is not there yet.
        following: None behind the last layer.

    Returns:
        the new residual stream, and q, k, v of the next layer (None without `following`): T rows or more, of which those
        from T on hold anything; and the meetings.
    Raises ValueError when shapes do not fit each other.
    """
    hidden, mlp = params.down.shape
    shapes_fit = (
        attention.shape[1:] == params.out.shape[1:]
        and residual.shape[1:] == (hidden,)
        and params.out.shape[0] == hidden
        and params.gate_up.shape == (2 * mlp, hidden)
        and (following is None or following.qkv.shape[1] == hidden)
    )
    if meetings.ndim != 1 or meetings.dtype != "int32" or meetings.size % MEETINGS or not meetings.size:
        raise ValueError(f"fused_layer: meetings are {MEETINGS} int32 for each layer, got {meetings.dtype}{list(meetings.shape)}")
    if not shapes_fit or residual.shape[0] < attention.shape[0]:
        shapes = ", ".join(str(a.shape) for a in (attention, residual, params.out, params.gate_up, params.down))
        raise ValueError(f"fused_layer: attention, residual and weights [out, in] do not fit each other: {shapes}")
    return FUSED_LAYER(
        attention,
        residual,
        meetings,
        layer,
        params,
        following,
        activation=activation,
        eps=eps,
        implementation=implementation,
    )
