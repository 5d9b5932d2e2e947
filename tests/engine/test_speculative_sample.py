"""The verdict on drafts alone: whatever they are drawn from, what is taken has the target's distribution (B60, B61).

Noise is fixed, so that a test that passes once always does: chi-square over 200 000 draws, one batch of rows with a seed each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_oracle import Row, oracle

from llmjax.engine import sampling_filters
from llmjax.engine.ngram import ngram_drafts
from llmjax.engine.prompt_lookup import PromptLookup
from llmjax.engine.sample import Drafts, SamplingSettings, propose, sample

DRAWS = 200_000
TARGET = np.log([0.45, 0.3, 0.2, 0.05]).astype(np.float32)
DRAFT = np.log([0.1, 0.5, 0.15, 0.25]).astype(np.float32)
CHI_3 = 27.9  # chi-square with 3 degrees of freedom: passed by chance in 999 996 of a million


@pytest.fixture(scope="module", autouse=True)
def _few_partial_sums() -> Iterator[None]:
    """Sums over a vocabulary are padded to so many columns: a hundred times the work with four tokens, and the same sums."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_filters, "_LANES", 4)
        yield


@jax.jit
def _propose_and_sample(target: Any, draft: Any, settings: Any, counts: Any, num_output: Any, warmth: Any, has_draft: Any) -> Any:
    rows = settings.seed.shape[0]
    logits, drafts = (jnp.broadcast_to(x, (rows, x.shape[0])) for x in (target, draft))
    positions = jnp.full((rows,), 9, jnp.int32)
    seen = lambda: jnp.broadcast_to(counts, logits.shape)  # noqa: E731
    warm = settings._replace(temperature=settings.temperature * warmth)
    proposed = propose(drafts, warm, seen, positions, num_output)
    tokens = jnp.where(has_draft, proposed.tokens, -1)
    sampled = sample(logits, settings, seen, positions, num_output, None, Drafts(tokens, lambda: proposed.log_q))
    plain = sample(logits, settings, seen, positions, num_output)
    return sampled.tokens, proposed.tokens, plain.tokens, sampled.logprobs


def settings_of(row: Row, draws: int = DRAWS) -> SamplingSettings:
    def column(value: float, dtype: Any) -> np.ndarray:
        return np.full(draws, value, dtype)

    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    seeds = np.stack([np.arange(draws, dtype=np.uint32), column(row.seed, np.uint32)], axis=1)
    none = np.full((draws, 1), -1, np.int32)
    return SamplingSettings(
        **{name: column(getattr(row, name), np.float32) for name in floats},
        **{name: column(getattr(row, name), np.int32) for name in ("top_k", "choice", "min_tokens")},
        num_logprobs=none[:, 0], seed=seeds, processed_logprobs=np.zeros(draws, bool), stop_ids=none, bias_ids=none,
        bias_values=np.zeros((draws, 1), np.float32),
    )  # fmt: skip


def run(row: Row, target: np.ndarray = TARGET, draft: np.ndarray = DRAFT, *, warmth: float = 1.0, has_draft: bool = True) -> Any:
    num_output = np.full(DRAWS, len(row.output), np.int32)
    return jax.tree.map(
        np.asarray,
        _propose_and_sample(
            target, draft, settings_of(row), row.counts(4), num_output, np.float32(warmth), np.full(DRAWS, has_draft)
        ),
    )


def chi_square(tokens: np.ndarray, p: np.ndarray) -> float:
    seen = np.bincount(tokens, minlength=len(p))
    assert not seen[p == 0].any(), "a token that the filters took away"
    return float((((seen - DRAWS * p) ** 2)[p > 0] / (DRAWS * p[p > 0])).sum())


ROWS = {
    "plain": Row(), "cold": Row(temperature=0.7, seed=1), "hot": Row(temperature=1.5, seed=2), "top_p": Row(top_p=0.9, seed=3),
    "top_k": Row(top_k=2, seed=4), "min_p": Row(min_p=0.2, seed=5),
    "penalties": Row(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.5, prompt=(0,), output=(1, 1, 2), seed=6),
    "all": Row(temperature=0.7, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=0.8, output=(3,), seed=7),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_what_is_taken_has_the_targets_distribution(name: str) -> None:
    row = ROWS[name]
    p, q = (np.exp(oracle(logits, row)[0]) for logits in (TARGET, DRAFT))
    tokens, drafts, plain, _ = run(row)
    assert chi_square(drafts, q) < CHI_3
    assert chi_square(tokens, p) < CHI_3
    assert chi_square(plain, p) < CHI_3
    share = np.minimum(p, q).sum()
    assert abs((tokens == drafts).mean() - share) < 5 * np.sqrt(share * (1 - share) / DRAWS)
    # The draft decides which token it is, but what is taken besides does not lean on it: given the draft, p above q.
    left = np.maximum(p - q, 0)
    rejected = tokens[tokens != drafts]
    seen = np.bincount(rejected, minlength=4) / len(rejected)
    assert np.abs(seen - left / left.sum()).max() < 5 * 0.5 / np.sqrt(len(rejected))


def test_acceptance_is_what_two_distributions_share() -> None:
    """B61: p = (.6, .4), q = (.4, .6) are accepted in 80 of 100, and give p."""
    none = [-np.inf, -np.inf]
    target, draft = (np.array([*np.log(x), *none], np.float32) for x in ((0.6, 0.4), (0.4, 0.6)))
    tokens, drafts, _, _ = run(Row(), target, draft)
    assert abs((tokens == drafts).mean() - 0.8) < 0.005
    assert chi_square(tokens, np.array([0.6, 0.4, 0, 0])) < CHI_3


def test_a_draft_of_the_same_distribution_is_always_accepted() -> None:
    tokens, drafts, _, _ = run(Row(temperature=0.9), TARGET, TARGET)
    np.testing.assert_array_equal(tokens, drafts)


def test_a_draft_temperature_changes_the_drafts_alone() -> None:
    row = Row(temperature=0.8)
    p, q = np.exp(oracle(TARGET, row)[0]), np.exp(oracle(DRAFT, Row(temperature=0.8 * 1.5))[0])
    tokens, drafts, _, _ = run(row, warmth=1.5)
    assert chi_square(drafts, q) < CHI_3
    assert chi_square(tokens, p) < CHI_3


def test_a_place_without_a_draft_is_sampled_as_ever() -> None:
    """The token behind the last draft: bit for bit that of plain sampling, and its logprob the target's own."""
    tokens, _, plain, logprobs = run(Row(temperature=1.2), has_draft=False)
    np.testing.assert_array_equal(tokens, plain)
    np.testing.assert_allclose(logprobs, TARGET[tokens], rtol=1e-6)


def test_greedy_rows_take_what_they_take_without() -> None:
    tokens, drafts, plain, _ = run(Row(temperature=0.0))
    assert set(drafts) == {1}
    assert set(tokens) == set(plain) == {0}


def test_a_draft_that_is_certain_is_accepted_as_often_as_the_target_says_it() -> None:
    """Prompt lookup: plain sampling, and the draft is accepted if it is what was sampled. Accepted p(draft) of the time; else the
    token is one of the others, as often as p has them."""
    _, _, plain, _ = run(Row())
    p = np.exp(TARGET.astype(np.float64))
    accepted = plain == 1
    assert abs(accepted.mean() - p[1]) < 5 * np.sqrt(p[1] * (1 - p[1]) / DRAWS)
    assert chi_square(plain, p / p.sum()) < CHI_3


def test_drafts_whose_logits_are_not_finite_are_none() -> None:
    settings = settings_of(Row(temperature=0.5), 4)
    logits = np.array([TARGET, [np.nan, 0, 0, 0], [np.inf, 0, 0, 0], [-np.inf] * 4], np.float32)
    zeros = np.zeros(4, np.int32)
    got = np.asarray(propose(logits, settings, lambda: jnp.zeros((4, 4), jnp.int32), zeros, zeros).tokens)
    assert got[0] >= 0
    assert (got[1:] == -1).all()


def lookup(ids: list[int], k: int, shortest: int, longest: int) -> list[int]:
    for size in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for place in range(len(ids) - 2, size - 2, -1):
            if ids[place - size + 1 : place + 1] == ids[len(ids) - size :]:
                out = list(ids)
                for _ in range(k):
                    out.append(out[place + 1 + len(out) - len(ids)])
                return out[len(ids) :]
    return [-1] * k


def test_prompt_lookup_finds_the_latest_longest_match() -> None:
    """Against a search written to be read, on texts that repeat themselves; what lies behind the last token is not looked at."""
    random = np.random.default_rng()
    size = 24
    for shortest, longest, k in ((1, 3, 5), (2, 4, 1), (3, 3, 8)):
        history = random.integers(0, 3, (200, size)).astype(np.int32)
        last = random.integers(0, size, 200).astype(np.int32)
        last[:3] = 0, 1, size - 1
        found = np.asarray(ngram_drafts(history, last, length=k, shortest=shortest, longest=longest))
        for row, end, drafts in zip(history, last, found, strict=True):
            assert drafts.tolist() == lookup(row[: end + 1].tolist(), k, shortest, longest)


def test_prompt_lookup_on_the_host_finds_the_same() -> None:
    """Token by token, its own drafts among what it looks up, and none of them left behind."""
    random = np.random.default_rng()
    for shortest, longest in ((1, 3), (2, 4), (3, 3), (1, 1)):
        for _ in range(60):
            ids = random.integers(0, 3, 24).tolist()
            found = PromptLookup(30)
            for end in range(1, 25):
                found.add(ids[len(found) : end])
                for drafts in (random.integers(0, 3, 4).tolist(), []):
                    (want,) = lookup(ids[:end] + drafts, 1, shortest, longest)
                    assert found.next(drafts, shortest=shortest, longest=longest) == (None if want < 0 else want)
