"""Grammars of calls: whatever a random writer puts down under one is found by the parser, and keeps to the schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest
from tool_templates import CLOCK, WEATHER, tool

from llmjax.server.protocol import parse_request
from llmjax.server.tool_calls import ToolUse
from llmjax.server.tool_grammar import call_grammar
from llmjax.server.tool_parsers import HERMES, LLAMA, CallFormat, parse_calls

MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>")
CLOSING = frozenset(b'"}]')
EOS = 256
IDS = {mark: 257 + index for index, mark in enumerate(MARKS)}
MANY = tool(
    "many",
    {
        "type": "object",
        "properties": {
            "list": {"type": "array", "items": {"$ref": "#/$defs/pair"}, "minItems": 1, "maxItems": 2},
            "flag": {"type": ["boolean", "null"]},
        },
        "required": ["list"],
        "$defs": {"pair": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"const": "}\"é"}}, "required": ["y"]}},
    },
)  # fmt: skip


class Vocabulary:
    """Bytes, an end, and the marks, which are special tokens or plain ones."""

    bos_token_id = None
    eos_token_id = EOS

    def __init__(self, *, special: bool) -> None:
        self.tokens = [*(bytes([value]) for value in range(256)), b"<eos>", *(mark.encode() for mark in MARKS)]
        self.special_token_ids = [EOS, *(IDS.values() if special else ())]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def use_of(form: CallFormat, tools: list[Any], **fields: Any) -> ToolUse:
    use = parse_request("chat", {"messages": [{"role": "user", "content": ""}], "tools": tools, **fields}).tools
    assert use is not None
    return ToolUse(**{name: getattr(use, name) for name in ("tools", "required", "name", "parallel", "strict")}, form=form)


def matcher_of(grammar: str, *, special: bool) -> llguidance.LLMatcher:
    vocabulary = llguidance.TokenizerWrapper(Vocabulary(special=special))
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer(vocabulary, n_vocab=264), llguidance.LLMatcher.grammar_from_lark(grammar)
    )
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def written(matcher: llguidance.LLMatcher, seed: int, start: str = "") -> str:
    """What a writer puts down who picks any allowed token, ends where it may, and soon closes what it has opened."""
    rng, out = random.Random(seed), [*start.encode()]
    assert matcher.consume_tokens(out)
    while not matcher.is_stopped():
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(260) if bits[token // 8] >> (token % 8) & 1]
        assert allowed
        if EOS in allowed and (len(out) > 1500 or rng.random() < 0.5):
            break
        allowed = [token for token in allowed if token != EOS]
        closing = [token for token in allowed if token in CLOSING]
        token = rng.choice(closing if closing and rng.random() < 0.4 else allowed)
        assert matcher.consume_token(token)
        out.append(token)
        assert len(out) < 4000
    tokens = Vocabulary(special=True).tokens
    return b"".join(tokens[token] for token in out).decode()


def check_arguments(name: str, text: str) -> None:
    arguments = json.loads(text)
    if name == "clock":
        assert arguments == {}
    elif name == "get_weather":
        assert isinstance(arguments["city"], str)
        assert arguments.keys() <= {"city", "unit", "days"}
        assert arguments.get("unit", "C") in ("C", "F")
        assert type(arguments.get("days", 1)) is int
    else:
        assert arguments.keys() <= {"list", "flag"}
        assert arguments.get("flag") in (None, True, False)
        assert 1 <= len(arguments["list"]) <= 2
        for pair in arguments["list"]:
            assert pair["y"] == '}"é'
            assert isinstance(pair.get("x", 0.5), int | float)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", [HERMES, LLAMA], ids=["hermes", "llama"])
@pytest.mark.parametrize(
    ("fields", "names", "most"),
    [
        ({"tool_choice": "required"}, {"clock", "get_weather", "many"}, 100),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"clock", "get_weather", "many"}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "many"}}}, {"many"}, 1),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, {"clock"}, 1),
    ],
    ids=["required", "one", "many", "clock"],
)
def test_a_required_call_is_made_whatever_the_model_would_write(
    form: CallFormat, special: bool, fields: dict[str, Any], names: set[str], most: int
) -> None:
    grammar = call_grammar(use_of(form, [WEATHER, CLOCK, MANY], **fields), IDS)
    for _ in range(4):
        seed = random.randrange(2**32)
        content, calls = parse_calls(text := written(matcher_of(grammar, special=special), seed), form, names)
        assert not content, (seed, text)
        assert 1 <= len(calls) <= most, (seed, text)
        for name, arguments in calls:
            assert name in names, (seed, text)
            check_arguments(name, arguments)


@pytest.mark.parametrize("special", [True, False])
def test_strict_functions_keep_to_their_schemas_in_free_text(special: bool) -> None:
    strict = {**MANY, "function": {**MANY["function"], "strict": True}}
    grammar = call_grammar(use_of(HERMES, [strict, CLOCK]), IDS if special else {})
    for start in ("", "Hm <tool", "no call at all {", ""):
        seed = random.randrange(2**32)
        text = written(matcher_of(grammar, special=special), seed, start)
        content, calls = parse_calls(text, HERMES)
        assert "<tool_call>" not in content, (seed, text)
        for name, arguments in calls:
            assert name in ("many", "clock"), (seed, text)
            if name == "many":
                check_arguments(name, arguments)
            else:
                assert isinstance(json.loads(arguments), dict)
    head = "So:\n" + ("" if special else "<tool_call>")
    matcher = matcher_of(grammar, special=special)
    assert matcher.consume_tokens([*head.encode(), *([IDS["<tool_call>"]] if special else [])])
    forced = b'\n{"name": "'
    assert matcher.validate_tokens([*forced]) == len(forced)
    assert matcher.validate_tokens([*b"\n{'name"]) == 2


def test_keywords_that_cannot_be_enforced_matter_only_for_strict_functions() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "base64", "format": "no-such-format"}}}
    choice = {"tool_choice": "required"}
    matcher_of(call_grammar(use_of(HERMES, [tool("f", odd)], **choice), IDS), special=True)
    refused = call_grammar(use_of(HERMES, [tool("f", odd, strict=True)], **choice), IDS)
    with pytest.raises(AssertionError, match=r"no-such-format|contentEncoding"):
        matcher_of(refused, special=True)


def test_a_schema_that_says_what_else_it_allows_is_left_so() -> None:
    for more in ({"additionalProperties": {"type": "integer"}}, {"allOf": [{"properties": {"b": {"type": "integer"}}}]}):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
        grammar = call_grammar(use_of(LLAMA, [tool("f", schema)], tool_choice="required"), {})
        text = b'{"name": "f", "parameters": {"b": 1}}'
        assert matcher_of(grammar, special=True).validate_tokens([*text]) == len(text)


def test_what_only_explains_a_schema_is_left_out() -> None:
    said = {"title": "T", "description": "D" * 70_000, "default": 1, "examples": [1], "$comment": "C"}
    inner = {"type": "object", "properties": {"title": {"type": "integer", **said}}, "required": ["title"], **said}
    schema = {
        "type": "object",
        "properties": {"description": inner, "e": {"enum": [{"title": 1}]}},
        "required": ["description"],
        **said,
    }
    grammar = call_grammar(use_of(HERMES, [tool("f", schema)], tool_choice="required"), IDS)
    plain = {"type": "object", "properties": {"title": {"type": "integer"}}, "required": ["title"]}
    found = json.loads(grammar.split("%json ")[1])
    assert found["properties"] == {"description": plain, "e": {"enum": [{"title": 1}]}}
    assert not said.keys() & found.keys()
