"""A bare forward and an engine as models of the gate: both say what the float64 oracle says, and NaN is refused through both."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from tiny_models import CONFIGS, log_softmax, naive_greedy, naive_logits, random_params

from llmjax.engine.llm import LLM
from llmjax.quantization.agreement import compare
from llmjax.quantization.engine_model import EngineModel
from llmjax.quantization.forward_model import ForwardModel
from llmjax.quantization.gate import Limits, judge
from llmjax.quantization.quality import QualityData, Subject, measure_quality
from llmjax.quantization.scores import divergence

CONFIG = CONFIGS["qwen2"].replace(num_layers=1, sliding_windows=())  # its last vocabulary rows are padding
LIMITS = Limits(min_tokens=100, min_outputs=4)


@functools.cache
def sound_params() -> dict[str, Any]:
    return random_params(CONFIG)


def broken_params() -> dict[str, Any]:
    norm = sound_params()["final_norm"]["weight"]
    return sound_params() | {"final_norm": {"weight": norm.at[5].set(np.nan)}}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        params=sound_params(), config=CONFIG, max_context=128, max_sequences=4, max_tokens_per_step=64, prefill_chunk=64,
        row_buckets=(4,), token_buckets=(64,), decode_steps=1,
    )  # fmt: skip


def random_ids(length: int) -> list[int]:
    """The same in every run: among enough random texts there is one whose two best tokens are a rounding apart."""
    return np.random.default_rng(length).integers(0, CONFIG.num_tokens, length).tolist()


@pytest.mark.parametrize("length", [2, 63, 64, 65])
def test_a_forward_scores_as_the_oracle_does(length):
    ids = random_ids(length)
    parts = list(ForwardModel(sound_params(), CONFIG).score(ids, 48))
    expected = log_softmax(naive_logits(sound_params(), ids, CONFIG)[:-1])
    found = np.concatenate([part.logprobs for part in parts])
    assert [len(part.chosen) for part in parts] == [48] * ((length - 1) // 48) + [rest for rest in [(length - 1) % 48] if rest]
    real = slice(0, CONFIG.num_tokens)
    np.testing.assert_allclose(found[:, real], expected[:, real], atol=2e-4)
    assert np.isneginf(found[:, CONFIG.num_tokens :]).all()
    chosen = np.concatenate([part.chosen for part in parts])
    np.testing.assert_allclose(chosen, expected[np.arange(length - 1), ids[1:]], atol=2e-4)


def test_a_forward_refuses_what_it_cannot_score():
    for ids in ([1], [1, CONFIG.num_tokens], [-1, 2]):
        with pytest.raises(ValueError, match="two or more token ids from 0 to 289"):
            next(ForwardModel(sound_params(), CONFIG).score(ids, 8))


def test_an_engine_scores_as_a_forward_does(llm):
    ids = random_ids(90)
    whole, best = (list(model.score(ids, 64)) for model in (ForwardModel(sound_params(), CONFIG), EngineModel(llm)))
    for exact, found in zip(whole, best, strict=True):
        np.testing.assert_allclose(found.chosen, exact.chosen, atol=2e-4)
        np.testing.assert_allclose(found.logprobs, np.take_along_axis(exact.logprobs, found.ids, -1), atol=2e-4)
        assert (found.best == exact.best).all()
    assert divergence(best[0], best[0]).max() == 0.0
    found = compare(EngineModel(llm), EngineModel(llm), [ids])
    assert (found.perplexity_ratio, found.top1_agreement, found.kl_exact) == (1.0, 1.0, False)


def test_an_engine_writes_what_the_oracle_writes(llm):
    prompts = [random_ids(length) for length in (5, 9)]
    for prompt, output in zip(prompts, EngineModel(llm).greedy(prompts, 6), strict=True):
        assert list(output.token_ids) == naive_greedy(sound_params(), prompt, CONFIG, 6)
        assert output.error is None


@pytest.mark.parametrize("side", ["candidate", "baseline"])
def test_nan_in_the_weights_is_refused_by_name_through_both(llm, side):
    """Report B52: logits that are NaN let a model answer token 0 for ever."""
    texts = [random_ids(40) for _ in range(3)]
    forwards = {"baseline": ForwardModel(sound_params(), CONFIG)}
    forwards["candidate"] = forwards["baseline"]
    forwards[side] = ForwardModel(broken_params(), CONFIG)
    verdict = judge(measure_quality(*(Subject(forwards[name]) for name in ("baseline", "candidate")), QualityData(texts)), LIMITS)
    assert f"{side}.finite" in verdict.refused
    assert f"117 tokens of the {side} had NaN or infinite scores, first in text 0 at token 1" in verdict.line()

    sound = [list(EngineModel(llm).score(text, 64)) for text in texts]
    try:
        llm.update_params(broken_params())
        broken = [list(EngineModel(llm).score(text, 64)) for text in texts]
        (output,) = EngineModel(llm).greedy([random_ids(5)], 8)
    finally:
        llm.update_params(sound_params())
    assert all(
        part.broken.all() and part.chosen.shape == good.chosen.shape for (part,), (good,) in zip(broken, sound, strict=True)
    )
    assert "NaN" in (output.error or "")
