"""`StructuredOutput`: exactly one form, checked for kind and size, one line each; equal and hashable by what it asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from llmjax import SamplingParams, StructuredOutput
from llmjax.errors import RequestError
from llmjax.structured_output import MAX_CHOICES, MAX_GRAMMAR_CHARS, MAX_GRAMMAR_LINES

NESTED: Any = {}
for _ in range(100_000):
    NESTED = {"items": NESTED}

BAD = [
    ({}, "exactly one"),
    ({"json_object": False}, "exactly one"),
    ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
    ({"json_object": True, "json_schema": {}}, "got json_object, json_schema"),
    ({"json_object": 1}, "json_object must be true or false"),
    ({"regex": "a", "lenient": "no"}, "lenient must be true or false"),
    ({"json_schema": "{"}, "not JSON"),
    ({"json_schema": "[1]"}, "must be a JSON object"),
    ({"json_schema": {"const": float("nan")}}, "not JSON"),
    ({"json_schema": {"const": object()}}, "not JSON"),
    ({"json_schema": NESTED}, "nested too deeply"),
    ({"json_schema": '{"a":' * 100_000}, "nested too deeply"),
    ({"json_schema": {"title": "x" * MAX_GRAMMAR_CHARS}}, "at most 65536"),
    ({"json_schema": {"title": "\ud800"}}, "surrogate"),
    ({"regex": ""}, "not empty"),
    ({"regex": 7}, "must be a text"),
    ({"regex": "\udfff"}, "surrogate"),
    ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, "at most 65536"),
    ({"choice": []}, "at least one text"),
    ({"choice": "yes"}, "list of at least one"),
    ({"choice": [""]}, "not empty"),
    ({"choice": ["a", 1]}, "must hold texts"),
    ({"choice": ["x"] * (MAX_CHOICES + 1)}, "at most 1000"),
    ({"grammar": "start: a\n" * MAX_GRAMMAR_LINES}, "at most 1000 lines"),
    ({"grammar": ["start"]}, "must be a text"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_a_wrong_form_is_refused_in_one_line_that_names_the_callers_field(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        StructuredOutput(**arguments, field="guided_thing")
    assert caught.value.param == "guided_thing"
    assert str(caught.value).startswith("guided_thing: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_equal_forms_are_equal_and_hash_alike_whatever_the_caller_calls_them() -> None:
    one = StructuredOutput(json_schema={"type": "object", "title": "é"}, field="guided_json")
    two = StructuredOutput(json_schema=' {"type" : "object", "title": "\\u00e9"}')
    assert one == two
    assert hash(one) == hash(two)
    assert one != StructuredOutput(json_schema=one.json_schema, any_whitespace=False)
    assert StructuredOutput(choice=["b", "a", "b"]) == StructuredOutput(choice=("b", "a"))
    assert (one.kind, one.schema_text) == ("json_schema", '{"type":"object","title":"é"}')
    # The order of properties is the order of the output.
    assert StructuredOutput(json_schema={"b": 1, "a": 2}) != StructuredOutput(json_schema={"a": 2, "b": 1})


def test_sampling_params_hold_one_and_nothing_else() -> None:
    form = StructuredOutput(regex="a+")
    assert SamplingParams(structured=form) == SamplingParams(structured=StructuredOutput(regex="a+"))
    assert hash(SamplingParams(structured=form)) == hash(SamplingParams(structured=dataclasses.replace(form)))
    assert SamplingParams(structured=form) != SamplingParams()
    with pytest.raises(RequestError, match="must be a StructuredOutput") as caught:
        SamplingParams(structured={"regex": "a+"})  # type: ignore[arg-type]
    assert caught.value.param == "structured"
