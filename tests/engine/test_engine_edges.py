"""What a fresh pair of eyes found in the engine: each was a bug, each has the right behaviour here."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from fakes_text import plain_byte_tokenizer
from scripted_model import Scripted, ScriptedConfig
from tiny_models import CONFIGS, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.llm import LLM
from llmjax.engine.runner import PendingStep
from llmjax.errors import EngineError, ModelError, RequestError
from llmjax.sampling_params import SamplingParams

V = ScriptedConfig.vocab_size
GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture
def flat() -> Scripted:
    return Scripted(plain_byte_tokenizer())


def test_the_padding_row_stays_a_row_that_asks_for_nothing(flat: Scripted) -> None:
    """Else every launch with a padding entry would pay for penalties and bias."""
    flat.script([65, 66])
    flat.run(SamplingParams(max_tokens=2, logprobs=3, prompt_logprobs=1, repetition_penalty=1.5, logit_bias={3: 1.0}))
    state = flat.engine.runner._state
    settings = jax.tree.map(lambda a: np.asarray(a)[-1], state.settings)
    assert (settings.temperature, settings.num_logprobs, settings.repetition_penalty, settings.top_p) == (0.0, -1, 1.0, 1.0)
    assert (settings.bias_ids == -1).all()
    assert (settings.stop_ids == -1).all()
    assert not bool(state.active[-1])
    assert not np.asarray(state.page_table[-1]).any()
    assert not np.asarray(state.counts[-1]).any()


def test_an_interrupt_while_waiting_for_the_device_loses_nothing(flat: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    flat.script([65, 66, 67])
    flat.engine.add_request([1], GREEDY)
    flat.engine.step(closed=True)
    real = PendingStep.result
    monkeypatch.setattr(PendingStep, "result", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        flat.engine.step(closed=True)
    monkeypatch.setattr(PendingStep, "result", real)
    tokens: list[int] = []
    while flat.engine.has_unfinished:
        for output in flat.engine.step(closed=True):
            tokens += output.new_token_ids[0]
    assert tokens == [65, 66, 67]


def _interrupted(self: PendingStep) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_generate_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["llama"]
    llm = LLM(params=random_params(config), config=config, max_context=64, max_sequences=1, max_tokens_per_step=16)
    monkeypatch.setattr(llm.engine, "step", lambda **options: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3]], GREEDY)
    monkeypatch.undo()
    assert not llm.engine.scheduler.has_unfinished
    assert [len(output.outputs[0].token_ids) for output in llm.generate(np.array([[1, 2], [3, 4]]), GREEDY)] == [3, 3]
    for bad in (5, [1, 2.0], [[1], "text"], [None]):
        with pytest.raises(RequestError):
            llm.generate(bad, GREEDY)  # type: ignore[arg-type]
    assert not llm.engine.scheduler.has_unfinished


def test_a_failed_launch_is_told_by_every_later_call(flat: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: Any, masks: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

    monkeypatch.setattr(flat.engine.runner, "dispatch", broken)
    flat.engine.add_request([1], GREEDY)
    with pytest.raises(RuntimeError):
        flat.engine.step(closed=True)
    for call in (flat.engine.step, lambda: flat.engine.add_request([1], GREEDY)):
        with pytest.raises(EngineError, match="RESOURCE_EXHAUSTED: out of memory\\); build a new engine"):
            call()


def test_a_default_cpu_pool_holds_a_row_at_full_length() -> None:
    config = CONFIGS["llama"]
    for context in (16, 128):
        options = EngineConfig(max_context=context, max_sequences=1, max_tokens_per_step=16)
        engine = Engine(config, jax.tree.map(np.asarray, random_params(config)), None, options)  # host arrays are fine
        assert engine.pool.capacity * 16 == context
        engine.add_request([1] * (context - 1), SamplingParams(max_tokens=1))
        while engine.has_unfinished:
            engine.step(closed=True)
    engine.update_params(random_params(config, seed=1))
    with pytest.raises(ModelError, match="tree structure"):
        engine.update_params({})


def test_text_that_the_model_has_no_row_for_is_refused(tmp_path: Any) -> None:
    from fakes_text import byte_tokenizer

    engine = Scripted(byte_tokenizer(tmp_path, adds_bos=True, more_tokens={"far": V + 4}, config={"bos_token": "far"})).engine
    assert engine.model_config.num_tokens == V
    with pytest.raises(RequestError, match=rf"prompt\[0\] is {V + 4}"):
        engine.add_request("hi", GREEDY)


def test_scoring_with_several_choices_scores_once(flat: Scripted) -> None:
    flat.script([66], prompt=2)
    output, _ = flat.run(SamplingParams(n=3, max_tokens=0, prompt_logprobs=1), [65, 66])
    assert [choice.finish_reason for choice in output.outputs] == ["length"] * 3
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[1] is not None


def test_nan_in_a_scored_prompt_is_an_error(flat: Scripted) -> None:
    table = np.zeros((20, V), np.float32)
    table[2] = np.nan
    flat.logits(table)
    output, _ = flat.run(SamplingParams(max_tokens=0, prompt_logprobs=1), [65] * 6)
    assert output.outputs[0].finish_reason == "error"
    assert "NaN" in (output.outputs[0].error or "")
    while flat.engine.has_unfinished:
        flat.engine.step(closed=True)
    assert flat.engine.pool.num_used == 0


def test_an_automatic_id_never_meets_a_given_one(flat: Scripted) -> None:
    flat.script([])
    flat.engine.add_request([1], GREEDY, request_id="request-0")
    assert flat.engine.add_request([1], GREEDY) == "request-1"
