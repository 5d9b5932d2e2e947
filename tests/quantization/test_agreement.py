"""Teacher-forced measures against their formulas, in float64 and over whole texts at once."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fakes_gate import BestTokens, TableScorer

from llmjax.quantization.agreement import Agreement, compare
from llmjax.quantization.scores import Scores, divergence

VOCABULARY = 40


def noisy(seed: int, noise: float) -> TableScorer:
    """Random logits that depend on the text, and the same with noise."""

    def logits(tokens):
        base = np.random.default_rng(list(tokens)).normal(0, 3, (len(tokens) - 1, VOCABULARY))
        return base + np.random.default_rng([seed, *tokens]).normal(0, noise, base.shape)

    return TableScorer(logits)


def random_texts(lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng()
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


def naive_log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_measures_are_their_formulas_over_ragged_texts_in_any_block(block):
    texts = random_texts([2, 65, 1, 8, 30, 0])
    baseline, candidate = noisy(0, 0.0), noisy(1, 0.5)
    found = compare(baseline, candidate, iter(texts), block=block)
    p = np.concatenate([naive_log_softmax(baseline.logits(t)) for t in texts if len(t) > 1])
    q = np.concatenate([naive_log_softmax(candidate.logits(t)) for t in texts if len(t) > 1])
    came = np.concatenate([np.array(t[1:], np.int64) for t in texts if len(t) > 1])
    rows, kl = np.arange(len(came)), (np.exp(p) * (p - q)).sum(-1)
    assert (found.texts, found.tokens) == (4, 1 + 64 + 7 + 29)
    assert found.baseline_perplexity == pytest.approx(math.exp(-p[rows, came].mean()), rel=1e-12)
    assert found.candidate_perplexity == pytest.approx(math.exp(-q[rows, came].mean()), rel=1e-12)
    assert found.perplexity_ratio == pytest.approx(math.exp((p - q)[rows, came].mean()), rel=1e-12)
    assert found.top1_agreement == (p.argmax(-1) == q.argmax(-1)).mean()
    assert found.kl_mean == pytest.approx(kl.mean(), rel=1e-12)
    assert found.kl_max == pytest.approx(kl.max(), rel=1e-12)
    assert found.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=1e-12)
    error = np.std((p - q)[rows, came], ddof=1) / math.sqrt(len(came)) * found.perplexity_ratio
    assert found.perplexity_ratio_error == pytest.approx(error, rel=1e-9)
    assert found.kl_exact
    assert (found.baseline_broken, found.candidate_broken, found.first_broken) == (0, 0, None)


def test_a_model_is_as_good_as_itself_exactly():
    found = compare(noisy(0, 0.0), noisy(0, 0.0), random_texts([300]))
    assert (found.perplexity_ratio, found.top1_agreement, found.kl_mean, found.kl_max) == (1.0, 1.0, 0.0, 0.0)


def test_best_tokens_alone_bound_the_divergence_from_below_and_more_of_them_come_nearer():
    texts = random_texts([120])
    baseline, candidate = noisy(0, 0.0), noisy(1, 0.7)
    exact = compare(baseline, candidate, texts)
    found = [compare(BestTokens(baseline, k), BestTokens(candidate, k), texts) for k in (3, 20, VOCABULARY)]
    assert not found[0].kl_exact
    for smaller, larger in itertools.pairwise([*(one.kl_mean for one in found), exact.kl_mean * (1 + 1e-4) + 1e-5]):
        assert 0 < smaller <= larger
    assert found[-1].kl_mean == pytest.approx(exact.kl_mean, rel=1e-3)
    for one in found:  # what needs no whole distribution is not touched
        assert one.perplexity_ratio == exact.perplexity_ratio
        assert one.top1_agreement == exact.top1_agreement


def test_best_tokens_with_nothing_in_common_say_that_models_differ():
    p = Scores(np.array([-0.1]), np.log([[0.6, 0.39]]), np.array([[1, 2]]))
    q = Scores(np.array([-0.1]), np.log([[0.6, 0.39]]), np.array([[3, 4]]))
    assert divergence(p, q)[0] == 0  # the bound is weak here, and is not made up
    assert (p.best, q.best) == ([1], [3])
    with pytest.raises(ValueError, match="whole distributions"):
        divergence(p, Scores.of_logits(np.zeros((1, 5)), [0]))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_one_bad_logit_is_counted_and_left_out_of_the_sums(side, value):
    texts = random_texts([20, 30])

    def spoilt(tokens):
        logits = noisy(0, 0.0).logits(tokens)
        if len(tokens) == 30:
            logits[17, 5] = value
        return logits

    models = {"baseline": noisy(0, 0.0), "candidate": noisy(0, 0.0)} | {side: TableScorer(spoilt)}
    found = compare(models["baseline"], models["candidate"], texts, block=8)
    assert getattr(found, f"{side}_broken") == 1
    assert found.baseline_broken + found.candidate_broken == 1
    assert found.first_broken == (1, 17)
    assert found.tokens == 19 + 29 - 1
    assert found.perplexity_ratio == 1.0


def test_tokens_that_cannot_come_count_for_nothing_unless_they_come():
    padded = TableScorer(lambda t: np.where(np.arange(VOCABULARY) < 30, noisy(0, 0.0).logits(t), -np.inf))
    texts = [[3, 5, 29, 7]]
    found = compare(padded, padded, texts)
    assert (found.candidate_broken, found.kl_mean) == (0, 0.0)
    assert compare(noisy(0, 0.0), padded, [[3, 35, 7]]).candidate_broken == 2  # 35 came; and at 7 the baseline gives 35 a chance


def test_nothing_but_minus_infinity_is_broken():
    assert Scores.of_logits(np.full((1, 4), -np.inf), [0]).broken.all()


def test_no_text_gives_no_figures_and_plain_json():
    assert Agreement().perplexity_ratio is None
    assert Agreement(tokens=1, candidate_nll=1e4).as_json()["candidate_perplexity"] is None
