"""Calls over HTTP: what a scripted model writes becomes the same calls in a whole answer and in a stream."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fakes_text import byte_backend
from scripted_model import Scripted
from served import Served, run
from tokenizers import AddedToken
from tool_templates import QWEN_LIKE, SHORT, tool

from llmjax.engine.outputs import RequestOutput
from llmjax.engine.tokenizer import Tokenizer
from llmjax.sampling_params import SamplingParams
from llmjax.server.tool_parsers import HERMES, parse_calls

CHAT = "/v1/chat/completions"
F = tool("f", {"type": "object", "properties": {"a": {}}})
G = tool("g")
ASK = {"messages": [{"role": "user", "content": "?"}], "tools": [F, G], "temperature": 0}
MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>"]


@pytest.fixture(scope="module")
def model() -> Scripted:
    """Marks are special tokens 260 to 262, which an output shows only when told to; text is bytes."""
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in MARKS])
    tokenizer = Tokenizer(backend, special_tokens={"eos_token": "<eos>"})
    return Scripted(tokenizer, eos_ids=(257,), kv_cache_bytes=64 * 1024)


@pytest.fixture
def served(model: Scripted) -> Iterator[Served]:
    one = Served(model.engine)
    yield one
    one.engine.stop()
    while model.engine.has_unfinished:
        model.engine.step()
    assert model.engine.pool.num_used == 0


def ids_of(text: str) -> list[int]:
    """Token ids of a text, marks as single tokens."""
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
    return [token for part in parts for token in ([260 + MARKS.index(part)] if part in MARKS else part.encode())]


def write(served: Served, model: Scripted, family: str, text: str, *, told: bool = True) -> None:
    """Let the model answer with this text; it is `told` of the tools."""
    tokenizer = model.engine.tokenizer
    assert tokenizer is not None
    tokenizer.use_chat_template(SHORT[family])
    asked = {name: ASK[name] for name in ("messages", *(["tools"] if told else []))}
    prompt = int(served.post("/tokenize", asked).json()["count"])
    script = [*ids_of(text), 257]
    run(served.engine.call(lambda: model.script(script, prompt=prompt)))


def answers(served: Served, body: dict[str, Any] = ASK) -> dict[str, Any]:
    """The only choice of a whole answer, after the stream of the same was found to say the same."""
    response = served.post(CHAT, body)
    assert response.status_code == 200, response.text
    (whole,) = response.json()["choices"]
    streamed = joined(served.events(CHAT, body))[0]
    assert without_ids(streamed) == without_ids(whole)
    return dict(whole)


def joined(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choices from the chunks of a stream, put together as clients do it."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            delta = piece["delta"]
            if piece["index"] not in choices:
                assert delta == {"role": "assistant", "content": None}
                message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
                choices[piece["index"]] = {"index": piece["index"], "message": message, "logprobs": None, "finish_reason": None}
                continue
            choice = choices[piece["index"]]
            assert choice["finish_reason"] is None
            message = choice["message"]
            assert (delta == {}) == (piece["finish_reason"] is not None)
            if delta.get("content") is not None:
                message["content"] = (message["content"] or "") + delta["content"]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert set(call) == {"index", "id", "type", "function"}
                    assert call["function"]["arguments"] == ""
                    calls.append({name: call[name] for name in ("id", "type", "function")})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                    assert call["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            if piece["logprobs"] is not None:
                said = choice["logprobs"] or {"content": [], "refusal": None}
                choice["logprobs"] = {**said, "content": said["content"] + piece["logprobs"]["content"]}
            choice["finish_reason"] = piece["finish_reason"]
            choice["stop_reason"] = piece.get("stop_reason")
    return [choices[index] for index in sorted(choices)]


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice whose ids, which are made up, are seen to be of the right form and different."""
    message = dict(choice["message"])
    ids = [call["id"] for call in message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"call_[0-9A-Za-z]{24}", one) for one in ids)
    if ids:
        message["tool_calls"] = [{**call, "id": ""} for call in message["tool_calls"]]
    elif message["content"] is None:
        message["content"] = ""  # what a stream cannot tell apart
    return {**choice, "message": message}


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    assert all(call["type"] == "function" for call in choice["message"]["tool_calls"])
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(one["name"], one["arguments"]) for one in functions]


TEXTS: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "é}"}}</tool_call>', None, [("f", '{"a": "é}"}')]),
    (
        "hermes",
        'Hm.\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g"}',
        "Hm.",
        [("f", "{}"), ("g", "{}")],
    ),
    ("llama", '{"name": "f", "parameters": {"a": [1, {"b": "漢"}]}}', None, [("f", '{"a": [1, {"b": "漢"}]}')]),
    ("llama", 'So:<|python_tag|>{"name": "g", "parameters": {}}; {"name": "f"}', "So:", [("g", "{}"), ("f", "{}")]),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), TEXTS, ids=[text[1][:30] for text in TEXTS])
@pytest.mark.parametrize("logprobs", [False, True])
def test_calls_of_a_whole_answer_and_of_a_stream(
    served: Served, model: Scripted, family: str, text: str, content: str | None, calls: list[Any], logprobs: bool
) -> None:
    write(served, model, family, text)
    choice = answers(served, {**ASK, "logprobs": logprobs})
    assert choice["message"]["content"] == content
    assert calls_of(choice) == calls
    assert choice["finish_reason"] == "tool_calls"
    if logprobs:  # of every token, marks and all, and the one that ended the output
        assert b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"]).decode() == text + "<eos>"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "Plain, and no <call>\n"),
        ("hermes", '<tool_call>{"name": f}</tool_call> '),
        ("llama", '{"name": "Ann", "age": 5}'),
        ("hermes", ""),
    ],
)
def test_text_without_a_call_is_content_and_stays_as_it_is(served: Served, model: Scripted, family: str, text: str) -> None:
    write(served, model, family, text)
    choice = answers(served)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_the_limit_cuts_ends_with_length(served: Served, model: Scripted) -> None:
    write(served, model, "hermes", '<tool_call>{"name": "f", "arguments": {"a": 1234567890')
    choice = answers(served, {**ASK, "max_tokens": 40})
    assert calls_of(choice) == [("f", '{"a": 123456')]
    assert choice["finish_reason"] == "length"


def test_one_call_at_most_when_several_are_not_wanted(served: Served, model: Scripted) -> None:
    write(served, model, "hermes", '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>')
    assert calls_of(answers(served, {**ASK, "parallel_tool_calls": False})) == [("f", "{}")]


def test_each_choice_has_calls_of_its_own(served: Served, model: Scripted) -> None:
    write(served, model, "llama", '{"name": "f", "parameters": {"a": 1}}')
    body = {**ASK, "n": 3}
    whole = served.post(CHAT, body).json()["choices"]
    streamed = joined(served.events(CHAT, body))
    assert [without_ids(one) for one in streamed] == [without_ids(one) for one in whole]
    assert [calls_of(one) for one in whole] == [[("f", '{"a": 1}')]] * 3
    assert len({one["message"]["tool_calls"][0]["id"] for one in (*whole, *streamed)}) == 6


def test_without_calls_allowed_the_text_stays_and_the_prompt_has_no_tools(served: Served, model: Scripted) -> None:
    text = '{"name": "f", "parameters": {}}'
    body = {**ASK, "tool_choice": "none"}
    write(served, model, "llama", text, told=False)
    whole = served.post(CHAT, body).json()
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["prompt_tokens"] == len(":?")
    raw = served.with_options(tool_parser="none")
    write(served, model, "llama", text)
    whole = raw.post(CHAT, ASK).json()
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["prompt_tokens"] == len("fg:?")


def test_what_the_model_cannot_do_is_refused_before_a_stream_begins(served: Served, model: Scripted) -> None:
    for family, param, body in (
        ("without", "tools", ASK),
        ("unknown", "tools", ASK),
        ("hermes", "tool_choice", {**ASK, "tool_choice": "sometimes"}),
        ("hermes", "tools", {**ASK, "tools": [F, F]}),
    ):
        write(served, model, family, "ok")
        for stream in (False, True):
            response = served.post(CHAT, {**body, "stream": stream})
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    write(served, model, "hermes", "ok")
    assert answers(served)["message"]["content"] == "ok"


def test_an_answer_can_be_sent_back_with_its_results(served: Served, model: Scripted) -> None:
    write(served, model, "hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00e9"}}</tool_call>')
    message = answers(served)["message"]
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"sum": 1})}
    talk = [*ASK["messages"], message, result]
    tokenizer = model.engine.tokenizer
    assert tokenizer is not None
    tokenizer.use_chat_template(QWEN_LIKE)
    ids = served.post("/tokenize", {"messages": talk, "tools": ASK["tools"]}).json()["tokens"]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>' in text
    assert '<tool_response>\n{"sum": 1}\n</tool_response>' in text
    assert served.post("/tokenize", {"messages": talk}).json()["count"] < len(ids)


def test_offline_the_template_gets_the_tools_and_the_parser_is_at_hand(model: Scripted) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tokenizer = model.engine.tokenizer
    assert tokenizer is not None
    tokenizer.use_chat_template(SHORT["hermes"])
    model.script([*text.encode(), 257], prompt=len("fg:?"))
    model.engine.add_chat(ASK["messages"], SamplingParams(max_tokens=100, temperature=0), tools=ASK["tools"])
    outputs: list[RequestOutput] = []
    while model.engine.has_unfinished:
        outputs += model.engine.step()
    assert outputs[-1].prompt == "fg:?"
    assert parse_calls(outputs[-1].outputs[0].text, HERMES) == ("", [("f", '{"a": 1}')])


NAMED = {"type": "function", "function": {"name": "f"}}
SMALL = tool("f", {"type": "object", "properties": {"a": {"enum": [1, "é}"]}, "b": {"type": "boolean"}}, "required": ["a"]})


@pytest.mark.parametrize("family", ["hermes", "llama"])
@pytest.mark.parametrize("choice", [NAMED, "required"], ids=["named", "required"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_random_model_calls_when_it_must(served: Served, model: Scripted, family: str, choice: Any, stream: bool) -> None:
    write(served, model, family, "")
    run(served.engine.call(lambda: model.script([])))  # all tokens are equally likely
    body = {
        **ASK, "tools": [SMALL, G], "tool_choice": choice, "parallel_tool_calls": False,
        "temperature": 1, "n": 3, "seed": random.randrange(2**32),
    }  # fmt: skip
    if stream:
        choices = joined(served.events(CHAT, body))
    else:
        choices = served.post(CHAT, body).json()["choices"]
    assert len(choices) == 3
    for one in choices:
        assert without_ids(one)["message"]["content"] is None
        ((name, text),) = calls_of(one)
        assert one["finish_reason"] == "tool_calls"
        arguments = json.loads(text)
        assert name == "f" or (name, arguments, choice) == ("g", {}, "required")
        if name == "f":
            assert arguments["a"] in (1, "é}")
            assert arguments.keys() <= {"a", "b"}


def test_a_strict_function_keeps_to_its_schema_though_the_model_would_not(served: Served, model: Scripted) -> None:
    text = 'So: <tool_call>\n{"name": "f", "arguments": {"z": 5, "a": 7}}\n</tool_call>'
    strict = {**SMALL, "function": {**SMALL["function"], "strict": True}}
    for tools, fits in (([SMALL, G], False), ([strict, G], True)):
        write(served, model, "hermes", text)
        choice = served.post(CHAT, {**ASK, "tools": tools}).json()["choices"][0]
        assert choice["message"]["content"].rstrip("\0") == "So:"  # what the model says when the script is over
        ((name, arguments),) = calls_of(choice)
        assert name == "f"
        assert (arguments != '{"z": 5, "a": 7}') is fits
        assert not fits or arguments.startswith(('{"a": 1', '{"a": "'))


def test_a_schema_that_cannot_be_enforced_is_told_as_a_fault_of_the_tools(served: Served, model: Scripted) -> None:
    write(served, model, "hermes", "ok")
    odd = tool("f", {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})
    for stream in (False, True):
        response = served.post(CHAT, {**ASK, "tools": [odd], "tool_choice": "required", "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "tools"
    assert answers(served)["message"]["content"] == "ok"


@pytest.mark.parametrize("depth", [100, 400, 900, 20_000])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_deep_schema_is_served_or_refused(served: Served, model: Scripted, depth: int, choice: str) -> None:
    write(served, model, "hermes", "ok")
    body = {**ASK, "tools": [tool("f", {"type": "object", "properties": {"a": "DEEP"}})], "tool_choice": choice, "max_tokens": 3}
    data = json.dumps(body).replace('"DEEP"', '{"type":"array","items":' * depth + "{}" + "}" * depth)
    response = served.post(CHAT, data=data.encode())
    assert response.status_code == (200 if depth == 100 else 400 if depth == 20_000 else response.status_code), response.text
    assert response.status_code in (200, 400), response.text
    assert answers(served)["message"]["content"] == "ok"
