"""What an array adds to an observer, counted on the device that holds it. Pure; keeps nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from llmjax.errors import NonFiniteError
from llmjax.quantization.log_bins import LOWEST_EXPONENT, MANTISSA_BITS, NUM_BINS
from llmjax.quantization.observers import Granularity, Observer, Summary


@functools.partial(jax.jit, static_argnames=("granularity", "channel_axis"))
def summarise(
    x: Float[Array, "T D"], counted: Bool[Array, "T"] | None = None, *, granularity: Granularity, channel_axis: int = 1
) -> tuple[Int32[Array, "G bins"], Float[Array, "G"], Int32[Array, ""]]:
    """Histogram and largest magnitude of each group of x, and the number of values that are not finite: see `Summary`.

    Args:
        x: at most 2^31 - 1 values.
        counted: rows that count; None for all.
        granularity: as of `Observer`; a token is a row.
        channel_axis: 1 for activations, whose channels are columns; 0 for weights [out, in], whose channels are rows.
    Raises ValueError for more values than an int32 counts.
    """
    if x.size >= 2**31:
        raise ValueError(f"summarise counts up to 2^31 - 1 values at once, got {list(x.shape)}: give fewer rows")
    magnitudes = jnp.abs(x.astype(jnp.float32))
    weight = jnp.ones((len(x), 1), jnp.int32) if counted is None else counted.astype(jnp.int32)[:, None]
    magnitudes = jnp.where(weight > 0, magnitudes, 0.0)
    bad = jnp.sum(~jnp.isfinite(magnitudes))
    if granularity == "token":
        magnitudes = jnp.max(magnitudes, axis=1, keepdims=True)
    weights = jnp.broadcast_to(weight, magnitudes.shape)
    groups = jnp.zeros((1, 1), jnp.int32)
    if granularity == "channel":
        groups = lax.broadcasted_iota(jnp.int32, magnitudes.shape, channel_axis)
    number = x.shape[channel_axis] if granularity == "channel" else 1
    counts = jnp.zeros((number, NUM_BINS), jnp.int32).at[groups, _bin_numbers(magnitudes)].add(weights)
    absmax = jnp.max(magnitudes, axis=1 - channel_axis) if granularity == "channel" else jnp.max(magnitudes)[None]
    return counts, absmax, bad


def observe(
    observer: Observer, x: Float[Array, "T D"], name: str, counted: Bool[Array, "T"] | None = None, *, channel_axis: int = 1
) -> None:
    """Show an array to an observer; arguments as of `summarise`.

    Raises `NonFiniteError` by this name when it holds NaN or infinity; the observer is as before then.
    """
    counts, absmax, bad = summarise(x, counted, granularity=observer.granularity, channel_axis=channel_axis)
    refuse_bad(name, int(bad))
    observer.add(Summary(np.asarray(counts), np.asarray(absmax), 0))


def refuse_bad(name: str, bad: int) -> None:
    """Raises `NonFiniteError` unless `bad` is 0."""
    if bad:
        raise NonFiniteError(
            f"{name}: {bad} values are NaN or infinite, and have no range: look at the model's weights and dtype"
        )


def _bin_numbers(magnitudes: Float[Array, "T D"]) -> Int32[Array, "T D"]:
    """As `log_bins.bin_numbers`."""
    bits = lax.bitcast_convert_type(magnitudes, jnp.int32)
    first = (LOWEST_EXPONENT + 127) << MANTISSA_BITS
    return jnp.clip((bits >> (23 - MANTISSA_BITS)) - first + 1, 0, NUM_BINS - 1)
