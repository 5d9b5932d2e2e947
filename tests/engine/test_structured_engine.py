"""Structured output through the engine: random logits, a real tiny model, neighbours, several steps a launch, and a full pool."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from fakes_text import EOS_ID, plain_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_model import CONTEXT, Scripted
from tiny_models import CONFIGS, naive_logits, random_params

from llmjax.engine import grammar
from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import CompletionOutput, RequestOutput
from llmjax.errors import RequestError
from llmjax.sampling_params import SamplingParams
from llmjax.structured_output import StructuredOutput

MODEL = "llama"


@functools.cache
def scripted() -> Scripted:
    return Scripted(plain_byte_tokenizer(), kv_cache_bytes=64 * 1024)


@functools.cache
def tiny() -> Engine:
    options = EngineConfig(
        max_context=128, max_sequences=4, max_tokens_per_step=32, decode_steps=3, row_buckets=(4,), token_buckets=(32,),
        kv_cache_bytes=2**20,
    )  # fmt: skip
    return Engine(CONFIGS[MODEL], random_params(CONFIGS[MODEL]), plain_byte_tokenizer(), options)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step(closed=True) if output.finished}
    engine.scheduler.check_integrity()
    assert engine.scheduler.find_leaks() == []
    assert engine.runner.compiles_after_ready == 0
    return done


def ask(engine: Engine, params: SamplingParams, prompt: Any = (1,)) -> list[CompletionOutput]:
    request_id = engine.add_request(prompt, params)
    return finish(engine)[request_id].outputs


def random_logits(scale: float = 4.0) -> None:
    scripted().logits(np.random.default_rng().normal(size=(CONTEXT, 288)).astype(np.float32) * scale)


# -- every output has its form

SIZES = st.integers(0, 50)
VALUES = st.one_of(st.integers(-9, 9), st.text('abé"\\', max_size=4))
LEAVES = st.one_of(
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, st.integers(-99, 99), SIZES),
    st.builds(lambda longest: {"type": "string", "maxLength": longest}, st.integers(0, 3)),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "x"}, {"type": "string", "pattern": "^[a-c]{1,4}$"}]),
)  # fmt: skip
LISTS = st.builds(
    lambda items, most: {"type": "array", "items": items, "minItems": most - 1, "maxItems": most}, LEAVES, st.integers(1, 2)
)
OBJECTS = st.builds(
    lambda fields, optional: {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in optional],
        "additionalProperties": False,
    },
    st.dictionaries(st.text("abé ", min_size=1, max_size=3), LEAVES | LISTS, max_size=2),
    st.sets(st.text("abé ", min_size=1, max_size=3), max_size=1),
)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Of the schemas that are made here."""
    if "enum" in schema or "const" in schema:
        options = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(option) and value == option for option in options)
    kinds = {"integer": int, "string": str, "boolean": bool, "null": type(None), "array": list, "object": dict}
    if type(value) is not kinds[schema["type"]]:
        return False
    if schema["type"] == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if schema["type"] == "string":
        return len(value) <= schema.get("maxLength", 99) and bool(re.search(schema.get("pattern", ""), value))
    if schema["type"] == "array":
        return schema["minItems"] <= len(value) <= schema["maxItems"] and all(is_valid(item, schema["items"]) for item in value)
    if schema["type"] == "object":
        fields = schema["properties"]
        return set(schema["required"]) <= set(value) <= set(fields) and all(is_valid(value[name], fields[name]) for name in value)
    return True


@settings(max_examples=40)
@given(schema=LEAVES | LISTS | OBJECTS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 1.0, 3.0]))
def test_what_a_random_model_writes_is_valid(schema: dict[str, Any], seed: int, temperature: float) -> None:
    random_logits()
    form = StructuredOutput(json_schema=schema, any_whitespace=False)
    outputs = ask(scripted().engine, SamplingParams(structured=form, n=2, seed=seed, temperature=temperature, max_tokens=None))
    for output in outputs:
        assert output.error is None
        if output.finish_reason == "length":  # escapes are long, and the context is not
            assert len(output.token_ids) == CONTEXT - 1
        else:
            assert output.finish_reason == "stop"
            assert is_valid(json.loads(output.text), schema), output.text


@pytest.mark.parametrize("pattern", ["[a-f]{3,9}x", "(yes|no|maybe)( [0-9]{2}){0,3}", "é+|[^a-z]{2,5}", "(?s).{0,6}!"])
def test_what_a_random_model_writes_matches_as_a_whole(pattern: str) -> None:
    for _ in range(4):
        random_logits()
        params = SamplingParams(structured=StructuredOutput(regex=pattern), n=4, max_tokens=None, top_p=0.9)
        for output in ask(scripted().engine, params):
            if output.finish_reason == "stop":
                assert re.fullmatch(pattern, output.text), output.text
            else:
                assert (output.finish_reason, len(output.token_ids)) == ("length", CONTEXT - 1)


def test_every_choice_is_one_of_them_and_each_can_be() -> None:
    choices = ["yes", "no", "no way", "été", "{}"]
    seen = set()
    random_logits(0.5)
    for seed in range(30):
        params = SamplingParams(structured=StructuredOutput(choice=choices), n=4, seed=seed, max_tokens=None)
        outputs = ask(scripted().engine, params)
        assert all(output.finish_reason == "stop" and output.text in choices for output in outputs)
        seen |= {output.text for output in outputs}
    assert seen == set(choices)


def test_a_json_object_and_grammars() -> None:
    random_logits(1.0)
    grammars = {'start: "a" start "b" | "c"': r"a*cb*", 'root ::= "x"+ [0-9]': r"x+[0-9]"}
    for text, pattern in grammars.items():
        for output in ask(scripted().engine, SamplingParams(structured=StructuredOutput(grammar=text), n=4, max_tokens=None)):
            assert output.finish_reason == "length" or re.fullmatch(pattern, output.text)
    # The end of the object becomes likely in time.
    table = np.random.default_rng().normal(size=(CONTEXT, 288)).astype(np.float32)
    table[:, list(b'"}')] += np.arange(CONTEXT)[:, None] / 8
    scripted().logits(table)
    outputs = ask(scripted().engine, SamplingParams(structured=StructuredOutput(json_object=True), n=8, max_tokens=None))
    whole = [json.loads(output.text) for output in outputs if output.finish_reason == "stop"]
    assert all(isinstance(value, dict) for value in whole)
    assert whole


# -- how an output ends


def test_an_output_that_is_complete_stops_at_once_and_one_that_is_cut_says_so() -> None:
    random_logits()
    form = StructuredOutput(choice=["abcd"])
    for limit, text, reason in ((2, "ab", "length"), (4, "abcd", "stop"), (9, "abcd", "stop")):
        (output,) = ask(scripted().engine, SamplingParams(structured=form, max_tokens=limit))
        assert (output.text, output.finish_reason, output.stop_reason) == (text, reason, None)
        assert output.token_ids == list(text.encode())


def test_an_end_of_sequence_ends_only_what_may_end() -> None:
    table = np.zeros((CONTEXT, 288), np.float32)
    table[:, EOS_ID] = 50
    scripted().logits(table)
    form = StructuredOutput(regex="a{3,6}")
    (output,) = ask(scripted().engine, SamplingParams(structured=form, temperature=0, max_tokens=None))
    assert (output.text, output.finish_reason, output.token_ids) == ("aaa", "stop", [*b"aaa", EOS_ID])
    for more in ({"ignore_eos": True}, {"min_tokens": 100}):
        (output,) = ask(scripted().engine, SamplingParams(structured=form, temperature=0, max_tokens=None, **more))  # type: ignore[arg-type]
        assert (output.text, output.finish_reason, output.token_ids) == ("aaaaaa", "stop", [*b"aaaaaa"])
    (output,) = ask(scripted().engine, SamplingParams(structured=form, temperature=0, max_tokens=None, min_tokens=5))
    assert output.token_ids == [*b"aaaaa", EOS_ID]


def test_stop_strings_and_stop_ids_end_a_form_early() -> None:
    random_logits()
    form = StructuredOutput(choice=["abcdef"])
    (output,) = ask(scripted().engine, SamplingParams(structured=form, stop="cd", max_tokens=None))
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")
    (output,) = ask(scripted().engine, SamplingParams(structured=form, stop_token_ids=[ord("d")], max_tokens=None))
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", ord("d"))


def test_bias_and_penalties_choose_among_what_is_allowed() -> None:
    scripted().logits(np.zeros((CONTEXT, 288), np.float32))
    form = StructuredOutput(regex="[abc]{6}")
    bias = {ord("c"): 5.0, ord("z"): 100.0, EOS_ID: 100.0}
    params = SamplingParams(structured=form, temperature=0, logit_bias=bias, max_tokens=None)
    assert ask(scripted().engine, params)[0].text == "cccccc"
    params = SamplingParams(
        structured=form, temperature=0, logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=None
    )
    # A letter loses 4 with its first occurrence and 2 with each later one: c goes 5, 1, -1, -3, the others 0, -4.
    assert ask(scripted().engine, params)[0].text == "ccabcc"


def test_logprobs_are_of_the_models_own_distribution_or_of_the_masked_one() -> None:
    random_logits(1.0)
    form = StructuredOutput(choice=["ab", "cd"])
    raw, processed = (
        ask(scripted().engine, SamplingParams(structured=form, temperature=0, logprobs=5, logprobs_mode=mode))[0]  # type: ignore[arg-type]
        for mode in ("raw", "processed")
    )
    assert raw.token_ids == processed.token_ids
    assert raw.logprobs is not None
    assert processed.logprobs is not None
    assert len(raw.logprobs[0].top) == 5
    assert {top.token_id for top in processed.logprobs[0].top} == set(b"ac")
    assert sum(np.exp(top.logprob) for top in processed.logprobs[0].top) == pytest.approx(1.0, abs=1e-5)
    assert [(p.chosen.logprob, p.chosen.rank, len(p.top)) for p in processed.logprobs[1:]] == [(0.0, 1, 1)]
    assert raw.logprobs[0].chosen.logprob < -1.0


# -- beside others


def neighbours(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    ids = [engine.add_request(prompt, SamplingParams(temperature=0, ignore_eos=True, **options)) for prompt in prompts]
    done = finish(engine)
    return [done[request_id].outputs[0].token_ids for request_id in ids]


def test_neighbours_have_the_same_tokens_with_and_without_structured_rows() -> None:
    rng = random.Random()
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 40))] for _ in range(5)]
    alone = neighbours(tiny(), prompts, max_tokens=20)
    forms = [StructuredOutput(regex="[a-z]{5,40}"), StructuredOutput(json_object=True), StructuredOutput(choice=["yes", "no"])]
    for form in forms:
        tiny().add_request("Q: ", SamplingParams(structured=form, max_tokens=30, n=2))
    assert neighbours(tiny(), prompts, max_tokens=20) == alone


def masked_greedy(prompt: list[int], texts: list[str]) -> list[int]:
    """Of a real model, the most likely token among those that some text goes on with; everything computed again for each."""
    out: list[int] = []
    while bytes(out).decode() not in texts:
        last = naive_logits(random_params(CONFIGS[MODEL]), [*prompt, *out], CONFIGS[MODEL])[-1]
        nexts = {text.encode()[len(out)] for text in texts if text.encode().startswith(bytes(out))}
        out.append(max(sorted(nexts), key=lambda token: last[token]))
    return out


@pytest.mark.parametrize("number", [1, 4])
def test_tokens_are_those_of_a_model_that_is_asked_again_for_every_token(number: int) -> None:
    engine = tiny()
    rng = random.Random()
    letters = "ab"
    texts = ["".join(rng.choices(letters, k=5)) for _ in range(20)]
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 30))] for _ in range(number)]
    params = SamplingParams(structured=StructuredOutput(choice=texts), temperature=0, max_tokens=None)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    done = finish(engine)
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert done[request_id].outputs[0].token_ids == masked_greedy(prompt, texts)


def test_seeds_give_the_same_choices_in_any_company() -> None:
    form = StructuredOutput(regex="[a-z ]{10,20}")
    params = SamplingParams(structured=form, n=4, seed=7, max_tokens=None)
    alone = [output.text for output in ask(tiny(), params, "once")]
    assert len(set(alone)) == 4
    for seed in range(3):
        tiny().add_request("upon", SamplingParams(seed=seed, max_tokens=25, ignore_eos=True))
    assert [output.text for output in ask(tiny(), params, "once")] == alone


def test_a_preemption_changes_nothing() -> None:
    """Six pages of sixteen tokens for four rows that want three each."""
    engine = Scripted(plain_byte_tokenizer(), kv_cache_bytes=7 * 256, decode_steps=1).engine
    assert engine.stats.num_pages == 6
    engine.update_params({"table": np.random.default_rng().normal(size=(CONTEXT, 288)).astype(np.float32)})
    params = [
        SamplingParams(structured=StructuredOutput(regex="([a-f]{3} ){8}[a-f]"), seed=seed, max_tokens=None) for seed in range(4)
    ]
    alone = [ask(engine, one, "0123456789")[0].text for one in params]
    assert engine.stats.preemptions == 0
    ids = [engine.add_request("0123456789", one) for one in params]
    done = finish(engine)
    assert engine.stats.preemptions > 0
    assert [done[request_id].outputs[0].text for request_id in ids] == alone


def test_a_deterministic_engine_keeps_to_forms_and_to_its_bits() -> None:
    options = {"deterministic": True, "max_tokens_per_step": 16, "decode_steps": 4, "row_buckets": (), "token_buckets": ()}
    engine = Scripted(plain_byte_tokenizer(), kv_cache_bytes=64 * 1024, **options).engine
    engine.update_params({"table": np.random.default_rng().normal(size=(CONTEXT, 288)).astype(np.float32)})
    form = StructuredOutput(regex="[a-z]{12}")
    asked = [
        ("one", SamplingParams(structured=form, seed=3, logprobs=0)),
        ("a prompt of two chunks", SamplingParams(max_tokens=15, seed=4, ignore_eos=True, logprobs=0)),
        ("two", SamplingParams(structured=form, seed=5, logprobs=0)),
    ]
    alone = [ask(engine, params, prompt)[0] for prompt, params in asked]
    ids = [engine.add_request(prompt, params) for prompt, params in asked]
    done = finish(engine)
    for request_id, one in zip(ids, alone, strict=True):
        assert done[request_id].outputs[0] == one
    assert re.fullmatch("[a-z]{12}", alone[0].text)


# -- launches


def launches(engine: Engine) -> list[tuple[int, int]]:
    """(steps, rows) of each launch until everything is finished."""
    made, dispatch = [], engine.runner.dispatch

    def watched(batch: Any, masks: Any = ()) -> Any:
        made.append((batch.num_steps, len(batch.rows)))
        assert len(masks) == sum(row.request.stepwise and row.samples for row in batch.rows)
        return dispatch(batch, masks)

    engine.runner.dispatch = watched  # type: ignore[method-assign]
    try:
        finish(engine)
    finally:
        del engine.runner.dispatch
    return made


def test_structured_rows_are_in_every_other_launch_and_the_others_in_all() -> None:
    engine = tiny()
    engine.add_request([5], SamplingParams(max_tokens=20, ignore_eos=True))
    engine.add_request([6], SamplingParams(structured=StructuredOutput(choice=["abcdefgh"]), max_tokens=None))
    made = launches(engine)
    assert made[:15] == [(1, 2), (1, 1)] * 7 + [(1, 2)]  # one token of the form in every other one
    assert (3, 1) in made[15:]  # then several steps again
    assert sum(steps for steps, _ in made) <= 20 + 3


def test_structured_rows_among_themselves_are_launched_together() -> None:
    engine = tiny()
    for prompt, size in ([5], 8), ([6], 8), ([7], 8):
        engine.add_request(prompt, SamplingParams(structured=StructuredOutput(regex=f"a{{{size}}}"), max_tokens=None))
        engine.step(closed=True)  # they come in one after the other
    made = launches(engine)
    assert made.count((1, 3)) >= 6
    assert len(made) <= 12


# -- what goes wrong


def test_a_refused_form_leaves_nothing_behind_and_the_next_request_works() -> None:
    engine = tiny()
    for form, n in ((StructuredOutput(regex="("), 1), (StructuredOutput(json_schema={"type": "objec"}), 3)):
        with pytest.raises(RequestError, match="cannot be compiled"):
            engine.add_request("x", SamplingParams(structured=form, n=n))
        assert not engine.has_unfinished
    assert ask(engine, SamplingParams(structured=StructuredOutput(choice=["fine"]), max_tokens=None))[0].text == "fine"


def test_an_output_that_meets_a_limit_of_the_library_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    random_logits()
    monkeypatch.setattr(grammar, "limits", lambda: llguidance.LLParserLimits(max_lexer_states=40, verbose_errors=False))
    form = StructuredOutput(regex="(.{1,301}){1,30}")
    engine = scripted().engine
    corrupted = engine.stats.corrupted
    bad = engine.add_request([1], SamplingParams(structured=form, max_tokens=None))
    good = engine.add_request([1], SamplingParams(structured=StructuredOutput(choice=["good one"]), max_tokens=None))
    plain = engine.add_request([1], SamplingParams(max_tokens=50, temperature=0))
    done = finish(engine)
    assert done[bad].outputs[0].finish_reason == "error"
    assert "could not be kept to its form" in str(done[bad].outputs[0].error)
    assert engine.stats.corrupted == corrupted, "that is no NaN"
    assert done[good].outputs[0].text == "good one"
    assert done[plain].outputs[0].token_ids == ask(engine, SamplingParams(max_tokens=50, temperature=0))[0].token_ids


def test_nan_and_abort_end_a_structured_output() -> None:
    table = np.zeros((CONTEXT, 288), np.float32)
    table[3] = np.nan
    scripted().logits(table)
    (output,) = ask(scripted().engine, SamplingParams(structured=StructuredOutput(regex="a{9}"), max_tokens=None))
    assert (output.token_ids, output.finish_reason) == ([*b"aaa"], "error")
    assert "NaN" in str(output.error)
    random_logits()
    engine = scripted().engine
    request_id = engine.add_request([1], SamplingParams(structured=StructuredOutput(regex="a{90}"), max_tokens=None))
    for _ in range(6):
        engine.step(closed=True)
    engine.abort(request_id)
    assert finish(engine)[request_id].outputs[0].finish_reason == "abort"


def test_prompt_logprobs_alone_need_no_token() -> None:
    random_logits()
    params = SamplingParams(structured=StructuredOutput(regex="a"), max_tokens=0, prompt_logprobs=1)
    assert ask(scripted().engine, params, [1, 2, 3])[0].finish_reason == "length"


# -- asyncio


def test_streams_give_what_a_whole_answer_holds_and_forms_are_compiled_elsewhere() -> None:
    engine = tiny()
    form = StructuredOutput(regex="([a-zé]{2,4} ){3}[0-9]{2}")
    params = SamplingParams(structured=form, seed=11, max_tokens=None)
    whole = ask(engine, params, "tell")[0].text
    compiled: list[str] = []
    real = engine.grammars._compile

    def watched(wanted: StructuredOutput) -> Any:
        import threading

        compiled.append(threading.current_thread().name)
        return real(wanted)

    async def main() -> tuple[str, str]:
        async with asyncio.timeout(60), AsyncEngine(engine) as served:
            with pytest.raises(RequestError, match="unclosed group"):
                await served.submit("tell", SamplingParams(structured=StructuredOutput(regex="(")))
            pieces = [output.new_text[0] async for output in served.generate("tell", params)]
            fresh = SamplingParams(structured=StructuredOutput(regex="[0-9]{5}fresh"), max_tokens=None)
            last = [output.outputs[0].text async for output in served.generate("tell", fresh)][-1]
            return "".join(pieces), last

    engine.grammars._compile = watched  # type: ignore[method-assign]
    try:
        text, fresh = asyncio.run(main())
    finally:
        del engine.grammars._compile
    assert text == whole
    assert re.fullmatch("[0-9]{5}fresh", fresh)
    assert len(compiled) == 2
    assert all(name.startswith("grammar") for name in compiled)
