"""Drafts over a cache of int8: what verifies them writes and reads the pages that plain steps do, token by token the same.

Prompts are the same in every run: a rounding in another order may take another step of int8.
"""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import CONFIGS, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.draft_model import DraftModel
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import CompletionOutput
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.speculation_config import SpeculationConfig

CONFIG = CONFIGS["qwen2"]
PROMPTS = ((1, 20), (16, 20), (31, 12), (33, 20), (60, 30))


def answers(engine: Engine) -> list[CompletionOutput]:
    """To all prompts, each alone and then beside the others; of which some find their first pages."""
    random = np.random.default_rng(3)
    many = [(random.integers(0, CONFIG.num_tokens, length).tolist(), limit) for length, limit in PROMPTS]
    names, done = [], {}
    for together in (False, True):
        for prompt, limit in many:
            names.append(
                engine.add_request(prompt, SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True, logprobs=0))
            )
            while engine.has_unfinished and not (together and len(names) < 2 * len(many)):
                done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
                engine.scheduler.check_integrity()
    assert any(done[name].num_cached_tokens for name in names)
    return [done[name].outputs[0] for name in names]


@pytest.mark.parametrize("method", ["draft", *(pytest.param(name, marks=pytest.mark.slow) for name in ("truncated", "ngram"))])
def test_drafts_over_int8_pages_change_no_token(method: str) -> None:
    params = random_params(CONFIG)
    layers = 1 if method == "truncated" else None
    speculative = SpeculationConfig(method=method, tokens=3, layers=layers)  # type: ignore[arg-type]
    options = EngineConfig(
        max_context=96, kv_cache_dtype="int8", max_sequences=3, max_tokens_per_step=32, prefill_chunk=32, deterministic=True,
        speculative=speculative,
    )  # fmt: skip
    draft = DraftModel(CONFIG, params) if method == "draft" else None
    engine = Engine(CONFIG, params, None, options, draft=draft)
    drafted = answers(engine)
    assert engine.stats.drafted > 50
    if method == "draft":  # the same model over a cache that is not rounded
        assert engine.stats.accepted > 0.7 * engine.stats.drafted
    engine.set_policy(speculative=None)
    for one, other in zip(drafted, answers(engine), strict=True):
        assert one.token_ids == other.token_ids
        logprobs = [[entry.chosen.logprob for entry in output.logprobs or []] for output in (one, other)]
        np.testing.assert_allclose(*logprobs, atol=0.02)
    assert engine.runner.compiles_after_ready == 0
    assert engine.pool.num_used == 0
