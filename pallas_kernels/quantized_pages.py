"""Pages of keys or values in int8: what they are, and how tokens are rounded into them.

Owns the container and its rounding. Must not know who writes pages, nor who attends to them.

A token's head is qvalue * scale * channels: one float32 scale for the token's head, found from its own largest magnitude, so that
a token never changes another; and, for keys, one factor for each channel of the layer's head, which is the same for all tokens.
Some models' keys have channels a hundred times as large as the others (a bias of the projection, which says nothing about the
token): with a scale alone these would leave the others a few steps only (KIVI, Liu et al., 2024). The factors cost nothing where
keys are read: q . (qvalue * channels) = (q * channels) . qvalue.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels.quantized import quantize_tokens

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int, Int8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedPages:
    """The pages of all layers, of keys or of values, in int8: a pytree that serves wherever a cache [LP, K, page, H] does.

    Attributes:
        qvalue: -127..127.
        scale: float32, one for each token's head. That of a token with NaN or infinity is not finite: int8 cannot say it.
        channels: float32, finite and positive, of each layer; None for ones. If they are powers of two, q * channels is exact.
    """

    qvalue: Int8[Array, "LP K page H"]
    scale: Float[Array, "LP K page"]
    channels: Float[Array, "L K H"] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[LP, K, page, H]."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def dtype(self) -> jnp.dtype:
        return self.qvalue.dtype

    def channels_of(self, page: int | Int[Array, "*any"]) -> Float[Array, "*any K H"] | None:
        """The factors of the layers that pages belong to; page ids count the pages of the layers in front."""
        if self.channels is None:
            return None
        pages_a_layer = self.qvalue.shape[0] // self.channels.shape[0]
        return self.channels[jnp.asarray(page) // pages_a_layer]


def check_cache(operation: str, cache: Array | QuantizedPages) -> None:
    """Raises ValueError for quantised pages whose parts do not fit each other."""
    if not isinstance(cache, QuantizedPages):
        return
    pages, kv_heads, page, head_dim = cache.shape
    channels = None if cache.channels is None else cache.channels.shape
    fits = channels is None or (channels[1:] == (kv_heads, head_dim) and channels[0] > 0 and pages % channels[0] == 0)
    if cache.scale.shape != (pages, kv_heads, page) or not fits:
        raise ValueError(
            f"{operation}: quantised pages {list(cache.shape)} take scale [LP, K, page] and channels [L, K, H] with L a divisor "
            f"of LP, or none; got {list(cache.scale.shape)} and {channels}"
        )


def quantize_heads(
    x: Float[Array, "T K H"], channels: Float[Array, "T K H"] | None
) -> tuple[Int8[Array, "T K H"], Float[Array, "T K"]]:
    """(int8, scale) of the heads of tokens, their channels divided by the factors first. Arithmetic is float32."""
    wide = x.astype(jnp.float32)
    return quantize_tokens(wide if channels is None else wide / channels)


def dequantize_pages(cache: QuantizedPages) -> Float[Array, "LP K page H"]:
    """float32 pages that quantised ones stand for."""
    wide = cache.qvalue.astype(jnp.float32) * cache.scale[..., None]
    channels = cache.channels_of(jnp.arange(cache.shape[0]))
    return wide if channels is None else wide * channels[:, :, None, :]
