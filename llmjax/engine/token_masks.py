"""Token masks on the device: which tokens some rows may sample. Pure; knows neither grammars nor requests.

A mask is int32 words: bit i of word w is token 32 w + i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32


class TokenMasks(NamedTuple):
    """The masks of a launch.

    Attributes:
        rows: those that have one.
        allowed: gives the masks [R, W]; called where a row has one.
    """

    rows: Bool[Array, "R"]
    allowed: Callable[[], Int32[Array, "R W"]]


def num_mask_words(vocab_size: int) -> int:
    """int32 words of a mask."""
    return -(-vocab_size // 32)


def apply_masks(logits: Float32[Array, "R V"], masks: TokenMasks) -> Float32[Array, "R V"]:
    """-inf for what the masks do not allow."""
    bits = (masks.allowed()[:, :, None] >> jnp.arange(32)) & 1  # an arithmetic shift: the lowest bit is right all the same
    allowed = bits.reshape(logits.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(masks.rows[:, None] & ~allowed, -jnp.inf, logits)
