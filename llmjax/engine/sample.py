"""From logits to tokens and logprobs, for all rows at once. Pure and jitted by the step; knows neither state nor requests.

Settings are arrays, so that one program serves any mix of them. What costs time is done only if some row of the batch asks
for it (`lax.cond`): a purely greedy batch pays for one maximum and one log-sum-exp of its logits. Nothing here looks across
rows, so a row's result does not depend on its neighbours or its place.

Filters find a threshold by bisection over the bits of the logits instead of sorting the vocabulary, which makes them exact
for any value: nothing is truncated to some number of candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from llmjax.sampling_params import GREEDY_TEMPERATURE, MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_STOPS = 32  # ids a row that end its output: the request's own and the model's
MAX_BIAS = MAX_LOGIT_BIAS
NUM_TOP = MAX_LOGPROBS
PROMPT_BIT = 1 << 30  # in `counts`: the token occurs in the prompt; the bits below count it in the output

_LANES = 512  # partial sums of a sum over the vocabulary


class SamplingSettings(NamedTuple):
    """What `SamplingParams` asks for, as arrays over rows.

    Attributes:
        temperature: below 1e-3 is greedy; greedy rows know no filter.
        top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
        repetition_penalty: above 0, 1 is off. presence_penalty, frequency_penalty: 0 is off.
        seed: 64 bits as two words. choice: number of the choice, part of the noise.
        num_logprobs: alternatives wanted, -1 for no logprobs.
        processed_logprobs: logprobs of the distribution sampled from instead of the model's own.
        min_tokens: `stop_ids` cannot be sampled before that many output tokens.
        stop_ids, bias_ids: token ids, padded with -1; no id twice in a row's bias_ids.
    """

    temperature: Float32[Array, "R"]
    top_k: Int32[Array, "R"]
    top_p: Float32[Array, "R"]
    min_p: Float32[Array, "R"]
    repetition_penalty: Float32[Array, "R"]
    presence_penalty: Float32[Array, "R"]
    frequency_penalty: Float32[Array, "R"]
    seed: UInt32[Array, "R 2"]
    choice: Int32[Array, "R"]
    num_logprobs: Int32[Array, "R"]
    processed_logprobs: Bool[Array, "R"]
    min_tokens: Int32[Array, "R"]
    stop_ids: Int32[Array, "R 32"]
    bias_ids: Int32[Array, "R 300"]
    bias_values: Float32[Array, "R 300"]


class Sampled(NamedTuple):
    """Attributes:
    tokens: -1 where the row is not finite.
    logprobs: of the token, NaN where the row is not finite.
    ranks: 1 for the most likely token of the distribution that the logprob is of; 0 where the row wants no logprobs.
    finite: False where the logits hold NaN or +inf, or no token is left.
    top_ids, top_logprobs: the row's `num_logprobs` most likely tokens, best first; the rest is -1 and -inf.
    """

    tokens: Int32[Array, "R"]
    logprobs: Float32[Array, "R"]
    ranks: Int32[Array, "R"]
    finite: Bool[Array, "R"]
    top_ids: Int32[Array, "R 20"]
    top_logprobs: Float32[Array, "R 20"]


class TokenScores(NamedTuple):
    """As in `Sampled`, for given tokens; all 20 alternatives are filled as far as the vocabulary goes."""

    logprobs: Float32[Array, "T"]
    ranks: Int32[Array, "T"]
    top_ids: Int32[Array, "T 20"]
    top_logprobs: Float32[Array, "T 20"]


def sample(
    logits: Float32[Array, "R V"],
    settings: SamplingSettings,
    counts: Callable[[], Int32[Array, "R V"]],
    positions: Int32[Array, "R"],
    num_output: Int32[Array, "R"],
) -> Sampled:
    """The next token of each row.

    Order: logit bias, repetition, presence and frequency penalty, stop ids (impossible before `min_tokens`); temperature;
    top-k; top-p over what top-k left, renormalised; min-p relative to the most likely token. A token tied with the last one
    kept is kept too. Greedy rows take the most likely token after bias, penalties and stop ids, the lowest id among equals.

    The noise is a function of the row's seed, choice and position alone (Gumbel-max: Gumbel, Statistical Theory of Extreme
    Values, 1954). Raw logprobs are the log-softmax of `logits` as given; processed ones are of the distribution sampled from,
    -inf for what the filters removed (greedy rows: after bias, penalties and stop ids, at temperature 1).

    Args:
        logits: the model's own; -inf for ids that cannot be sampled.
        counts: gives how often each id occurs, see `PROMPT_BIT`; called where a penalty needs it.
        positions: position in the sequence of the token being sampled.
        num_output: output tokens so far.
    """
    peak = logits.max(axis=-1)
    log_sum = _log_sum(logits, peak)
    finite = jnp.isfinite(peak) & jnp.isfinite(log_sum)
    greedy = settings.temperature < GREEDY_TEMPERATURE
    adjusts = _has_bias(settings) | _has_penalty(settings) | _stops_masked(settings, num_output)

    def plain() -> Sampled:
        rows = logits.shape[0]
        return Sampled(
            tokens=_first(logits, peak),
            logprobs=-log_sum,
            ranks=jnp.zeros((rows,), jnp.int32),
            finite=finite,
            top_ids=jnp.full((rows, NUM_TOP), -1, jnp.int32),
            top_logprobs=jnp.full((rows, NUM_TOP), -jnp.inf),
        )

    def full() -> Sampled:
        adjusted = lax.cond(adjusts.any(), lambda: _adjust(logits, settings, counts, num_output), lambda: logits)
        best = adjusted.max(axis=-1)

        def draw() -> tuple[Array, Array]:
            final = _filtered(adjusted, best, settings, greedy)
            noisy = jnp.where(greedy[:, None], adjusted, final + _gumbel(settings, positions, logits.shape[1]))
            return _first(noisy, noisy.max(axis=-1)), final

        tokens, final = lax.cond((~greedy).any(), draw, lambda: (_first(adjusted, best), adjusted - best[:, None]))
        return Sampled(tokens, *_logprobs(logits, peak, log_sum, final, tokens, settings, finite & jnp.isfinite(best)))

    simple = greedy & ~adjusts & (settings.num_logprobs < 0)
    result = lax.cond(simple.all(), plain, full)
    return result._replace(
        tokens=jnp.where(result.finite, result.tokens, -1), logprobs=jnp.where(result.finite, result.logprobs, jnp.nan)
    )


def token_scores(logits: Float32[Array, "T V"], targets: Int32[Array, "T"]) -> TokenScores:
    """Raw logprobs, ranks and the most likely alternatives of given tokens (ids within the vocabulary)."""
    peak = logits.max(axis=-1)
    log_sum = _log_sum(logits, peak)
    chosen = _take(logits, targets)
    return TokenScores((chosen - peak) - log_sum, _rank(logits, chosen), *_top(logits, peak, log_sum))


# -- bias and penalties


def _has_bias(settings: SamplingSettings) -> Array:
    return (settings.bias_ids >= 0).any(axis=-1)


def _has_penalty(settings: SamplingSettings) -> Array:
    s = settings
    return (s.repetition_penalty != 1) | (s.presence_penalty != 0) | (s.frequency_penalty != 0)


def _stops_masked(settings: SamplingSettings, num_output: Array) -> Array:
    return num_output < settings.min_tokens


def _adjust(logits: Array, settings: SamplingSettings, counts: Callable[[], Array], num_output: Array) -> Array:
    rows, vocab = logits.shape
    row = jnp.arange(rows)[:, None]

    def bias(x: Array) -> Array:
        ids = jnp.where(settings.bias_ids >= 0, settings.bias_ids, vocab)
        return x.at[row, ids].add(settings.bias_values, mode="drop")

    def penalise(x: Array) -> Array:
        seen = counts()
        in_output = seen & (PROMPT_BIT - 1)
        repetition = settings.repetition_penalty[:, None]
        x = jnp.where(seen != 0, jnp.where(x > 0, x / repetition, x * repetition), x)
        return x - settings.presence_penalty[:, None] * (in_output > 0) - settings.frequency_penalty[:, None] * in_output

    def mask_stops(x: Array) -> Array:
        masked = _stops_masked(settings, num_output)[:, None] & (settings.stop_ids >= 0)
        return x.at[row, jnp.where(masked, settings.stop_ids, vocab)].set(-jnp.inf, mode="drop")

    x = lax.cond(_has_bias(settings).any(), bias, lambda x: x, logits)
    x = lax.cond(_has_penalty(settings).any(), penalise, lambda x: x, x)
    x = lax.cond(_stops_masked(settings, num_output).any(), mask_stops, lambda x: x, x)
    return jnp.minimum(x, jnp.finfo(jnp.float32).max)  # a division by a tiny penalty may have overflowed


# -- temperature, top-k, top-p, min-p


def _filtered(adjusted: Array, best: Array, settings: SamplingSettings, greedy: Array) -> Array:
    """Unnormalised log probabilities after temperature and filters, 0 for the most likely token; greedy rows keep all."""
    vocab = adjusted.shape[1]
    # The maximum goes first: the quotient could overflow, a quotient of something at most 0 only vanishes.
    scaled = (adjusted - best[:, None]) / jnp.where(greedy, 1.0, settings.temperature)[:, None]
    top_k = jnp.where(greedy | (settings.top_k <= 0), vocab, jnp.minimum(settings.top_k, vocab))
    top_p = jnp.where(greedy, 1.0, settings.top_p)
    min_p = jnp.where(greedy, 0.0, settings.min_p)

    def keep_top_k(kept: Array) -> Array:
        keys = _ordered_bits(adjusted)  # not of `scaled`: rounding may make neighbours equal there
        threshold = _bisect(lambda at: (keys >= at).sum(axis=-1, dtype=jnp.int32) >= top_k, adjusted.shape[0])
        return kept & (keys >= threshold[:, None])

    def keep_top_p(kept: Array) -> Array:
        keys = _ordered_bits(adjusted)
        weights = jnp.where(kept, jnp.exp(scaled), 0.0)
        wanted = top_p * _sum(weights)
        threshold = _bisect(lambda at: _sum(jnp.where(keys >= at, weights, 0.0)) >= wanted, adjusted.shape[0])
        return kept & ((keys >= threshold[:, None]) | (top_p >= 1)[:, None])

    kept = jnp.ones_like(adjusted, bool)
    kept = lax.cond((top_k < vocab).any(), keep_top_k, lambda kept: kept, kept)
    kept = lax.cond((top_p < 1).any(), keep_top_p, lambda kept: kept, kept)
    kept = kept & (jnp.exp(scaled) >= min_p[:, None])
    return jnp.where(kept, scaled, -jnp.inf)


def _ordered_bits(x: Array) -> Array:
    """float32 as uint32 in the same order; both zeros are one."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _bisect(holds: Callable[[Array], Array], rows: int) -> Array:
    """The largest threshold [R] for which `holds`, which is true below some point and false above; 0 where it never is."""

    def step(index: Array, low: Array) -> Array:
        trial = low | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        return jnp.where(holds(trial[:, None]), trial, low)

    return lax.fori_loop(0, 32, step, jnp.zeros((rows,), jnp.uint32))


def _log_sum(x: Array, peak: Array) -> Array:
    """log(sum(exp(x - peak))). A logprob is (x - peak) minus this: peak plus this would round away digits of large logits."""
    return jnp.log(_sum(jnp.exp(x - peak[:, None])))


def _sum(x: Array) -> Array:
    """Sum over the vocabulary in two steps: in one running sum, many tiny probabilities would vanish beside a large one."""
    rows, size = x.shape
    x = jnp.pad(x, ((0, 0), (0, -size % _LANES))).reshape(rows, -1, _LANES).sum(axis=1)
    return lax.optimization_barrier(x).sum(axis=-1)  # the barrier keeps XLA from joining the two


def _gumbel(settings: SamplingSettings, positions: Array, vocab: int) -> Array:
    """Gumbel noise [R, V], a function of seed, choice and position of each row."""

    def bits(seed: Array, choice: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        return jax.random.bits(key, (vocab,), jnp.uint32)

    # All 32 bits count, and the tail that decides (u near 0) is the finely resolved one; u is never 0 nor 1.
    uniform = (jax.vmap(bits)(settings.seed, settings.choice, positions).astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))


# -- choice and logprobs


def _first(x: Array, value: Array) -> Array:
    """The lowest id whose entry equals `value`. (argmax costs twice as much on CPU, and the maximum is known anyway.)"""
    vocab = x.shape[1]
    ids = jnp.where(x == value[:, None], jnp.arange(vocab), vocab - 1)
    return ids.min(axis=-1).astype(jnp.int32)


def _take(x: Array, ids: Array) -> Array:
    return jnp.take_along_axis(x, ids[:, None], axis=-1, mode="clip")[:, 0]


def _rank(x: Array, chosen: Array) -> Array:
    return 1 + (x > chosen[:, None]).sum(axis=-1, dtype=jnp.int32)


def _top(x: Array, peak: Array, log_sum: Array) -> tuple[Array, Array]:
    """The `NUM_TOP` largest entries: ids and logprobs; -1 and -inf beyond the vocabulary."""
    size = min(NUM_TOP, x.shape[1])
    # Stable order costs a sort of the vocabulary on GPU.
    values, ids = lax.top_k(x, size, is_stable=False)
    fill = ((0, 0), (0, NUM_TOP - size))
    logprobs = jnp.pad((values - peak[:, None]) - log_sum[:, None], fill, constant_values=-jnp.inf)
    return jnp.pad(ids.astype(jnp.int32), fill, constant_values=-1), logprobs


def _logprobs(
    logits: Array,
    peak: Array,
    log_sum: Array,
    final: Array,
    tokens: Array,
    settings: SamplingSettings,
    finite: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """The fields of `Sampled` behind the tokens. The largest entry of `final` is 0."""
    rows = logits.shape[0]
    wanted = settings.num_logprobs
    no_top = jnp.full((rows, NUM_TOP), -1, jnp.int32), jnp.full((rows, NUM_TOP), -jnp.inf)

    def score() -> tuple[Array, Array, Array, Array]:
        processed = settings.processed_logprobs & (wanted >= 0)
        x = jnp.where(processed[:, None], final, logits)
        x_peak = jnp.where(processed, 0.0, peak)
        x_log_sum = jnp.where(processed, _log_sum(final, jnp.zeros_like(peak)), log_sum)
        chosen = _take(x, tokens)
        top_ids, top_logprobs = lax.cond((wanted > 0).any(), lambda: _top(x, x_peak, x_log_sum), lambda: no_top)
        beyond = jnp.arange(NUM_TOP) >= wanted[:, None]
        ranks = jnp.where(wanted >= 0, _rank(x, chosen), 0)
        logprobs = (chosen - x_peak) - x_log_sum
        return logprobs, ranks, jnp.where(beyond, -1, top_ids), jnp.where(beyond, -jnp.inf, top_logprobs)

    def skip() -> tuple[Array, Array, Array, Array]:
        return (_take(logits, tokens) - peak) - log_sum, jnp.zeros((rows,), jnp.int32), *no_top

    logprobs, ranks, top_ids, top_logprobs = lax.cond((wanted >= 0).any(), score, skip)
    return logprobs, ranks, finite, top_ids, top_logprobs
