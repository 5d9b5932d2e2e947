"""Sampling against a float64 oracle that sorts, and what must hold for every row: independence, extremes, reproducibility."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_oracle import IDLE, ROWS, VOCAB, Row, adjusted, distribution, draw, log_softmax, near_tie, oracle

from llmjax.engine.sample import NUM_TOP, token_scores

run_scores = jax.jit(token_scores)

TOKEN = st.integers(0, 15)
SMALL = st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, -0.0, 1.0, 1.5, -np.inf]), st.floats(-1e4, 1e4, width=32))
ROW = st.builds(
    Row,
    temperature=st.one_of(st.sampled_from([0.0, 1e-4, 1e-3, 1.0, 100.0]), st.floats(2**-9, 100, width=32)),
    top_k=st.one_of(st.just(0), st.integers(1, 18), st.just(2**31 - 1)),
    top_p=st.one_of(st.just(1.0), st.floats(2.0**-20, 1, width=32)),
    min_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(2**-30, 1, width=32)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.125, 8, width=32)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2, 2, width=32)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2, 2, width=32)),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 5),
    stop_ids=st.lists(TOKEN, max_size=3).map(tuple),
    bias=st.dictionaries(TOKEN, st.floats(-100, 100, width=32), max_size=3).map(lambda d: tuple(d.items())),
    prompt=st.lists(TOKEN, max_size=4).map(tuple),
    output=st.lists(TOKEN, max_size=8).map(tuple),
    position=st.integers(0, 2**31 - 1),
)


@settings(max_examples=80)
@given(st.lists(st.tuples(st.lists(SMALL, min_size=16, max_size=16), ROW), min_size=ROWS, max_size=ROWS))
def test_every_filter_equals_the_sorting_oracle(cases):
    """All settings at once over ties, -inf and large values; 16 tokens, so that the whole distribution is reported."""
    compare(np.array([case for case, _ in cases], np.float32), [row for _, row in cases])


def test_filters_work_together():
    """The same on flat distributions, where each filter decides often."""
    random = np.random.default_rng(0)
    for _ in range(60):
        rows = [
            Row(
                temperature=random.uniform(0.5, 2),
                top_k=random.integers(0, 17),
                top_p=random.choice([1.0, random.uniform(0.1, 1)]),
                min_p=random.choice([0.0, random.uniform(0, 0.5)]),
                frequency_penalty=random.choice([0.0, 0.7]),
                output=tuple(random.integers(0, 16, 3)),
                seed=int(random.integers(2**63)),
            )
            for _ in range(ROWS)
        ]
        compare(random.standard_normal((ROWS, 16)).astype(np.float32), rows)


def test_top_p_counts_what_top_k_left():
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    assert np.isfinite(draw(logits, [Row(top_k=2, top_p=0.5)]).top_logprobs).sum() == 1
    assert np.isfinite(draw(logits, [Row(top_p=0.5)]).top_logprobs).sum() == 2


def compare(logits, rows):
    """The reported distribution, logprob and rank of each row against the oracle."""
    sampled = draw(logits, rows)
    for i, row in enumerate(rows):
        if not np.isfinite(adjusted(logits[i], row).max()) or not np.isfinite(logits[i].max()):
            assert (sampled.tokens[i], sampled.finite[i]) == (-1, False)
            continue
        assert sampled.finite[i]
        right, close = oracle(logits[i], row)
        token = sampled.tokens[i]
        if close or near_tie(adjusted(logits[i], row)):
            assert sampled.logprobs[i] <= 1e-6
            continue
        result = distribution(sampled, i)[:16]
        np.testing.assert_array_equal(np.isfinite(result), right > -1e30)
        # float32 logits of size 1e4 are 1e-3 apart once they were divided by a penalty; the temperature multiplies that.
        scale = max(1.0, np.abs(logits[i][np.isfinite(logits[i])]).max()) * 8 / max(min(row.temperature, 1.0), 1e-3)
        kept = np.isfinite(result)
        np.testing.assert_allclose(result[kept], right[kept], rtol=1e-5, atol=max(1e-5, 2e-7 * scale))
        assert right[token] > -np.inf
        assert sampled.logprobs[i] == result[token]
        x = adjusted(logits[i], row)
        assert sampled.ranks[i] == 1 + (kept & (x > x[token])).sum()


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.lists(st.integers(1, 3000), min_size=ROWS, max_size=ROWS), st.floats(2**-6, 1, width=32))
def test_top_k_is_exact_for_any_k(seed, top_k, spread):
    """Also far beyond 64, with many ties: ids kept are those at least as large as the k-th. Seen through the rank."""
    random = np.random.default_rng(seed)
    logits = np.round(random.standard_normal((ROWS, 3001)) / spread).astype(np.float32) * np.float32(spread)
    rows = [Row(top_k=k, num_logprobs=0, seed=seed, position=i) for i, k in enumerate(top_k)]
    sampled = draw(logits, rows)
    for i, k in enumerate(top_k):
        kept = logits[i] >= np.sort(logits[i])[-k]
        right = log_softmax(np.where(kept, logits[i].astype(np.float64), -np.inf))
        assert kept[sampled.tokens[i]]
        np.testing.assert_allclose(sampled.logprobs[i], right[sampled.tokens[i]], atol=2e-5)


def test_top_p_counts_the_mass_of_a_long_tail():
    """A running float32 sum would lose 100,000 tokens of 1e-8 each beside one large one."""
    vocab = 2**17
    logits = np.zeros((1, vocab), np.float32)
    logits[0, 5] = np.log(1e8)
    tail = (vocab - 1) / (1e8 + vocab - 1)
    lonely, all_of_them = Row(top_p=1 - tail * 1.02, num_logprobs=0), Row(top_p=1 - tail * 0.98, num_logprobs=0)
    np.testing.assert_array_equal(draw(logits, [lonely]).logprobs, [0.0])
    np.testing.assert_allclose(draw(logits, [all_of_them]).logprobs, [np.log1p(-tail)], rtol=1e-2)


# -- greedy and extremes


def test_tiny_temperatures_equal_greedy():
    """B18. Ties go to the lowest id, as with temperature 0 and top_k 1."""
    logits = np.full((3, VOCAB), -np.inf)
    logits[0, [4, 9]] = [59.9, 60.0]
    logits[1, [7, 20, 30]] = [60.0, 60.0, 59.9]
    logits[2] = -1e38
    logits[2, 11] = 3e38
    for temperature in (0.0, 1e-4, 1e-8, 1e-38, 9.9e-4):
        sampled = draw(logits, [Row(temperature=temperature, seed=i, top_p=0.5) for i in range(3)])
        np.testing.assert_array_equal(sampled.tokens, [9, 7, 11])
        assert not np.isnan(sampled.logprobs).any()
    sampled = draw(logits, [Row(top_k=1)] * 3)
    assert sampled.tokens[0] == 9
    assert sampled.tokens[1] in (7, 20)
    assert sampled.tokens[2] == 11


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("repetition", [1e-5, 2.0, 1000.0])
def test_extreme_values_give_neither_nan_nor_an_excluded_token(temperature, repetition):
    """B19 among others: logits of 1e4 and more, the smallest and largest penalties."""
    random = np.random.default_rng(0)
    logits = random.choice([1e4, -1e4, 3e38, -3e38, 0.0, 1e-38, -np.inf], (ROWS, VOCAB))
    logits[:, 3] = 1.0
    base = Row(
        temperature=temperature, repetition_penalty=repetition, frequency_penalty=2.0, prompt=(1, 2), output=(3, 3), top_p=0.9
    )
    rows = [dataclasses.replace(base, seed=i) for i in range(ROWS)]
    sampled = draw(logits, rows)
    assert sampled.finite.all()
    assert not np.isnan(sampled.logprobs).any()
    assert np.isfinite(logits[np.arange(ROWS), sampled.tokens]).all()


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = [4.0, 3.0, -1.0, -1.1]
    assert draw([logits], [Row(temperature=0, repetition_penalty=2.0, prompt=(0,))]).tokens == 1
    assert draw([logits], [Row(temperature=0, repetition_penalty=2.0, output=(0,))]).tokens == 1
    low = [-1.0, -1.1, -9.0, -9.0]
    assert draw([low], [Row(temperature=0, repetition_penalty=2.0, prompt=(0,))]).tokens == 1


def test_presence_and_frequency_penalties_count_the_output_only():
    logits = [1.0, 0.5, -3.0]
    assert draw([logits], [Row(temperature=0, presence_penalty=1.0, prompt=(0, 0))]).tokens == 0
    assert draw([logits], [Row(temperature=0, presence_penalty=1.0, output=(0,))]).tokens == 1
    assert draw([logits], [Row(temperature=0, frequency_penalty=0.2, output=(0, 0))]).tokens == 0
    assert draw([logits], [Row(temperature=0, frequency_penalty=0.2, output=(0, 0, 0))]).tokens == 1


def test_stop_ids_cannot_be_sampled_before_min_tokens():
    rows = [Row(temperature=0, min_tokens=2, stop_ids=(0, 2), output=output) for output in ((), (1,), (1, 1))]
    np.testing.assert_array_equal(draw([[9.0, 1.0, 8.0, 0.0]] * 3, rows).tokens, [1, 1, 0])


def test_bias_applies_before_the_filters():
    sampled = draw([[5.0, 0.0, 0.0]] * 2, [Row(temperature=0, bias=((2, 5.5),)), Row(top_k=1, bias=((1, 100.0), (0, -100.0)))])
    np.testing.assert_array_equal(sampled.tokens, [2, 1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_harms_no_other(temperature):
    random = np.random.default_rng(1)
    logits = random.standard_normal((ROWS, VOCAB))
    rows = [Row(temperature=temperature, top_p=0.9, top_k=20, seed=i, num_logprobs=5) for i in range(ROWS)]
    clean = draw(logits, rows)
    logits[1, 3] = np.nan
    logits[2, 3] = np.inf
    logits[4] = -np.inf
    sampled = draw(logits, rows)
    bad = np.array([False, True, True, False, True, False])
    np.testing.assert_array_equal(sampled.finite, ~bad)
    np.testing.assert_array_equal(sampled.tokens[bad], -1)
    for field, before in zip(sampled, clean, strict=True):
        np.testing.assert_array_equal(field[~bad], before[~bad])
    plain = draw(logits, [Row(temperature=0, num_logprobs=-1)] * ROWS)
    np.testing.assert_array_equal(plain.finite, ~bad)
    np.testing.assert_array_equal(plain.tokens[bad], -1)


def test_masking_every_token_is_not_finite():
    sampled = draw([[1.0, -np.inf]], [Row(temperature=0, min_tokens=1, stop_ids=(0,))])
    assert (sampled.tokens, sampled.finite) == (-1, False)


# -- noise


def test_noise_depends_on_seed_choice_and_position_only():
    """B21 to B23: the same request gives the same token in any row among any neighbours; any part of its identity changes it."""
    logits = np.zeros((ROWS, 3001), np.float32)
    base = Row(seed=2**63 + 12345, choice=2, position=77, num_logprobs=-1)
    token = draw(logits, [base, *[IDLE] * (ROWS - 1)]).tokens[0]
    others = [Row(seed=i, temperature=2.0, top_k=5 * i, num_logprobs=3) for i in range(ROWS)]
    for place in (0, 2, 5):
        assert draw(logits, [*others[:place], base, *others[place + 1 :]]).tokens[place] == token
    np.testing.assert_array_equal(draw(logits, [base] * ROWS).tokens, token)
    assert draw(logits[:1], [base]).tokens == token  # another bucket
    changes = ({"seed": 2**63 + 12346}, {"seed": 12345}, {"choice": 1}, {"position": 78}, {"choice": 77, "position": 2})
    tokens = draw(logits, [base, *(dataclasses.replace(base, **change) for change in changes)]).tokens
    assert len(set(tokens.tolist())) == ROWS


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.6, top_k=5),
        Row(temperature=1.7, top_p=0.8, repetition_penalty=1.3, output=(0, 3, 3)),
        Row(min_p=0.2, bias=((1, 1.0),)),
    ],
    ids=["plain", "top-k", "top-p with penalties", "min-p with bias"],
)
def test_sampled_frequencies_fit_the_distribution(row):
    """Chi-square over 20,000 draws; the limit is passed by chance once in 100,000 times, and the seeds are fixed."""
    draws = 20_000
    logits = np.random.default_rng(3).standard_normal(12).astype(np.float32)
    right = np.exp(oracle(logits, row)[0])
    rows = [dataclasses.replace(row, num_logprobs=-1, seed=7, position=i) for i in range(draws)]
    seen = np.bincount(draw(np.tile(logits, (draws, 1)), rows).tokens, minlength=12)
    assert not seen[right == 0].any()
    kept = right > 0
    statistic = ((seen - draws * right)[kept] ** 2 / (draws * right[kept])).sum()
    freedom = kept.sum() - 1
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.26 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty, 1931


# -- logprobs


def test_raw_and_processed_logprobs_in_one_batch():
    logits = np.random.default_rng(5).standard_normal((4, VOCAB)).astype(np.float32)
    rows = [
        Row(processed_logprobs=False, temperature=0.5, top_k=4, bias=((3, 2.0),), num_logprobs=3),
        Row(processed_logprobs=True, temperature=0.5, top_k=4, bias=((3, 2.0),), num_logprobs=6),
        Row(processed_logprobs=False, temperature=0.0, num_logprobs=-1),
        Row(processed_logprobs=True, temperature=0.0, bias=((3, 9.0),), num_logprobs=0),
    ]
    sampled = draw(logits, rows)
    raw = [log_softmax(row.astype(np.float64)) for row in logits]
    final = [oracle(x, row)[0] for x, row in zip(logits, rows, strict=True)]
    right = [raw[0], final[1], raw[2], final[3]]
    for i in range(4):
        np.testing.assert_allclose(sampled.logprobs[i], right[i][sampled.tokens[i]], atol=1e-5)
    ranks = [1 + (x > x[token]).sum() for x, token in zip(right, sampled.tokens, strict=True)]
    np.testing.assert_array_equal(sampled.ranks, [ranks[0], ranks[1], 0, ranks[3]])
    order = np.argsort(-raw[0])
    np.testing.assert_array_equal(sampled.top_ids[0], [*order[:3], *[-1] * 17])
    np.testing.assert_allclose(sampled.top_logprobs[0, :3], raw[0][order[:3]], atol=1e-5)
    np.testing.assert_array_equal(sampled.top_logprobs[0, 3:], -np.inf)
    np.testing.assert_array_equal(np.isfinite(sampled.top_logprobs[1]), [True] * 4 + [False] * 16)
    assert set(sampled.top_ids[1, :4]) == set(np.flatnonzero(np.isfinite(final[1])))
    assert (sampled.top_ids[2:] == -1).all()
    assert sampled.tokens[3] == 3


def test_a_greedy_row_gives_the_same_whatever_the_rest_of_the_batch_asks():
    """The short way through for greedy batches, and the long one, agree to the bit."""
    logits = np.random.default_rng(6).standard_normal((ROWS, VOCAB)) * 30
    plain = Row(temperature=0, num_logprobs=-1)
    short = draw(logits, [plain] * ROWS)
    mixed = draw(logits, [plain] * (ROWS - 1) + [Row(top_p=0.5, presence_penalty=1.0, output=(1,), min_tokens=3, stop_ids=(2,))])
    for before, after in zip(short, mixed, strict=True):
        np.testing.assert_array_equal(before[:-1], after[:-1])


def test_token_scores():
    logits = np.random.default_rng(7).standard_normal((5, VOCAB)).astype(np.float32) * 5 + 1e4
    logits[:, 30:] = -np.inf
    targets = np.array([0, 29, 3, 3, 12], np.int32)
    scores = jax.tree.map(np.asarray, run_scores(logits, targets))
    for i, target in enumerate(targets):
        right = log_softmax(logits[i].astype(np.float64))
        np.testing.assert_allclose(scores.logprobs[i], right[target], atol=2e-6)
        assert scores.ranks[i] == 1 + (right > right[target]).sum()
        np.testing.assert_array_equal(scores.top_ids[i], np.argsort(-right, kind="stable")[:NUM_TOP])
        np.testing.assert_allclose(scores.top_logprobs[i], np.sort(right)[::-1][:NUM_TOP], atol=2e-6)


def test_token_scores_of_a_vocabulary_smaller_than_the_alternatives():
    scores = run_scores(jnp.array([[1.0, 2.0, 0.0]]), jnp.array([0]))
    np.testing.assert_array_equal(scores.top_ids[0], [1, 0, 2] + [-1] * 17)
    np.testing.assert_array_equal(np.isfinite(scores.top_logprobs[0]), [True] * 3 + [False] * 17)
