"""Structured output over HTTP: every way to ask for it, what is refused and how, and that refusals disturb nobody."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from scripted_model import CONTEXT, Scripted
from served import ENDPOINTS, Served

from llmjax.errors import RequestError
from llmjax.server.protocol import parse_request
from llmjax.structured_output import StructuredOutput

PROMPT: dict[str, dict[str, Any]] = {"completions": {"prompt": "x"}, "chat": {"messages": [{"role": "user", "content": "x"}]}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
Form = StructuredOutput

ASKS = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Form(json_object=True)),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, Form(json_schema=SCHEMA)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}},
        Form(json_schema=SCHEMA, lenient=True),
    ),
    ({"guided_json": SCHEMA}, Form(json_schema=SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, Form(json_schema=SCHEMA)),
    ({"guided_regex": "a+"}, Form(regex="a+")),
    ({"guided_choice": ["a", "b"]}, Form(choice=["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, Form(grammar='start: "a"')),
    ({"guided_regex": None, "response_format": {"type": "text"}}, None),
    ({"guided_regex": "a", "response_format": {"type": "text"}}, Form(regex="a")),
    ({"structured_outputs": {"json": SCHEMA}}, Form(json_schema=SCHEMA)),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, Form(json_schema=SCHEMA, any_whitespace=False)),
    ({"structured_outputs": {"regex": "a+", "choice": None}}, Form(regex="a+")),
    ({"structured_outputs": {"choice": ["a"]}}, Form(choice=["a"])),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Form(grammar='root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, Form(json_object=True)),
]  # fmt: skip

REFUSED = [
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {}}, "response_format", "type must be text, json_object or json_schema"),
    ({"response_format": {"type": ["x"]}}, "response_format", "type must be"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "unknown field 'schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format", "schema must be an object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format", "strict must"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}}, "response_format", "name must be"),
    ({"guided_json": 5}, "guided_json", "must be a JSON object"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_regex": ["a"]}, "guided_regex", "must be a text"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536"),
    ({"guided_choice": []}, "guided_choice", "at least one"),
    ({"guided_choice": ["a", 1]}, "guided_choice", "must hold texts"),
    ({"guided_grammar": ""}, "guided_grammar", "not empty"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown field 'regexp'"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": 1}}, "structured_outputs", "true or false"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "true or false"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "both ask for a form"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "response_format", "both ask for a form"),
]  # fmt: skip

CANNOT_BE_COMPILED = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objec"}}}}, "Invalid type"),
    ({"guided_json": {"not": {}}}, "Unimplemented keys"),
    ({"guided_regex": "(a"}, "unclosed group"),
    ({"guided_grammar": "start: nowhere"}, "unknown name"),
    ({"structured_outputs": {"regex": "^$"}}, "allows no text"),
]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize(("fields", "form"), ASKS, ids=[str(i) for i in range(len(ASKS))])
def test_every_way_to_ask(endpoint: Any, fields: dict[str, Any], form: StructuredOutput | None) -> None:
    params = parse_request(endpoint, PROMPT[endpoint] | fields).params
    assert params.structured == form
    if form is not None:
        assert params.structured is not None
        assert params.structured.field in fields


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_is_refused_names_the_field(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_request("chat", PROMPT["chat"] | fields)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def random_logits(scripted: Scripted) -> None:
    table = np.random.default_rng().normal(size=(CONTEXT, 288)).astype(np.float32)
    scripted.logits(table)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_answers_and_streams_have_the_form(served: Served, scripted: Scripted, path: str) -> None:
    random_logits(scripted)
    prompt = PROMPT["chat" if "chat" in path else "completions"]
    compact = {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}
    for fields, pattern in ((compact, r'\{"a":[12]\}'), ({"guided_regex": "[a-e]{4}é"}, "[a-e]{4}é")):
        body = {**prompt, **fields, "max_tokens": 30, "seed": 5, "n": 2}
        response = served.post(path, body)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        texts = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in choices]
        assert all(re.fullmatch(pattern, text) for text in texts)
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        pieces = ["", ""]
        for event in served.events(path, body):
            for choice in event["choices"]:
                pieces[choice["index"]] += (choice["delta"].get("content") or "") if "chat" in path else choice["text"]
        assert pieces == texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "words"), CANNOT_BE_COMPILED, ids=[str(i) for i in range(len(CANNOT_BE_COMPILED))])
def test_what_cannot_be_compiled_is_400_before_anything_streams(
    served: Served, scripted: Scripted, fields: dict[str, Any], words: str, stream: bool
) -> None:
    random_logits(scripted)
    response = served.post(ENDPOINTS[1], {**PROMPT["chat"], **fields, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert [error["param"]] == list(fields)
    assert words in error["message"]
    assert "\n" not in error["message"]
    after = served.post(ENDPOINTS[0], {"prompt": "x", "guided_choice": ["fine"]})
    assert after.json()["choices"][0]["text"] == "fine"


def test_one_bad_form_of_many_prompts_leaves_none_behind(served: Served, scripted: Scripted) -> None:
    random_logits(scripted)
    assert served.post(ENDPOINTS[0], {"prompt": ["a", "b", "c"], "guided_regex": "("}).status_code == 400
    assert served.engine.num_open == 0
    texts = served.post(ENDPOINTS[0], {"prompt": ["a", "b", "c"], "guided_choice": ["x"]}).json()["choices"]
    assert [choice["text"] for choice in texts] == ["x"] * 3


def test_compilations_are_counted_once(served: Served, scripted: Scripted) -> None:
    def count() -> float:
        return float(scripted.engine.metrics.registry.get_sample_value("llmjax:grammar_compilation_seconds_count") or 0)

    random_logits(scripted)
    before = count()
    for _ in range(3):
        served.post(ENDPOINTS[0], {"prompt": "a", "guided_regex": "counted[0-9]", "max_tokens": 12})
    assert count() == before + 1
    served.post(ENDPOINTS[0], {"prompt": "a", "guided_regex": "("})
    assert count() == before + 1


def test_the_description_knows_the_fields(served: Served) -> None:
    paths = served.get("/openapi.json").json()["paths"]
    for path in ENDPOINTS:
        properties = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        asked = {name for fields, _ in ASKS for name in fields}
        assert asked <= set(properties)
        assert "structured" not in properties
