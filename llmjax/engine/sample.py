"""From logits to tokens and logprobs, for all rows at once. Pure and jitted by the step; knows neither state nor requests.

Settings are arrays, so that one program serves any mix of them. What costs time is done only if some row of the batch asks
for it (`lax.cond`): a purely greedy batch goes through one condition, and pays for one maximum, one log-sum-exp and one
search of its logits. Nothing here looks across rows, so a row's result does not depend on its neighbours or its place.

What the filters do, and why a GPU goes another way than a CPU, is told in `sampling_filters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from llmjax.engine.sampling_filters import by_platform, final_distribution, log_sum_exp, lowest_kept
from llmjax.engine.token_masks import TokenMasks, apply_masks
from llmjax.sampling_params import GREEDY_TEMPERATURE, MAX_LOGIT_BIAS, MAX_LOGPROBS

MAX_STOPS = 32  # ids a row that end its output: the request's own and the model's
MAX_BIAS = MAX_LOGIT_BIAS
NUM_TOP = MAX_LOGPROBS
_DRAFT_NOISE, _VERDICT_NOISE = 2**31 + 1, 2**31 + 2  # tags of noise; without one it is the noise of `sample`
PROMPT_BIT = 1 << 30  # in `counts`: the token occurs in the prompt; the bits below count it in the output


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


class Drafts(NamedTuple):
    """Tokens that somebody drew from another distribution q, to be accepted or replaced.

    Attributes:
        tokens: -1 where there is none.
        log_q: gives log q, normalised; called where a row with a draft is not greedy.
    """

    tokens: Int32[Array, "R"]
    log_q: Callable[[], Float32[Array, "R V"]]


class Proposed(NamedTuple):
    """Attributes:
    tokens: -1 where the row's logits are not finite.
    log_q: log of the distribution they were drawn from, normalised. Means nothing for greedy rows.
    """

    tokens: Int32[Array, "R"]
    log_q: Float32[Array, "R V"]


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
    masks: TokenMasks | None = None,
    drafts: Drafts | None = None,
) -> Sampled:
    """The next token of each row.

    Order: logit bias, repetition, presence and frequency penalty, stop ids (impossible before `min_tokens`), mask; temperature;
    top-k; top-p over what top-k left, renormalised; min-p relative to the most likely token. A token tied with the last one
    kept is kept too. Greedy rows take the most likely token after bias, penalties, stop ids and mask, the lowest id among
    equals.

    The noise is a function of the row's seed, choice and position alone (Gumbel-max: Gumbel, Statistical Theory of Extreme
    Values, 1954). Raw logprobs are the log-softmax of `logits` as given; processed ones are of the distribution sampled from,
    -inf for what mask and filters removed (greedy rows: after bias, penalties, stop ids and mask, at temperature 1).

    Args:
        logits: the model's own; -inf for ids that cannot be sampled.
        counts: gives how often each id occurs, see `PROMPT_BIT`; called where a penalty needs it.
        positions: position in the sequence of the token being sampled.
        num_output: output tokens so far.
        masks: None where no row has one.
        drafts: a row that has one takes it with probability min(1, p/q), p being the distribution sampled from, and else draws
            from what p is above q, normalised: the token is one of p either way (Leviathan, Kalman and Matias, Fast Inference
            from Transformers via Speculative Decoding, 2023; Chen et al., Accelerating Large Language Model Decoding with
            Speculative Sampling, 2023). A token that differs from the draft means that it was rejected. Greedy rows take the
            token that they take without. None for drafts that are no draw, but certain: the token as it is drawn without, taken
            if it is the draft, is what the rule above comes to.
    """
    peak = logits.max(axis=-1)
    log_sum = log_sum_exp(logits, peak)
    finite = jnp.isfinite(peak) & jnp.isfinite(log_sum)
    greedy = settings.temperature < GREEDY_TEMPERATURE
    adjusts = _has_bias(settings) | _has_penalty(settings) | _stops_masked(settings, num_output)
    rows = logits.shape[0]
    no_top = jnp.full((rows, NUM_TOP), -1, jnp.int32), jnp.full((rows, NUM_TOP), -jnp.inf)
    # Computed for every batch: on a GPU it shares a pass with the log-sum-exp.
    plain = Sampled(_first(logits, peak), -log_sum, jnp.zeros((rows,), jnp.int32), finite, *no_top)

    def full() -> Sampled:
        adjusted = lax.cond(adjusts.any(), lambda: _adjust(logits, settings, counts, num_output), lambda: logits)
        if masks is not None:
            adjusted = lax.cond(masks.rows.any(), lambda x: apply_masks(x, masks), lambda x: x, adjusted)
        best = adjusted.max(axis=-1)

        def draw() -> tuple[Array, Array]:
            lowest = lowest_kept(adjusted, best, settings, greedy)
            noise = _gumbel(settings, positions, logits.shape[1])
            if drafts is not None:
                final = final_distribution(adjusted, best, lowest, settings, greedy)
                tokens = _accepted_or_drawn(final, noise, drafts, settings, positions)
                return jnp.where(greedy, _first(adjusted, best), tokens), lowest
            noisy = jnp.where(greedy[:, None], adjusted, final_distribution(adjusted, best, lowest, settings, greedy) + noise)
            return _argmax(noisy), lowest

        tokens, lowest = lax.cond((~greedy).any(), draw, lambda: (_first(adjusted, best), jnp.zeros((rows,), jnp.uint32)))
        final = final_distribution(adjusted, best, lowest, settings, greedy)
        return Sampled(tokens, *_logprobs(logits, peak, log_sum, final, tokens, settings, finite & jnp.isfinite(best), no_top))

    simple = greedy & ~adjusts & (settings.num_logprobs < 0)
    if masks is not None:
        simple &= ~masks.rows
    result = lax.cond(simple.all(), lambda: plain, full)
    return result._replace(
        tokens=jnp.where(result.finite, result.tokens, -1), logprobs=jnp.where(result.finite, result.logprobs, jnp.nan)
    )


def propose(
    logits: Float32[Array, "R V"],
    settings: SamplingSettings,
    counts: Callable[[], Int32[Array, "R V"]],
    positions: Int32[Array, "R"],
    num_output: Int32[Array, "R"],
) -> Proposed:
    """Draws a draft for each row from a draft model's logits, under the row's own settings; arguments as of `sample`.

    The noise is another one than that of `sample` at the same position: the verdict must not know what the draft was drawn by.
    """
    peak = logits.max(axis=-1)
    greedy = settings.temperature < GREEDY_TEMPERATURE
    adjusts = _has_bias(settings) | _has_penalty(settings) | _stops_masked(settings, num_output)

    def full() -> tuple[Array, Array, Array]:
        adjusted = lax.cond(adjusts.any(), lambda: _adjust(logits, settings, counts, num_output), lambda: logits)
        best = adjusted.max(axis=-1)
        lowest = lowest_kept(adjusted, best, settings, greedy)
        final = final_distribution(adjusted, best, lowest, settings, greedy)
        drawn = _argmax(final + _gumbel(settings, positions, logits.shape[1], tag=_DRAFT_NOISE))
        log_q = final - log_sum_exp(final, jnp.zeros_like(peak))[:, None]
        return jnp.where(greedy, _first(adjusted, best), drawn), log_q, best

    simple = (greedy & ~adjusts).all()
    tokens, log_q, best = lax.cond(simple, lambda: (_first(logits, peak), jnp.zeros_like(logits), peak), full)
    finite = jnp.isfinite(peak) & jnp.isfinite(best) & ~jnp.isnan(logits).any(axis=-1)
    return Proposed(jnp.where(finite, tokens, -1), log_q)


def token_scores(logits: Float32[Array, "T V"], targets: Int32[Array, "T"]) -> TokenScores:
    """Raw logprobs, ranks and the most likely alternatives of given tokens (ids within the vocabulary)."""
    peak = logits.max(axis=-1)
    log_sum = log_sum_exp(logits, peak)
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


# -- noise


def _gumbel(settings: SamplingSettings, positions: Array, vocab: int, tag: int | None = None) -> Array:
    """Gumbel noise [R, V], a function of seed, choice and position of each row."""
    # All 32 bits count, and the tail that decides (u near 0) is the finely resolved one; u is never 0 nor 1.
    uniform = _uniform(settings, positions, (vocab,), tag)
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1.0 - 2.0**-24)))


def _uniform(settings: SamplingSettings, positions: Array, shape: tuple[int, ...], tag: int | None) -> Array:
    """Numbers [R, *shape] above 0 and at most 1, a function of seed, choice, position and tag."""

    def bits(seed: Array, choice: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, choice), position)
        if tag is not None:
            key = jax.random.fold_in(key, tag)
        return jax.random.bits(key, shape, jnp.uint32)

    return (jax.vmap(bits)(settings.seed, settings.choice, positions).astype(jnp.float32) + 0.5) * 2.0**-32


# -- drafts


def _accepted_or_drawn(final: Array, noise: Array, drafts: Drafts, settings: SamplingSettings, positions: Array) -> Array:
    """The drafts that are accepted, and a draw where there is none or it is rejected. The largest entry of `final` is 0."""
    log_q, draft = drafts.log_q(), jnp.maximum(drafts.tokens, 0)
    log_p = final - log_sum_exp(final, jnp.zeros_like(final[:, 0]))[:, None]
    above = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0.0)
    chance = _take(log_p, draft) - _take(log_q, draft)
    has_draft = drafts.tokens >= 0
    accepts = (jnp.log(_uniform(settings, positions, (), _VERDICT_NOISE)) < chance) | (chance >= 0)
    accepts |= ~(above > 0).any(axis=-1)  # p is nowhere above q: they are one distribution, up to rounding
    left = jnp.where((has_draft & ~accepts)[:, None], jnp.log(above), final)
    return jnp.where(has_draft & accepts, draft, _argmax(left + noise))


# -- choice and logprobs


def _first(x: Array, value: Array) -> Array:
    """The lowest id whose entry equals `value`."""
    vocab = x.shape[1]
    ids = jnp.where(x == value[:, None], jnp.arange(vocab), vocab - 1)
    return ids.min(axis=-1).astype(jnp.int32)


def _argmax(x: Array) -> Array:
    """The lowest id of the largest entry. One pass on a GPU; on a CPU an argmax costs twice what a maximum and a search do."""
    return by_platform(lambda x: lax.argmax(x, 1, jnp.int32), lambda x: _first(x, x.max(axis=-1)), x)


def _take(x: Array, ids: Array) -> Array:
    return jnp.take_along_axis(x, ids[:, None], axis=-1, mode="clip")[:, 0]


def _rank(x: Array, chosen: Array) -> Array:
    return 1 + (x > chosen[:, None]).sum(axis=-1, dtype=jnp.int32)


def _top(x: Array, peak: Array, log_sum: Array) -> tuple[Array, Array]:
    """The `NUM_TOP` largest entries: ids and logprobs; -1 and -inf beyond the vocabulary."""
    size = min(NUM_TOP, x.shape[1])
    # On a CPU a stable order costs a sort of the vocabulary.
    values, ids = by_platform(lambda x: _largest_by_passes(x, size), lambda x: tuple(lax.top_k(x, size, is_stable=False)), x)
    fill = ((0, 0), (0, NUM_TOP - size))
    logprobs = jnp.pad((values - peak[:, None]) - log_sum[:, None], fill, constant_values=-jnp.inf)
    return jnp.pad(ids.astype(jnp.int32), fill, constant_values=-1), logprobs


def _largest_by_passes(x: Array, size: int) -> tuple[Array, Array]:
    """The `size` largest entries and their ids, the lowest id first among equals; a pass for each, no sort."""
    rows = x.shape[0]
    value, place = jnp.full((rows,), jnp.inf, x.dtype), jnp.full((rows,), -1, jnp.int32)
    found = []
    for _ in range(size):
        value, place = _next_largest(x, value, place)
        found.append((value, place))
    values, places = (jnp.stack(column, axis=1) for column in zip(*found, strict=True))
    return values, places


@jax.jit  # lowered once, and called for every pass
def _next_largest(x: Array, value: Array, place: Array) -> tuple[Array, Array]:
    """The entry that follows the one of `value` at id `place`, in falling order."""

    def better(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return lax.select(first, a[0], b[0]), lax.select(first, a[1], b[1])

    value, place = lax.optimization_barrier((value, place))  # makes the passes alike, so that they are one compiled kernel
    ids = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    left = (x < value[:, None]) | ((x == value[:, None]) & (ids > place[:, None]))
    none = jnp.float32(-jnp.inf), jnp.int32(x.shape[1])
    best: tuple[Array, Array] = lax.reduce((jnp.where(left, x, none[0]), jnp.where(left, ids, none[1])), none, better, (1,))
    return best


def _logprobs(
    logits: Array,
    peak: Array,
    log_sum: Array,
    final: Array,
    tokens: Array,
    settings: SamplingSettings,
    finite: Array,
    no_top: tuple[Array, Array],
) -> tuple[Array, Array, Array, Array, Array]:
    """The fields of `Sampled` behind the tokens. The largest entry of `final` is 0."""
    rows = logits.shape[0]
    wanted = settings.num_logprobs

    def score() -> tuple[Array, Array, Array, Array]:
        processed = settings.processed_logprobs & (wanted >= 0)
        x = jnp.where(processed[:, None], final, logits)
        x_peak = jnp.where(processed, 0.0, peak)
        x_log_sum = jnp.where(processed, log_sum_exp(final, jnp.zeros_like(peak)), log_sum)
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
