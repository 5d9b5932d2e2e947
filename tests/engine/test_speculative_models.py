"""Speculation with a real decoder, truncated and deterministic; what is refused; that an engine without it is as it ever was."""

from __future__ import annotations

import dataclasses
import random
import threading
from typing import Any, NamedTuple

import pytest
from fakes_text import plain_byte_tokenizer
from tiny_models import CONFIGS, clear_prompt, naive_greedy, random_params

from llmjax.engine.compile_programs import DraftShapes, Shapes, abstract, lower, step_function, wanted
from llmjax.engine.config import EngineConfig
from llmjax.engine.draft_model import DraftModel, fitting_draft
from llmjax.engine.engine import Engine
from llmjax.engine.llm import LLM
from llmjax.engine.memory import MemoryPlan, plan_memory, tree_bytes
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.state import DeviceState
from llmjax.engine.token_masks import num_mask_words
from llmjax.errors import ConfigError, ModelError
from llmjax.model.checkpoint.load import LoadedModel, PendingParams
from llmjax.model.kv_cache import cache_bytes_per_page
from llmjax.model.registry import get_model
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.speculation_config import SpeculationConfig

MODEL = "llama"
CONFIG = CONFIGS[MODEL]


def options(**more: Any) -> EngineConfig:
    sizes = {"max_context": 96, "max_sequences": 4, "max_tokens_per_step": 32, "row_buckets": (4,), "token_buckets": (32,)}
    return EngineConfig(**sizes | more)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        engine.scheduler.check_integrity()
    return done


@pytest.fixture(scope="module")
def truncated() -> Engine:
    speculative = SpeculationConfig(method="truncated", tokens=3, layers=1, adaptive=False)
    return Engine(
        CONFIG,
        random_params(CONFIG),
        None,
        options(deterministic=True, prefill_chunk=16, token_buckets=(), speculative=speculative),
    )


def test_the_first_layers_draft_for_all_of_them(truncated: Engine) -> None:
    """Over the target's own cache: greedy tokens are those of a full recompute, about the ends of pages and at a full context."""
    names = {}
    for length, limit in ((1, 20), (15, 9), (16, 4), (17, 20), (33, 7), (90, 6), (40, 1)):
        prompt = clear_prompt(truncated.runner.params, CONFIG, length, limit)
        names[truncated.add_request(prompt, SamplingParams(max_tokens=limit, temperature=0.0, ignore_eos=True))] = prompt, limit
    done = finish(truncated)
    for name, (prompt, limit) in names.items():
        assert done[name].outputs[0].token_ids == naive_greedy(truncated.runner.params, prompt, CONFIG, limit)
    assert truncated.runner.compiles_after_ready == 0


def test_a_deterministic_engine_has_programs_of_one_length(truncated: Engine) -> None:
    """A policy with the other length, which its config knows too, would end the engine with its first launch."""
    built = truncated.config.speculative
    assert built is not None
    assert built.lengths == (2, 3)
    with pytest.raises(ConfigError, match=r"the engine has no programs for .*tokens=2"):
        truncated.set_policy(speculative=dataclasses.replace(built, tokens=2))
    truncated.set_policy(speculative=dataclasses.replace(built, adaptive=True))
    prompt = [random.randrange(CONFIG.num_tokens) for _ in range(9)]
    name = truncated.add_request(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert len(finish(truncated)[name].outputs[0].token_ids) == 8


def test_deterministic_drafts_are_the_same_alone_and_in_a_crowd(truncated: Engine) -> None:
    """To the bit, sampled ones too: which places have a draft depends on the request alone."""
    rng = random.Random()
    asked = {}
    for index in range(9):
        params = SamplingParams(
            max_tokens=rng.randint(1, 14), temperature=rng.choice([0.0, 0.9, 1.4]), seed=rng.randrange(2**40), logprobs=2,
            ignore_eos=True,
        )  # fmt: skip
        asked[str(index)] = [rng.randrange(CONFIG.num_tokens) for _ in range(rng.choice([1, 15, 16, 17, 40]))], params
    results = []
    for together in (True, False):
        done = {}
        for name, (prompt, params) in asked.items():
            truncated.add_request(prompt, params, request_id=name)
            if not together:
                done |= finish(truncated)
        done |= finish(truncated)
        results.append({name: (done[name].outputs[0].token_ids, done[name].outputs[0].logprobs) for name in asked})
    assert results[0] == results[1]


def test_what_is_refused() -> None:
    model, vocabulary = get_model(CONFIG.family), dataclasses.replace(CONFIG, vocab_size=299, num_tokens=299)
    short = dataclasses.replace(CONFIG, max_positions=64)

    def fit(method: str | None, draft: Any = None, config: Any = CONFIG, *, layers: int | None = None, **tokenizers: Any) -> Any:
        speculative = None if method is None else SpeculationConfig(method=method, layers=layers)  # type: ignore[arg-type]
        resolved = options(speculative=speculative).resolved(gpu=False, model_max_context=512)
        made = None if draft is None else DraftModel(draft, {}, tokenizers.get("draft"))
        return fitting_draft(made, model, config, tokenizers.get("target"), resolved)

    with pytest.raises(ConfigError, match="needs a draft model: give one"):
        fit("draft")
    with pytest.raises(ConfigError, match=r"a draft model is given, but .* is off"):
        fit(None, CONFIG)
    with pytest.raises(ConfigError, match="the draft model has 299 tokens, the model 301"):
        fit("draft", vocabulary)
    with pytest.raises(ConfigError, match="the draft model has 64 positions, max_context is 96"):
        fit("draft", short)
    with pytest.raises(ConfigError, match="layers is 2, but the model has 2"):
        fit("truncated", layers=2)
    with pytest.raises(ConfigError, match="tokens must be a whole number of at least 1, got 0"):
        SpeculationConfig(method="ngram", tokens=0)
    with pytest.raises(ConfigError, match="must be 1 to 8, got 9"):
        SpeculationConfig(method="ngram", tokens=9)
    with pytest.raises(ModelError, match="nowhere"):
        LLM(params={}, config=CONFIG, draft="/nowhere", speculative=SpeculationConfig(method="draft"))
    many = options(row_buckets=tuple(range(1, 7)), max_sequences=6, speculative=SpeculationConfig(method="ngram"))
    with pytest.raises(ConfigError, match="row_buckets make 12 programs for drafts, at most 11 are allowed"):
        many.resolved(gpu=False, model_max_context=512)
    padded = dataclasses.replace(CONFIG, vocab_size=320)
    assert fit("draft", padded).config.vocab_size == 320


@pytest.mark.parametrize("draft", ["nowhere", "other vocabulary"])
def test_weights_are_not_read_on_when_the_draft_model_does_not_fit(draft: str) -> None:
    """The process could not end before all of them were read."""
    targets, drafts = threading.Event(), threading.Event()
    target = LoadedModel(CONFIG, _reading(CONFIG, targets), None, "random")
    other = dataclasses.replace(CONFIG, vocab_size=299, num_tokens=299)
    given = "/nowhere" if draft == "nowhere" else LoadedModel(other, _reading(other, drafts), None, "random")
    with pytest.raises((ModelError, ConfigError), match=r"nowhere|the draft model has 299 tokens"):
        LLM(target, draft=given, speculative=SpeculationConfig(method="draft"))
    assert targets.is_set()
    assert drafts.is_set() == (draft != "nowhere")


def _reading(config: Any, given_up: threading.Event) -> PendingParams:
    """Parameters that are read for a minute, or until nobody wants them."""

    def load() -> dict[str, Any]:
        given_up.wait(60)
        return {}

    return PendingParams(config, load, given_up)


class _OtherTokenizer:
    """All that is asked of a tokenizer here."""

    def __init__(self, strings: dict[int, str]) -> None:
        self._strings, self.vocab_size = strings, len(strings)

    def token_strings(self) -> dict[int, str]:
        return self._strings


def test_another_vocabulary_is_refused_by_its_first_token() -> None:
    target = plain_byte_tokenizer()
    config = dataclasses.replace(CONFIG, num_tokens=target.vocab_size)
    speculative = SpeculationConfig(method="draft")
    resolved = options(speculative=speculative).resolved(gpu=False, model_max_context=512)
    strings = target.token_strings()
    same = DraftModel(CONFIG, {}, _OtherTokenizer(dict(strings)))  # type: ignore[arg-type]
    fitted = fitting_draft(same, get_model(CONFIG.family), config, target, resolved)
    assert fitted is not None
    assert fitted.config.num_tokens == config.num_tokens  # the rest is padding to it too
    other = DraftModel(CONFIG, {}, _OtherTokenizer(strings | {77: "zz", 99: "yy"}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="token 77 is 'zz' to the draft model and "):
        fitting_draft(other, get_model(CONFIG.family), config, target, resolved)


class _WithoutHistory(NamedTuple("_Fields", [(n, t) for n, t in DeviceState.__annotations__.items() if n != "history"])):  # type: ignore[misc]
    """A device state that has no such field."""

    history = None


def test_without_speculation_the_programs_are_those_without_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = options(decode_steps=3).resolved(gpu=False, model_max_context=512)
    shapes = Shapes(CONFIG, abstract(random_params(CONFIG)), resolved, 9)
    assert [key[0] for key in wanted(resolved)] == ["reset", "wipe", "decode", "decode", "extend", "score"]
    keys = [("reset", 8, 1), ("decode", 4, 3), ("extend", 32, 1)]
    with_field = [lower(key, get_model(CONFIG.family), shapes).as_text() for key in keys]
    state = shapes.state()
    assert state.history is None
    bare = _WithoutHistory(*state[:-1])
    monkeypatch.setattr(Shapes, "state", lambda self: bare)
    assert [lower(key, get_model(CONFIG.family), shapes).as_text() for key in keys] == with_field


def test_a_history_and_masks_are_all_that_speculation_adds_to_plain_programs() -> None:
    speculative = SpeculationConfig(method="ngram", tokens=3)
    resolved = options(speculative=speculative).resolved(gpu=False, model_max_context=512)
    shapes = Shapes(CONFIG, abstract(random_params(CONFIG)), resolved, 9)
    assert [key for key in wanted(resolved) if key[0] == "speculate"] == [("speculate", 4, 2), ("speculate", 4, 3)]
    assert shapes.state().history.shape == (5, 96)
    assert shapes.state().allowed.shape == (4 * 5, num_mask_words(CONFIG.vocab_size))  # of the next token, and behind each draft
    for key in wanted(resolved):
        assert step_function(key, get_model(CONFIG.family), shapes)


def test_the_memory_plan_counts_draft_history_and_masks() -> None:
    model, target = get_model(CONFIG.family), abstract(random_params(CONFIG))
    drafting = dataclasses.replace(CONFIG, num_layers=1, sliding_windows=(0,))
    draft = DraftShapes(drafting, abstract(random_params(drafting)))

    def plan(method: str | None, draft: DraftShapes | None = None) -> MemoryPlan:
        speculative = None if method is None else SpeculationConfig(method=method)  # type: ignore[arg-type]
        resolved = options(speculative=speculative).resolved(gpu=False, model_max_context=512)
        return plan_memory(model, CONFIG, target, resolved, None, draft=draft)

    plain, ngram, both = plan(None), plan("ngram"), plan("draft", draft)
    more = 4 * 5 * (96 + 3 * num_mask_words(CONFIG.vocab_size))  # int32, five rows of a full context and three masks more
    assert ngram.state - plain.state == both.state - plain.state == more
    assert (ngram.weights, ngram.page_bytes) == (plain.weights, plain.page_bytes)
    assert both.page_bytes == plain.page_bytes + cache_bytes_per_page(drafting, 16)
    assert both.weights == plain.weights + tree_bytes(draft.params)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("tokens", [1, 8])
def test_every_number_of_drafts_and_page_size(page_size: int, tokens: int) -> None:
    config = CONFIGS["qwen2"]
    params = random_params(config)
    draft = DraftModel(config, random_params(config, seed=tokens))
    speculative = SpeculationConfig(method="draft", tokens=tokens, adaptive=False)
    engine = Engine(config, params, None, options(page_size=page_size, speculative=speculative, deterministic=True), draft=draft)
    names = {}
    for length in (1, 15, 17, 33, 64):
        prompt = clear_prompt(params, config, length, 30)
        names[engine.add_request(prompt, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True))] = prompt
    done = finish(engine)
    for name, prompt in names.items():
        assert done[name].outputs[0].token_ids == naive_greedy(params, prompt, config, 30)
