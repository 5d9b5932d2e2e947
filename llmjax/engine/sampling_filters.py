"""What the temperature and the filters top-k, top-p and min-p leave of a distribution, for all rows at once. Pure.

Filters find a threshold by searching over the bits of the logits instead of sorting the vocabulary, which makes them exact
for any value: nothing is truncated to some number of candidates.

On a GPU time is passes over the logits, and a condition joins the CUDA graph only if none of its branches holds a loop or a
sort: else the host reads the condition in every step. So there all is unrolled into few passes of many sums each
(`by_platform`); a CPU, whose time is operations, takes simple passes in a loop. Both give the same thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels import tuning

if TYPE_CHECKING:
    from llmjax.engine.sample import SamplingSettings

_LANES = 512  # partial sums of a sum over the vocabulary
_BITS_A_PASS = 4  # of a threshold; a pass has 15 sums then, about as much work as reading the logits takes time


def _scaled(adjusted: Array, best: Array, settings: SamplingSettings, greedy: Array) -> Array:
    """Unnormalised log probabilities after the temperature, 0 for the most likely token; greedy rows are at temperature 1."""
    # The maximum goes first: the quotient could overflow, a quotient of something at most 0 only vanishes.
    return (adjusted - best[:, None]) / jnp.where(greedy, 1.0, settings.temperature)[:, None]


def lowest_kept(adjusted: Array, best: Array, settings: SamplingSettings, greedy: Array) -> Array:
    """What top-k and top-p keep, as the lowest `_ordered_bits` [R] kept; 0 keeps all, as for greedy rows."""
    rows, vocab = adjusted.shape
    top_k = jnp.where(greedy | (settings.top_k <= 0), vocab, jnp.minimum(settings.top_k, vocab))
    top_p = jnp.where(greedy, 1.0, settings.top_p)
    everything = jnp.zeros((rows,), jnp.uint32)

    def search() -> Array:
        keys = _ordered_bits(adjusted)  # not of `_scaled`: rounding may make neighbours equal there

        def search_top_p(by_k: Array) -> Array:
            weights = jnp.where(keys >= by_k[:, None], jnp.exp(_scaled(adjusted, best, settings, greedy)), 0.0)
            by_p = _threshold(keys, weights, top_p * _sum(weights))
            return jnp.where(top_p < 1, jnp.maximum(by_k, by_p), by_k)

        by_k = lax.cond(
            (top_k < vocab).any(), lambda: _threshold(keys, jnp.ones_like(adjusted, jnp.int32), top_k), lambda: everything
        )
        return lax.cond((top_p < 1).any(), search_top_p, lambda by_k: by_k, by_k)

    return lax.cond(((top_k < vocab) | (top_p < 1)).any(), search, lambda: everything)


def final_distribution(adjusted: Array, best: Array, lowest: Array, settings: SamplingSettings, greedy: Array) -> Array:
    """Unnormalised log probabilities of the distribution sampled from: -inf for what the filters remove."""
    scaled = _scaled(adjusted, best, settings, greedy)
    min_p = jnp.where(greedy, 0.0, settings.min_p)
    return jnp.where((_ordered_bits(adjusted) >= lowest[:, None]) & (jnp.exp(scaled) >= min_p[:, None]), scaled, -jnp.inf)


def _ordered_bits(x: Array) -> Array:
    """float32 as uint32 in the same order; both zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(keys: Array, weights: Array, wanted: Array) -> Array:
    """The largest threshold [R] such that the `weights` [R, V] (none negative) of the keys from it on add up to at least
    `wanted` [R]; 0 where none does."""
    return by_platform(_threshold_in_few_passes, _threshold_by_bisection, keys, weights, wanted)


def _threshold_by_bisection(keys: Array, weights: Array, wanted: Array) -> Array:
    def step(index: Array, low: Array) -> Array:
        trial = low | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(_sum(jnp.where(keys >= trial[:, None], weights, 0)) >= wanted, trial, low)

    return lax.fori_loop(0, 32, step, jnp.zeros(wanted.shape, jnp.uint32))


def _threshold_in_few_passes(keys: Array, weights: Array, wanted: Array) -> Array:
    low = jnp.zeros(wanted.shape, jnp.uint32)
    for shift in range(32 - _BITS_A_PASS, -1, -_BITS_A_PASS):
        low = _narrowed(keys, weights, wanted, low, jnp.uint32(shift))
    return low


@jax.jit  # lowered once, and called for every pass
def _narrowed(keys: Array, weights: Array, wanted: Array, low: Array, shift: Array) -> Array:
    """`low` with its next bits, found by one pass: the sums for all values these bits can have, of which the first few hold."""
    # The barriers make the passes alike, so that their kernels are compiled once: no shift is a constant of its own.
    low, shift = lax.optimization_barrier((low, shift))
    trials = lax.optimization_barrier(tuple(low | (jnp.uint32(value) << shift) for value in range(1, 2**_BITS_A_PASS)))
    zero, nothing = jnp.zeros((), weights.dtype), jnp.zeros_like(weights)
    masked = tuple(lax.select(keys >= lax.broadcast_in_dim(trial, keys.shape, (0,)), weights, nothing) for trial in trials)
    sums = lax.reduce(masked, (zero,) * len(masked), lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (1,))
    holding = sum((total >= wanted).astype(jnp.uint32) for total in sums)
    return low | (holding << shift)


def log_sum_exp(x: Array, peak: Array) -> Array:
    """log(sum(exp(x - peak))). A logprob is (x - peak) minus this: peak plus this would round away digits of large logits."""
    return jnp.log(_sum(jnp.exp(x - peak[:, None])))


def _sum(x: Array) -> Array:
    """Sum over the vocabulary. In one running sum, many tiny probabilities would vanish beside a large one: a GPU adds up in a
    tree anyway, elsewhere it is done in two steps."""
    return by_platform(lambda x: x.sum(axis=-1), _sum_in_two_steps, x)


def _sum_in_two_steps(x: Array) -> Array:
    rows, size = x.shape
    x = jnp.pad(x, ((0, 0), (0, -size % _LANES))).reshape(rows, -1, _LANES).sum(axis=1)
    return lax.optimization_barrier(x).sum(axis=-1)  # the barrier keeps XLA from joining the two


def by_platform(gpu: Callable[..., Any], other: Callable[..., Any], *operands: Array) -> Any:
    return (other if tuning.target() is None else gpu)(*operands)
