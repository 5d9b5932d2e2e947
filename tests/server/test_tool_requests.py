"""Bodies with tools: what is refused by which name, what the template is given, and what depends on the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes_text import byte_backend, plain_byte_tokenizer
from tokenizers import AddedToken
from tool_templates import CLOCK, LLAMA_LIKE, QWEN_LIKE, SHORT, WEATHER, tool

from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import ConfigError, RequestError
from llmjax.server.config import ServerConfig
from llmjax.server.protocol import ApiRequest, parse_request
from llmjax.server.tool_parsers import HERMES, LLAMA
from llmjax.server.tool_support import with_tools

USER = {"role": "user", "content": "hi"}


def parse(**fields: Any) -> ApiRequest:
    return parse_request("chat", {"messages": [USER], **fields})


def refused(fields: dict[str, Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    str(caught.value).encode()
    return caught.value


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "list"),
    ({"tools": ["x"]}, "tools", "tools[0]"),
    ({"tools": [{}]}, "tools", "tools[0].type"),
    ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
    ({"tools": [CLOCK, {"type": "function"}]}, "tools", "tools[1].function"),
    ({"tools": [tool("")]}, "tools", "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools", "a b"),
    ({"tools": [tool("x" * 65)]}, "tools", "64"),
    ({"tools": [tool("né")]}, "tools", "name"),
    ({"tools": [tool("a\n")]}, "tools", "name"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools", "name"),
    ({"tools": [tool("f", description=5)]}, "tools", "description"),
    ({"tools": [tool("f", description="\ud800")]}, "tools", "surrogate"),
    ({"tools": [tool("f", strict="yes")]}, "tools", "strict"),
    ({"tools": [tool("f", [])]}, "tools", "parameters"),
    ({"tools": [tool("f", {"type": "string"})]}, "tools", "object"),
    ({"tools": [tool("f", {"type": "object", "properties": []})]}, "tools", "properties"),
    ({"tools": [CLOCK, WEATHER, tool("clock")]}, "tools", "twice"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "128"),
    ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "any"),
    ({"tools": [CLOCK], "tool_choice": True}, "tool_choice", "true or false"),
    ({"tools": [CLOCK], "tool_choice": []}, "tool_choice", "list"),
    ({"tools": [CLOCK], "tool_choice": {}}, "tool_choice", "type"),
    ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice", "name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "clock"}}, "tool_choice", "name"),
    ({"tools": [CLOCK], "tool_choice": named("other")}, "tool_choice", "other"),
    ({"tools": [CLOCK], "tool_choice": named("\ud800")}, "tool_choice", "ud800"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [], "tool_choice": named("clock")}, "tool_choice", "clock"),
    ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    ({"functions": [CLOCK["function"]]}, "functions", "tools"),
    ({"functions": [], "function_call": {"name": "f"}}, "function_call", "tool_choice"),
    ({"tools": [CLOCK], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
    ({"messages": [USER, {"role": "function", "name": "f", "content": "x"}]}, "messages", "old form"),
    ({"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]}, "messages", "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": {"a": 1}}]}, "messages", "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, "messages", "tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]}, "messages", "tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]}]}, "messages", "arguments"),
    ({"messages": [{"role": "tool", "tool_call_id": 7, "content": "x"}]}, "messages", "tool_call_id"),
    ({"messages": [{"role": "tool", "tool_call_id": "7"}]}, "messages", "content"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "where"), BAD, ids=[f"{param}-{where}" for _, param, where in BAD])
def test_what_is_wrong_with_tools_is_told_by_field(fields: dict[str, Any], param: str, where: str) -> None:
    error = refused(fields)
    assert error.param == param
    assert where in str(error)


def test_completions_take_no_tools() -> None:
    with pytest.raises(RequestError) as caught:
        parse_request("completions", {"prompt": "a", "tools": [CLOCK]})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("fields", [{"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": None}])
def test_without_tools_the_fields_change_nothing(fields: dict[str, Any]) -> None:
    assert parse(**fields, parallel_tool_calls=False) == parse()


def test_choices_and_what_they_allow() -> None:
    tools = [WEATHER, CLOCK]
    auto = parse(tools=tools).tools
    assert auto is not None
    assert (auto.required, auto.name, auto.parallel, set(auto.callable)) == (False, None, True, {"get_weather", "clock"})
    assert parse(tools=tools, tool_choice="auto").tools == auto
    required = parse(tools=tools, tool_choice="required", parallel_tool_calls=False).tools
    assert required is not None
    assert (required.required, required.parallel) == (True, False)
    one = parse(tools=tools, tool_choice=named("clock")).tools
    assert one is not None
    assert (one.required, one.name, one.parallel) == (True, "clock", False)
    assert one.callable == {"clock": {"type": "object", "properties": {}}}
    none = parse(tools=tools, tool_choice="none")
    assert none == parse()


def test_templates_get_the_tools_as_they_were_written_but_for_what_is_not_for_them() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    given = {
        "type": "function",
        "function": {"parameters": schema, "name": "f", "strict": True, "description": None, "returns": 1},
    }
    (seen,) = parse(tools=[given]).template_options["tools"]
    assert json.dumps(seen) == json.dumps({"type": "function", "function": {"parameters": schema, "name": "f", "returns": 1}})
    assert "returns" in given["function"]


# -- what depends on the model


def model(template: str, **options: Any) -> Tokenizer:
    return plain_byte_tokenizer(chat_templates={"default": template}, **options)


@pytest.mark.parametrize(
    ("template", "setting", "form"),
    [
        (QWEN_LIKE, "auto", HERMES),
        (LLAMA_LIKE, "auto", LLAMA),
        (SHORT["unknown"], "hermes", HERMES),
        (QWEN_LIKE, "llama", LLAMA),
        (SHORT["unknown"], "none", None),
        (QWEN_LIKE, "none", None),
    ],
)
def test_the_format_is_the_templates_or_the_settings(template: str, setting: Any, form: Any) -> None:
    request = with_tools(parse(tools=[CLOCK]), model(template), setting)
    assert request.tools is not None
    assert request.tools.form is form
    assert request.params == parse().params


@pytest.mark.parametrize(
    ("template", "setting", "fields", "param", "where"),
    [
        (SHORT["without"], "auto", {}, "tools", "template"),
        (SHORT["without"], "hermes", {"tool_choice": "required"}, "tools", "template"),
        (SHORT["unknown"], "auto", {}, "tools", "tool_parser"),
        (QWEN_LIKE, "none", {"tool_choice": "required"}, "tool_choice", "tool_parser"),
        (QWEN_LIKE, "none", {"tool_choice": named("clock")}, "tool_choice", "tool_parser"),
    ],
)
def test_what_a_model_cannot_do_is_told(template: str, setting: Any, fields: dict[str, Any], param: str, where: str) -> None:
    with pytest.raises(RequestError, match=where) as caught:
        with_tools(parse(tools=[CLOCK], **fields), model(template), setting)
    assert caught.value.param == param
    untouched = parse(tools=[CLOCK], tool_choice="none")
    assert with_tools(untouched, model(template), setting) is untouched


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        {"guided_regex": "a"},
        {"structured_outputs": {"choice": ["a"]}},
    ],
    ids=lambda form: next(iter(form)),
)
def test_another_form_of_the_output_cannot_be_asked_for_beside_tools(form: dict[str, Any]) -> None:
    for choice in ("auto", "required"):
        with pytest.raises(RequestError, match="cannot be combined with tools") as caught:
            with_tools(parse(tools=[CLOCK], tool_choice=choice, **form), model(QWEN_LIKE), "auto")
        assert caught.value.param in form
    without = parse(tools=[CLOCK], tool_choice="none", **form)
    assert with_tools(without, model(QWEN_LIKE), "auto") is without
    assert with_tools(parse(tools=[CLOCK], response_format={"type": "text"}), model(QWEN_LIKE), "auto").params == parse().params


def test_only_what_must_keep_to_a_form_is_constrained() -> None:
    strict = tool("f", strict=True)
    for fields, constrained in (
        ({"tools": [CLOCK]}, {"hermes": False, "llama": False, "none": False}),
        ({"tools": [CLOCK, strict]}, {"hermes": True, "llama": False, "none": False}),
        ({"tools": [CLOCK], "tool_choice": "required"}, {"hermes": True, "llama": True}),
    ):
        for setting, expected in constrained.items():
            request = with_tools(parse(**fields), model(QWEN_LIKE), setting)  # type: ignore[arg-type]
            assert (request.params.structured is not None) is expected


def test_a_schema_too_deep_to_be_written_down_is_a_fault_of_the_tools() -> None:
    deep: Any = {}
    for _ in range(50_000):
        deep = {"items": deep}
    request = parse(tools=[tool("f", {"type": "object", "properties": {"a": deep}})], tool_choice="required")
    with pytest.raises(RequestError, match="too deeply") as caught:
        with_tools(request, model(QWEN_LIKE), "auto")
    assert caught.value.param == "tools"
    while deep:  # freed layer by layer: the interpreter would recurse
        deep = deep["items"]


def test_a_template_of_its_own_for_tools_is_the_one_that_counts() -> None:
    tokenizer = plain_byte_tokenizer(chat_templates={"default": SHORT["without"], "tool_use": QWEN_LIKE})
    request = with_tools(parse(tools=[CLOCK]), tokenizer, "auto")
    assert request.tools is not None
    assert request.tools.form is HERMES
    assert '"clock"' in tokenizer.render_chat(request.messages, **request.template_options)


@pytest.mark.parametrize("setting", ["auto", "hermes"])
def test_a_model_without_template_is_told_as_for_any_chat(setting: Any) -> None:
    request = with_tools(parse(tools=[CLOCK]), plain_byte_tokenizer(), setting)
    with pytest.raises(RequestError, match="no chat template") as caught:
        plain_byte_tokenizer().render_chat(request.messages, **request.template_options)
    assert caught.value.param == "messages"


def test_a_model_without_tokenizer_is_told_as_for_any_chat() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        with_tools(parse(tools=[CLOCK]), None, "auto")


@pytest.mark.parametrize("special", [True, False])
def test_marks_that_are_special_tokens_are_not_left_out_of_the_text(special: bool) -> None:
    backend = byte_backend()
    marks = [AddedToken(text, normalized=False, special=special) for text in HERMES.markers]
    (backend.add_special_tokens if special else backend.add_tokens)(marks)
    tokenizer = Tokenizer(backend, chat_templates={"default": QWEN_LIKE})
    assert tokenizer.added_id("<tool_call>") == 260
    assert tokenizer.added_id("a") is None
    assert with_tools(parse(tools=[CLOCK]), tokenizer, "auto").params.skip_special_tokens is not special
    assert with_tools(parse(tools=[CLOCK]), tokenizer, "none").params.skip_special_tokens is True


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="tool_parser"):
        ServerConfig(served_names=("m",), tool_parser="qwen")  # type: ignore[arg-type]


# -- conversations with calls and results


CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": ""}},
]
RESULTS = [
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "grey"}'},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "12"}, {"type": "text", "text": ":05"}]},
]


def test_a_conversation_with_results_in_the_manner_of_qwen() -> None:
    messages = [USER, {"role": "assistant", "content": None, "refusal": None, "tool_calls": CALLS}, *RESULTS]
    request = parse(messages=messages, tools=[WEATHER, CLOCK])
    text = model(QWEN_LIKE).render_chat(request.messages, **request.template_options)
    system, _, talk = text.partition("<|im_start|>user\n")
    assert system.count('{"type": "function", "function": {"name": "') == 2
    assert talk == (
        'hi<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call><|im_end|>\n'
        '<|im_start|>user\n<tool_response>\n{"sky": "grey"}\n</tool_response><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n12:05\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_with_results_in_the_manner_of_llama() -> None:
    request = parse(messages=[USER, {"role": "assistant", "tool_calls": CALLS[:1]}, RESULTS[0]])
    text = model(LLAMA_LIKE).render_chat(request.messages, **request.template_options)
    assert text == (
        '<bos>user: hi<|eot|>assistant: {"name": "get_weather", "parameters": {"city": "Köln"}}<|eot|>'
        'ipython: "{\\"sky\\": \\"grey\\"}"<|eot|>assistant: '
    )
    both = parse(messages=[USER, {"role": "assistant", "tool_calls": CALLS}])
    with pytest.raises(RequestError, match="single tool-calls"):
        model(LLAMA_LIKE).render_chat(both.messages)


def test_arguments_that_a_model_wrote_badly_can_be_sent_back() -> None:
    broken = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    request = parse(
        messages=[USER, {"role": "assistant", "content": "", "tool_calls": [broken]}, {"role": "tool", "content": "?"}]
    )
    assert '"arguments": "{\\"a\\": "}' in model(QWEN_LIKE).render_chat(request.messages)
