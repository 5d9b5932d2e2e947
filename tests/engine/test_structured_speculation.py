"""Outputs with a form in launches with drafts: token for token, and number for number, those of plain steps.

The model's next token depends on every token in its cache. A form leaves one token here and several there: where one, the host
drafts it; where several, what followed the last tokens before. Plain rows run beside, with drafts of their own.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fakes_text import EOS_ID, VOCAB_SIZE, plain_byte_tokenizer
from remembering_model import RememberingConfig, greedy_after, logits_after, make_table

from llmjax.engine.config import EngineConfig
from llmjax.engine.draft_model import DraftModel
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import CompletionOutput, RequestOutput
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.speculation_config import SpeculationConfig
from llmjax.structured_output import StructuredOutput

CONFIG = RememberingConfig(vocab_size=288, num_tokens=VOCAB_SIZE)
CONTEXT = 160
TABLE = make_table(11, config=CONFIG)
TABLE[:, EOS_ID] = -9.0  # else it ends most strings at once
SCHEMA = StructuredOutput(
    json_schema={
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "state": {"enum": ["open", "shut"]}, "n": {"type": "integer"}},
        "required": ["name", "state", "n"],
        "additionalProperties": False,
    },
    any_whitespace=False,
)  # fmt: skip
REGEX = StructuredOutput(regex="([ab]{2}-){6}(end|fin)")
CHOICE = StructuredOutput(choice=["yes indeed", "yes, but", "not at all", "nobody knows"])
FORMS = {"schema": SCHEMA, "regex": REGEX, "choice": CHOICE}


def draft_table() -> np.ndarray:
    return make_table(12, like=TABLE, noise=0.3, config=CONFIG)


def make_engine(method: str, tokens: int, **options: Any) -> Engine:
    config = EngineConfig(
        **{
            "max_context": CONTEXT, "max_sequences": 4, "max_tokens_per_step": 32, "prefill_chunk": 24, "decode_steps": 2,
            "row_buckets": (4,), "token_buckets": (32,),
            "speculative": SpeculationConfig(method=method, tokens=tokens, adaptive=False),  # type: ignore[arg-type]
        } | options
    )  # fmt: skip
    draft = DraftModel(CONFIG, {"table": jnp.asarray(draft_table())}) if method == "draft" else None
    return Engine(CONFIG, {"table": jnp.asarray(TABLE)}, plain_byte_tokenizer(), config, draft=draft)


@pytest.fixture(scope="module", params=[("ngram", 1), ("ngram", 3), ("draft", 3)], ids=lambda p: f"{p[0]}-{p[1]}")
def made(request: pytest.FixtureRequest) -> Engine:
    return make_engine(*request.param)


@pytest.fixture
def engine(made: Engine) -> Iterator[Engine]:
    use(made, drafts=True)
    yield made
    assert made.runner.compiles_after_ready == 0
    assert made.pool.num_used == 0


def use(engine: Engine, *, drafts: bool) -> None:
    """The same programs with or without drafts; nothing is found in the prefix cache."""
    engine.set_policy(speculative=engine._built_speculative if drafts else None)
    engine.runner.update_params({"table": jnp.asarray(TABLE)})


def finish(engine: Engine, *, owns_all_pages: bool = True) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
        if owns_all_pages:
            engine.scheduler.check_integrity()
    assert engine.scheduler.find_leaks() == []
    return done


def formed(form: StructuredOutput, **options: Any) -> SamplingParams:
    return SamplingParams(structured=form, **({"temperature": 0.0, "max_tokens": None} | options))


def prompt_ids(length: int) -> list[int]:
    return [random.randrange(256) for _ in range(length)]


def ask(engine: Engine, asked: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    """Those of the requests beside which two plain ones run, which get what they get alone."""
    beside = [(prompt_ids(length), 40) for length in (9, 30)]
    plain = [engine.add_request(ids, SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)) for ids, n in beside]
    names = [engine.add_request(prompt, params) for prompt, params in asked]
    done = finish(engine)
    for name, (ids, limit) in zip(plain, beside, strict=True):
        assert done[name].outputs[0].token_ids == greedy_after(TABLE, ids, limit, CONFIG.num_tokens)
    return [done[name] for name in names]


def both(engine: Engine, asked: list[tuple[Any, SamplingParams]]) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Without drafts, and with them."""
    use(engine, drafts=False)
    plain = ask(engine, asked)
    use(engine, drafts=True)
    return plain, ask(engine, asked)


def same(one: CompletionOutput, other: CompletionOutput) -> None:
    assert (one.token_ids, one.text) == (other.token_ids, other.text)
    assert (one.finish_reason, one.stop_reason, one.error) == (other.finish_reason, other.stop_reason, other.error)
    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, rel=1e-6)
    scores = [[e for position in o.logprobs or [] for e in (position.chosen, *position.top)] for o in (one, other)]
    assert [(e.token_id, e.rank) for e in scores[0]] == [(e.token_id, e.rank) for e in scores[1]]
    np.testing.assert_allclose([e.logprob for e in scores[0]], [e.logprob for e in scores[1]], rtol=2e-6, atol=2e-6)


def fits(form: StructuredOutput, text: str) -> bool:
    if form is CHOICE:
        return text in CHOICE.choices
    return bool(re.fullmatch(REGEX.regex or "", text)) if form is REGEX else set(json.loads(text)) == {"name", "state", "n"}


@pytest.mark.parametrize("name", FORMS)
def test_greedy_tokens_are_those_of_plain_steps(engine: Engine, name: str) -> None:
    asked = [(prompt_ids(length), formed(FORMS[name])) for length in (1, 15, 16, 40)]
    plain, drafted = both(engine, asked)
    for one, other in zip(plain, drafted, strict=True):
        same(one.outputs[0], other.outputs[0])
        assert one.outputs[0].finish_reason == "length" or fits(FORMS[name], one.outputs[0].text)
        told = other.speculation
        assert told is not None
        assert told.off is None
        assert 0 < told.accepted <= told.drafted
        assert told.rounds + told.accepted < len(other.outputs[0].token_ids)


@pytest.mark.parametrize("name", FORMS)
def test_sampled_tokens_are_those_of_the_seed_and_nothing_else_changes(engine: Engine, name: str) -> None:
    """Of any method: what a form's drafts are is certain. Penalties count the drafts before, logprobs are of their own place."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.9, "seed": 5, "logprobs": 2, "n": 2},
        {"temperature": 1.3, "top_k": 40, "min_p": 0.01, "seed": 6, "logprobs": 0, "frequency_penalty": 0.5},
        {"temperature": 0.7, "seed": 7, "repetition_penalty": 0.8, "logprobs": 4, "logprobs_mode": "processed"},
        {"logprobs": 2, "repetition_penalty": 1.7, "frequency_penalty": 0.6, "presence_penalty": 0.3},
        {"seed": 8, "temperature": 1.0, "stop": ["-a", "yes,", '"state"'], "logprobs": 1},
        {"stop_token_ids": [ord(c) for c in "en,"], "max_tokens": 12},
        {"min_tokens": 9, "max_tokens": 13, "logit_bias": {EOS_ID: 30.0, ord("b"): 2.0}},
    ]
    asked = [(prompt_ids(20), formed(FORMS[name], **one)) for one in settings]
    plain, drafted = both(engine, asked)
    for one, other in zip(plain, drafted, strict=True):
        for output, with_drafts in zip(one.outputs, other.outputs, strict=True):
            same(output, with_drafts)
    assert sum(output.speculation.accepted for output in drafted if output.speculation) > 0


def test_what_a_form_allows_after_a_launch_is_what_the_tokens_taken_say(engine: Engine) -> None:
    params = [formed(form, seed=seed, temperature=1.0) for seed, form in enumerate((SCHEMA, REGEX, CHOICE))]
    names = {engine.add_request(prompt_ids(9), one): one for one in params}
    looked = 0
    while engine.has_unfinished:
        engine.step()
        for name, one in names.items():
            live = engine._live.get(name)
            if live is None:
                continue
            (request,) = live.requests
            (fresh,) = engine.grammars.matchers(one, request.stop_ids)
            for token in request.output_ids:
                assert fresh.take(token)
            engine.grammars.fill([fresh])
            np.testing.assert_array_equal(live.matcher(request).allowed, fresh.allowed)
            looked += len(request.output_ids)
    assert looked > 50


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 9])
def test_a_form_that_ends_among_what_is_drafted_ends_there(engine: Engine, length: int) -> None:
    """The last token of a form is never a draft, but sampled behind the drafts: nothing is left to sample behind it."""
    tokens = engine.config.speculative.tokens  # type: ignore[union-attr]
    text = "abcdefghi"[:length]
    for limit in (length, length + 1, None):
        name = engine.add_request(prompt_ids(8), formed(StructuredOutput(choice=[text]), max_tokens=limit))
        (output,) = finish(engine)[name].outputs
        assert (output.text, output.finish_reason, output.token_ids) == (text, "stop", list(text.encode()))
    if length > 1:
        name = engine.add_request(prompt_ids(8), formed(StructuredOutput(choice=[text]), max_tokens=length - 1))
        (output,) = finish(engine)[name].outputs
        assert (output.text, output.finish_reason) == (text[:-1], "length")
    drafts, before = engine.stats.drafted, value(engine, "num_draft_tokens_total")
    name = engine.add_request(prompt_ids(8), formed(StructuredOutput(choice=[text])))
    told = finish(engine)[name].speculation
    rounds = -(-(length - 1) // (tokens + 1))  # the prompt's launch gives the first token
    if length < 3:
        assert told is None or told.drafted == 0
    else:
        assert told is not None
        assert told.accepted == told.drafted == engine.stats.drafted - drafts == value(engine, "num_draft_tokens_total") - before
        assert told.drafted >= length - 1 - rounds - 1  # where one token is left there is no draft, and the step is a plain one


def value(engine: Engine, name: str) -> float:
    found = engine.metrics.registry.get_sample_value(f"llmjax:spec_decode_{name}")
    assert found is not None
    return found


def test_an_end_that_is_optional_is_not_passed_by_a_draft(engine: Engine) -> None:
    """What was said before goes on; the model would rather stop, or nothing else is allowed."""
    form = StructuredOutput(regex="a{3,9}")
    asked = [
        ("aaaaaaaaaaaa", formed(form, logit_bias={EOS_ID: 50.0})),
        ("aaaaaaaaaaaa", formed(form, logit_bias={EOS_ID: 50.0}, min_tokens=6)),
        ("aaaaaaaaaaaa", formed(form, logit_bias={EOS_ID: 50.0}, ignore_eos=True)),
        ("aaaaaaaaaaaa", formed(form, logit_bias={EOS_ID: -50.0})),
        # Nothing else may follow the fourth letter, because what might is a stop id, and those must wait.
        ("q", formed(StructuredOutput(regex="a{4}b*"), stop_token_ids=[ord("b")], min_tokens=9)),
    ]
    plain, drafted = both(engine, asked)
    for one, other in zip(plain, drafted, strict=True):
        same(one.outputs[0], other.outputs[0])
    assert [output.outputs[0].text for output in drafted] == ["a" * count for count in (3, 6, 9, 9, 4)]


def test_a_preemption_changes_nothing(engine: Engine) -> None:
    form = StructuredOutput(regex="([ab]{2}-){14}(end|fin)")
    asked = [(prompt_ids(12), formed(form, seed=seed, temperature=seed % 2)) for seed in range(4)]
    plain, _ = both(engine, asked)
    taken, before = engine.pool.allocate(engine.pool.num_free - 7), engine.stats.preemptions
    names = [engine.add_request(prompt, params) for prompt, params in asked]
    engine.add_request(prompt_ids(12), SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
    engine.pool.free(taken)
    assert engine.stats.preemptions > before
    for one, name in zip(plain, names, strict=True):
        same(one.outputs[0], done[name].outputs[0])


def test_the_distribution_is_the_models_under_the_mask(engine: Engine) -> None:
    """Of 1500 outputs of three tokens that prompt lookup drafts for: chi-square, in fixed noise."""
    texts, count, prompt = ["axa", "axb", "bxa", "bxc", "cya", "cyb"], 1500, list(b"axb axb bxa")
    want = {}
    for text in texts:
        chance = 1.0
        for place, token in enumerate(text.encode()):
            nexts = sorted({other.encode()[place] for other in texts if other[:place] == text[:place]})
            logits = logits_after(TABLE, [*prompt, *text.encode()[:place]], CONFIG.num_tokens)[nexts].astype(np.float64)
            weights = np.exp((logits - logits.max()) / 1.2)
            chance *= weights[nexts.index(token)] / weights.sum()
        want[text] = chance
    drafted = engine.stats.drafted, engine.stats.accepted
    form = StructuredOutput(choice=texts)
    names = [engine.add_request(prompt, formed(form, temperature=1.2, seed=seed)) for seed in range(count)]
    done = finish(engine, owns_all_pages=False)
    seen = dict.fromkeys(texts, 0)
    for name in names:
        seen[done[name].outputs[0].text] += 1
    chi = sum((seen[text] - count * p) ** 2 / (count * p) for text, p in want.items())
    assert min(want.values()) * count > 5
    assert chi < 30.9, (seen, want)  # chi-square with 5 degrees of freedom: passed by chance in 99 999 of 100 000
    assert 0 < engine.stats.accepted - drafted[1] <= engine.stats.drafted - drafted[0]


@pytest.mark.parametrize("made", [("draft", 3)], indirect=True, ids=["draft"])
def test_a_draft_model_knows_what_it_has_not_seen_of_a_form(engine: Engine) -> None:
    """It is the model itself, so that its drafts are right if its cache is: also behind pages that a form's drafts filled."""
    engine.runner._draft_params = {"table": jnp.asarray(TABLE)}
    for form in (SCHEMA, REGEX):
        prompt = prompt_ids(14)
        name = engine.add_request(prompt, formed(form))
        said = finish(engine)[name].outputs[0].token_ids
        turn = [*prompt, *said, *prompt_ids(3)]
        name = engine.add_request(turn, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
        output = finish(engine)[name]
        assert output.num_cached_tokens >= 16
        assert output.outputs[0].token_ids == greedy_after(TABLE, turn, 30, CONFIG.num_tokens)
        assert output.speculation is not None
        assert output.speculation.drafted == output.speculation.accepted > 15
    engine.runner._draft_params = {"table": jnp.asarray(draft_table())}


def test_rows_without_a_form_bring_nothing_more(engine: Engine) -> None:
    """No mask is sent, and a launch with drafts brings what it brought before there were forms."""
    launched, launch = [], engine.runner._launch

    def watched(key: Any, packed: Any, masks: Any = None) -> Any:
        launched.append((key[0], np.shape(packed), masks))
        return launch(key, packed, masks)

    engine.runner._launch = watched  # type: ignore[method-assign]
    try:
        ask(engine, [])
    finally:
        del engine.runner._launch  # type: ignore[method-assign]
    assert all(masks is None for _, _, masks in launched)
    assert {width for kind, (width,), _ in launched if kind == "speculate"} == {4 + 4 + 1 + 3 * 4}


def test_a_deterministic_engine_keeps_to_its_bits() -> None:
    engine = make_engine("ngram", 3, deterministic=True, max_tokens_per_step=16, row_buckets=(), token_buckets=())
    asked = [
        (prompt_ids(9), formed(REGEX, seed=3, temperature=1.0, logprobs=0)),
        (prompt_ids(30), SamplingParams(max_tokens=25, seed=4, ignore_eos=True, logprobs=0)),
        (prompt_ids(20), formed(SCHEMA, logprobs=0)),
    ]
    alone = []
    for prompt, params in asked:
        name = engine.add_request(prompt, params)
        alone.append(finish(engine)[name])
    names = [engine.add_request(prompt, params) for prompt, params in asked]
    done = finish(engine)
    for name, one in zip(names, alone, strict=True):
        assert done[name].outputs == one.outputs
        assert done[name].speculation == one.speculation
    assert alone[0].speculation is not None
    assert alone[0].speculation.accepted > 0
