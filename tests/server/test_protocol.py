"""OpenAI bodies in: what is accepted and what it means, and about a hundred that must be refused with the right `param`."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import pytest

from llmjax.engine.engine_client import EngineClient
from llmjax.errors import RequestError
from llmjax.server.protocol import parse_request
from llmjax.server.strict_json import load_json

PROMPT = {"completions": {"prompt": "hi"}, "chat": {"messages": [{"role": "user", "content": "hi"}]}}
BOTH = ("completions", "chat")


def parse(endpoint: str, **fields: Any) -> Any:
    return parse_request(endpoint, {**PROMPT[endpoint], **fields})


def refused(endpoint: str, body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_request(endpoint, body)
    assert "\n" not in str(caught.value)
    str(caught.value).encode()  # a message can always be sent
    return caught.value


# -- reports B06, B10, B17, B19: values of sampling fields, the same on both endpoints

BAD_FIELDS: list[tuple[str, Any]] = [
    *(
        (name, math.nan)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    ),
    *(
        (name, math.inf)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    ),
    *((name, 1e308) for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")),
    *((name, -1) for name in ("temperature", "top_p", "min_p", "repetition_penalty", "max_tokens", "min_tokens", "n")),
    *((name, "5") for name in ("temperature", "top_p", "top_k", "max_tokens", "n", "seed", "max_completion_tokens")),
    *((name, True) for name in ("temperature", "top_k", "max_tokens", "n", "seed", "max_completion_tokens")),
    *((name, 1.5) for name in ("top_k", "max_tokens", "n", "seed", "min_tokens", "max_completion_tokens")),
    ("presence_penalty", -2.5),
    ("top_p", 0),
    ("top_k", -2),
    ("top_k", 2**63),
    ("n", 0),
    ("n", 10**6),
    ("seed", 2**70),
    ("max_tokens", 0),
    ("max_completion_tokens", 0),
    ("max_completion_tokens", -1),
    ("min_tokens", 17_000_000_000),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-9),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", "x" * 100_000),
    ("stop", [1, 2]),
    ("stop", {"a": 1}),
    ("stop", "a\ud83d"),
    ("stop", ["ok", "\udc00"]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [2**40]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": math.nan}),
    ("logit_bias", [1]),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", True),
    ("logprobs_mode", "cooked"),
    ("include_stop_str_in_output", 1),
    ("ignore_eos", "yes"),
    ("skip_special_tokens", 0),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("model", "\ud800"),
]


@pytest.mark.parametrize("endpoint", BOTH)
@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=[f"{name}={value!r:.20}" for name, value in BAD_FIELDS])
def test_a_bad_field_is_refused_by_its_own_name(endpoint: str, name: str, value: Any) -> None:
    error = refused(endpoint, {**PROMPT[endpoint], name: value})
    assert error.param == name
    assert name in str(error)


@pytest.mark.parametrize("endpoint", BOTH)
@pytest.mark.parametrize("body", [[], None, True, 3, "x"], ids=repr)
def test_a_body_that_is_no_object_is_refused(endpoint: str, body: Any) -> None:
    assert "object" in str(refused(endpoint, body))


@pytest.mark.parametrize("endpoint", BOTH)
def test_null_counts_as_absent(endpoint: str) -> None:
    fields = {name: None for name, _ in BAD_FIELDS}
    assert parse(endpoint, **fields) == parse(endpoint)


@pytest.mark.parametrize(
    ("name", "hint"), [("max_new_tokens", "max_tokens"), ("temprature", "temperature"), ("top-p", "top_p"), ("zzz", None)]
)
def test_an_unknown_field_is_refused_with_what_was_meant(name: str, hint: str | None) -> None:
    error = refused("completions", {"prompt": "x", name: 1})
    assert error.param == name
    assert ("did you mean" in str(error)) is (hint is not None)
    assert hint is None or hint in str(error)


@pytest.mark.parametrize(
    ("name", "harmless", "asks"),
    [
        ("tools", [], [{"type": "function"}]),
        ("best_of", 1, 4),
        ("suffix", "", "x"),
        ("use_beam_search", False, True),
    ],
)
def test_what_is_not_supported_passes_only_when_it_asks_for_nothing(name: str, harmless: Any, asks: Any) -> None:
    assert parse("chat", **{name: harmless}) == parse("chat")
    assert refused("chat", {**PROMPT["chat"], name: asks}).param == name


@pytest.mark.parametrize("endpoint", BOTH)
def test_bookkeeping_fields_have_no_effect(endpoint: str) -> None:
    assert parse(endpoint, user="me", metadata={"a": "b"}, store=False) == parse(endpoint)


# -- prompts: reports B03, B11, B20


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        ("", ("",)),  # whether it is empty depends on the tokenizer's special tokens
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        ("nul \0 is text", ("nul \0 is text",)),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, expected: Any) -> None:
    assert parse("completions", prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ([], "empty"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ({}, "object"),
        (5, "number"),
        ([5279552648203111001], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([7, 1.5], "prompt[1]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([[1], ["x"]], "prompt[1][0]"),
        (["a", [1]], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ("a\ud83d", "surrogate"),
        (["ok", "a\udc00"], "prompt[1]"),
        (["x"] * 1025, "1025"),
        ([10**4000], "prompt[0]"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_prompt_is_refused_with_its_place(prompt: Any, where: str) -> None:
    error = refused("completions", {"prompt": prompt})
    assert error.param == "prompt"
    assert where in str(error)
    assert len(str(error)) < 200


def test_a_missing_prompt_is_refused() -> None:
    assert refused("completions", {}).param == "prompt"
    assert refused("chat", {}).param == "messages"


def test_choices_of_a_body_are_bounded_together() -> None:
    assert refused("completions", {"prompt": ["x"] * 100, "n": 100}).param == "n"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        {},
        "hi",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "wizard", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": "a\ud83d"}],
        [{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "name": 5}],
        [{"role": "user", "content": "x", "text": "y"}],
        [{"role": "user", "content": "fine"}, {"role": "user", "name": "\ud800", "content": "x"}],
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_bad_messages_are_refused(messages: Any) -> None:
    assert refused("chat", {"messages": messages}).param == "messages"


def test_text_parts_are_joined_and_empty_content_is_allowed() -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    ]
    assert [message["content"] for message in parse("chat", messages=messages).messages] == ["", "ab", None]
    assert "name" not in parse("chat", messages=messages).messages[1]


def test_deeply_nested_tool_calls_are_walked_without_recursion() -> None:
    nested: Any = "leaf \ud800"
    for _ in range(50_000):
        nested = [nested]
    error = refused("chat", {"messages": [{"role": "assistant", "content": "", "tool_calls": nested}]})
    while isinstance(nested, list):  # freed layer by layer: the interpreter would recurse
        nested = nested[0]
    assert "surrogate" in str(error)


@pytest.mark.parametrize("options", [[], "x", {"request_id": "mine"}, {"params": 1}, {"a b": 1}])
def test_template_options_cannot_replace_what_the_engine_gives(options: Any) -> None:
    assert refused("chat", {**PROMPT["chat"], "chat_template_kwargs": options}).param == "chat_template_kwargs"


@pytest.mark.parametrize("method", [EngineClient.submit_chat, EngineClient.encode_chat])
def test_template_options_cannot_be_named_as_parameters_are(method: Any) -> None:
    for name, parameter in inspect.signature(method).parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            refused("chat", {**PROMPT["chat"], "chat_template_kwargs": {name: 1}})


def test_template_options_are_passed_on() -> None:
    assert parse("chat", chat_template_kwargs={"enable_thinking": False}).template_options == {"enable_thinking": False}


# -- what the fields mean


def test_limits_by_either_name_and_their_defaults() -> None:
    assert parse("completions").params.max_tokens == 16
    assert parse("chat").params.max_tokens is None
    assert parse("chat", max_completion_tokens=7).params.max_tokens == 7
    assert parse("chat", max_tokens=7, max_completion_tokens=7).params.max_tokens == 7
    assert refused("chat", {**PROMPT["chat"], "max_tokens": 7, "max_completion_tokens": 8}).param == "max_completion_tokens"


def test_logprobs_are_a_number_for_completions_and_two_fields_for_chat() -> None:
    assert parse("completions", logprobs=0).params.logprobs == 0
    assert parse("completions", logprobs=20).params.logprobs == 20
    assert parse("chat", logprobs=True).params.logprobs == 0
    assert parse("chat", logprobs=True, top_logprobs=3).params.logprobs == 3
    assert parse("chat", logprobs=False).params.logprobs is None
    for endpoint, fields, param in (
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"logprobs": 21}, "logprobs"),
        ("completions", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": 3}, "logprobs"),
        ("chat", {"top_logprobs": 3}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ("chat", {"echo": True}, "echo"),
    ):
        error = refused(endpoint, {**PROMPT[endpoint], **fields})
        assert (error.param, param in str(error)) == (param, True)


def test_scoring_a_prompt_needs_echo() -> None:
    """Report B12: echo with max_tokens 0 generates nothing and scores the prompt."""
    scored = parse("completions", echo=True, max_tokens=0, logprobs=1)
    assert (scored.params.max_tokens, scored.params.logprobs, scored.params.prompt_logprobs, scored.echo) == (0, 1, 1, True)
    assert parse("completions", echo=True, max_tokens=0).params.prompt_logprobs == 0
    assert parse("completions", echo=True).params.prompt_logprobs is None
    assert refused("completions", {"prompt": "x", "max_tokens": 0, "logprobs": 1}).param == "max_tokens"


def test_extensions_reach_the_sampler() -> None:
    params = parse(
        "completions",
        top_k=5,
        min_p=0.1,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[7],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        prompt_logprobs=2,
        logit_bias={"50": -100},
        seed=3,
        stop="\n",
    ).params
    assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (5, 0.1, 1.1, 2)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (True, True, False)
    assert (params.stop_ids, params.stop_strings, params.prompt_logprobs, params.seed) == ((7,), ("\n",), 2, 3)
    assert params.logit_bias == {50: -100.0}
    assert parse("completions", add_special_tokens=False).add_special_tokens is False


def test_streaming_options() -> None:
    assert parse("chat", stream=True, stream_options={"include_usage": True}).include_usage is True
    assert parse("chat", stream=True, stream_options={"include_usage": None}).include_usage is False
    for options in ({"include_usage": 1}, {"nonsense": True}, []):
        assert refused("chat", {**PROMPT["chat"], "stream": True, "stream_options": options}).param == "stream_options"


def test_defaults_fill_only_what_is_absent() -> None:
    defaults = {"max_tokens": 48, "temperature": 0, "logprobs": 2}
    chat = parse_request("chat", {**PROMPT["chat"], "max_completion_tokens": 5}, defaults)
    assert (chat.params.max_tokens, chat.params.temperature, chat.params.logprobs) == (5, 0.0, 2)
    plain = parse_request("completions", {"prompt": "x", "temperature": 0.5, "max_tokens": None}, defaults)
    assert (plain.params.max_tokens, plain.params.temperature, plain.params.logprobs) == (48, 0.5, 2)


# -- JSON


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b'{"prompt": "x"', "column 15"),
        (b'{"prompt": "x",}', "column"),
        (b"", "column 1"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "-Infinity"),
        (b'{"a": 1, "a": 2}', "'a'"),
        (b"[" * 100_000, "nested"),
        (b'{"n": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"prompt": "\xff"}', "byte 12"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_json_is_refused_with_its_place(data: bytes, where: str) -> None:
    with pytest.raises(RequestError, match=r"^not ") as caught:
        load_json(data)
    assert where in str(caught.value)


def test_good_json_is_what_the_standard_library_says() -> None:
    data = json.dumps({"a": [1, 2.5, None, True, "é\0"]}).encode()
    assert load_json(data) == json.loads(data)
    assert load_json('"x"') == "x"


def test_a_hundred_thousand_keys_are_no_work() -> None:
    """Looked through once each: anything quadratic would take hours, and a server answers nobody else meanwhile."""
    names = [f"x{number}" for number in range(100_000)]
    body = json.dumps(dict.fromkeys(names, 1))
    assert len(load_json(body)) == len(names)
    with pytest.raises(RequestError, match="the key 'x99999' appears twice"):
        load_json(body[:-1] + ', "x99999": 2}')
    assert "logit_bias" in str(refused("completions", PROMPT["completions"] | {"logit_bias": {"9" * 5000: 1}}))
