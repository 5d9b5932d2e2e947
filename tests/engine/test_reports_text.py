"""Public bug reports about streams, stops and limits, at engine level: the scripted output and the right answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes_text import BOS_ID, EOS_ID, byte_tokenizer, plain_byte_tokenizer
from scripted_model import CONTEXT, Scripted

from llmjax.errors import ContextLengthError, RequestError
from llmjax.sampling_params import SamplingParams

MORE = {"STOPd": 260, "lazy<|": 261, "im_": 262, "end|>": 263}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), more_tokens=MORE)
    return Scripted(tokenizer, eos_ids=(2, 7))


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40} | fields)  # type: ignore[arg-type]


def text_ids(text: str) -> list[int]:
    return list(text.encode())


def test_b01_no_half_character_is_shown(scripted: Scripted) -> None:
    text = "\U0001f525\u6f22\u010f!"
    scripted.script([*text_ids(text), EOS_ID])
    output, pieces = scripted.run(greedy())
    assert output.outputs[0].text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_b02_bytes_that_are_never_text(scripted: Scripted) -> None:
    garbage = b"\xc0\x80\x99\xed\xa0\x80plain"
    scripted.script([*garbage, EOS_ID])
    output, _ = scripted.run(greedy())
    assert output.outputs[0].text == garbage.decode("utf-8", "replace")
    scripted.script([0xF0, 0x9F, EOS_ID])  # ends inside a character
    assert scripted.run(greedy())[0].outputs[0].text == b"\xf0\x9f".decode("utf-8", "replace")


@pytest.mark.parametrize("text", ["a surrogate \ud83d", "\udfff"])
def test_b03_lone_surrogates_are_refused(scripted: Scripted, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        scripted.engine.add_request(text, greedy())
    assert not scripted.engine.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("ids", "stop", "shown"),
    [
        ([261, 262, 263], "<|im_end|>", "lazy"),
        (text_ids("brown fox jumps"), "own fox", "br"),
        ([*text_ids("ab"), 260, *text_ids("ef")], "STOP", "ab"),
        (text_ids("aaab tail"), "aab", "a"),
    ],
)
def test_b04_no_character_of_a_stop_string_is_shown(scripted: Scripted, ids: Sequence[int], stop: str, shown: str) -> None:
    scripted.script([*ids, EOS_ID])
    output, pieces = scripted.run(greedy(stop=stop))
    assert ("".join(pieces), output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (shown, "stop", stop)


@pytest.mark.parametrize(("include", "text"), [(True, "abcSTOP"), (False, "abc")])
def test_b05_include_stop_str_in_output(scripted: Scripted, include: bool, text: str) -> None:
    scripted.script([*text_ids("abc"), 260, *text_ids("ef")])
    output, _ = scripted.run(greedy(stop=["STOP"], include_stop_str_in_output=include, logprobs=0))
    choice = output.outputs[0]
    assert choice.text == text
    assert choice.token_ids == [*text_ids("abc"), 260]  # every sampled token, the stopping one included
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 4


def test_b07_min_tokens_outlives_an_early_stop(scripted: Scripted) -> None:
    scripted.script(text_ids("a\nbcdefghijk\nlmn"))
    output, _ = scripted.run(greedy(stop="\n", min_tokens=10, max_tokens=20))
    assert output.outputs[0].text == "a\nbcdefghijk"
    assert len(output.outputs[0].token_ids) == 13
    scripted.script([65, EOS_ID, 66, EOS_ID])
    output, _ = scripted.run(greedy(min_tokens=2, max_tokens=8, logit_bias={66: 1.0}))
    assert output.outputs[0].token_ids == [65, 66, 66, EOS_ID]  # the early end of sequence is masked, its next best taken


@pytest.mark.parametrize("eos", [2, 7, EOS_ID])
def test_b08_any_of_the_eos_ids_stops(scripted: Scripted, eos: int) -> None:
    scripted.script([65, 66, eos, 67])
    choice = scripted.run(greedy())[0].outputs[0]
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("AB", [65, 66, eos], "stop", None)


def test_b09_ignore_eos_goes_on_to_the_limit(scripted: Scripted) -> None:
    scripted.script([65, 7, EOS_ID, 2] * 5)
    choice = scripted.run(greedy(ignore_eos=True, max_tokens=20))[0].outputs[0]
    assert (len(choice.token_ids), choice.finish_reason) == (20, "length")
    stopping = scripted.run(greedy(ignore_eos=True, max_tokens=20, stop_token_ids=[2]))[0].outputs[0]
    assert (stopping.token_ids, stopping.stop_reason) == ([65, 7, EOS_ID, 2], 2)


@pytest.mark.parametrize("bad", [288, 293, -1, 2**40])
def test_b10_stop_ids_outside_the_vocabulary(scripted: Scripted, bad: int) -> None:
    scripted.script(text_ids("neighbour") * 3)
    neighbour = scripted.engine.add_request([1], greedy(max_tokens=27))
    scripted.engine.step(closed=True)
    with pytest.raises(RequestError, match=str(bad)) as error:
        scripted.engine.add_request([1], greedy(stop_token_ids=[bad], min_tokens=1))
    assert error.value.param == "stop_token_ids"
    assert finish(scripted, neighbour) == "neighbour" * 3


def finish(scripted: Scripted, request_id: str) -> str:
    while True:
        for output in scripted.engine.step(closed=True):
            if output.request_id == request_id and output.finished:
                return output.outputs[0].text


@pytest.mark.parametrize("prompt", ["", []])
def test_b11_an_empty_prompt_is_refused_without_bos(scripted: Scripted, prompt: str | list[int]) -> None:
    with pytest.raises(RequestError, match="empty"):
        scripted.engine.add_request(prompt, greedy())


def test_b11_an_empty_prompt_starts_from_bos(tmp_path: Path) -> None:
    with_bos = Scripted(byte_tokenizer(tmp_path, adds_bos=True))
    with_bos.script([*text_ids("hi"), EOS_ID])
    output, _ = with_bos.run(greedy(), "")
    assert (output.prompt_token_ids, output.outputs[0].text) == ([BOS_ID], "hi")


def test_b12_scoring_a_prompt_generates_nothing(scripted: Scripted) -> None:
    scripted.script([66, 67, 68])
    output, _ = scripted.run(greedy(max_tokens=0, prompt_logprobs=1), [65, 66, 67, 70])
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "length")
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    scored = output.prompt_logprobs[1:]
    assert [p.chosen.token_id for p in scored if p] == [66, 67, 70]
    assert [p.chosen.rank for p in scored if p] == [1, 1, 2]
    assert [p.top[0].token_id for p in scored if p] == [66, 67, 68]
    with pytest.raises(RequestError, match="max_tokens is 0"):
        greedy(max_tokens=0)


def test_b13_reasons(scripted: Scripted) -> None:
    scripted.script([65] * CONTEXT)
    assert scripted.run(greedy(max_tokens=5))[0].outputs[0].finish_reason == "length"
    context = scripted.run(greedy(max_tokens=None))[0].outputs[0]
    assert (len(context.token_ids), context.finish_reason) == (CONTEXT - 1, "length")
    scripted.script([65, 65, EOS_ID])
    assert scripted.run(greedy(max_tokens=3))[0].outputs[0].finish_reason == "stop"


def test_b14_prompts_around_the_context(scripted: Scripted) -> None:
    scripted.script([65], prompt=CONTEXT - 1)
    for limit in (None, 1):
        output, _ = scripted.run(greedy(max_tokens=limit), [1] * (CONTEXT - 1))
        assert output.outputs[0].token_ids == [65]
        for length in (CONTEXT, CONTEXT + 1):
            with pytest.raises(ContextLengthError, match=rf"{length} tokens.*{CONTEXT}"):
                scripted.engine.add_request([1] * length, greedy(max_tokens=limit))
    assert scripted.run(greedy(max_tokens=1), [1] * (CONTEXT - 1))[0].finished


@pytest.mark.parametrize("bad", [[5279552648203111001], [-1], [288], [1.5], [True], ["x"]])
def test_b20_ids_that_are_none(scripted: Scripted, bad: list[int]) -> None:
    with pytest.raises(RequestError, match=r"prompt\[1\]"):
        scripted.engine.add_request([1, *bad], greedy())


def test_b35_chat_without_a_template(scripted: Scripted) -> None:
    with pytest.raises(RequestError, match="chat_template"):
        scripted.engine.add_chat([{"role": "user", "content": "hi"}], greedy())


def test_text_needs_a_tokenizer() -> None:
    bare = Scripted(None)
    bare.script([65, 66])
    assert bare.run(greedy(max_tokens=2))[0].outputs[0].token_ids == [65, 66]
    for prompt, params in (("text", greedy()), ([1], greedy(stop="x"))):
        with pytest.raises(RequestError, match="tokenizer"):
            bare.engine.add_request(prompt, params)


def test_ids_no_tokenizer_knows_are_never_sampled() -> None:
    padded = Scripted(plain_byte_tokenizer())  # 260 ids for 288 rows
    assert padded.engine.model_config.num_tokens == 260
    with pytest.raises(RequestError, match="0 to 259"):
        padded.engine.add_request([270], greedy())
