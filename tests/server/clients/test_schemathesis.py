"""Every route against its own description: bodies that fit it and bodies that do not, over a real socket.

The model is scripted, so nothing but the server is tried. The cases are drawn from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fakes_text import plain_byte_tokenizer
from scripted_model import Scripted
from served import ENDPOINTS, TEMPLATE, Served, parse_events

schemathesis = pytest.importorskip("schemathesis", reason="make test-clients has it")
import jsonschema_rs  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from llmjax.server.config import ServerConfig  # noqa: E402
from llmjax.server.http_server import HttpServer  # noqa: E402
from llmjax.server.openapi import openapi_document  # noqa: E402
from llmjax.server.structured_fields import NAMES as STRUCTURED_FIELDS  # noqa: E402

pytestmark = pytest.mark.clients
KEY, NAMES, VOCABULARY = "first", ("tiny", "alias"), 260
schema = schemathesis.openapi.from_dict(openapi_document(ServerConfig(served_names=NAMES, api_keys=(KEY,))))


@schema.auth()
class Bearer:
    def get(self, case: Any, context: Any) -> str:
        return KEY

    def set(self, case: Any, data: str, context: Any) -> None:
        case.headers["authorization"] = f"Bearer {data}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    scripted = Scripted(plain_byte_tokenizer(chat_templates={"default": TEMPLATE}), kv_cache_bytes=64 * 1024)
    served = Served(scripted.engine, api_keys=(KEY,))
    server = HttpServer(served.app, served.engine, host="127.0.0.1", port=0, drain=1.0)
    server.start()
    yield server.url
    server.close()
    assert scripted.engine.pool.num_used == 0


@schema.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_a_route_does_what_its_description_says(url: str, case: Any) -> None:
    response = case.call(base_url=url)
    excluded = []
    fits = case.meta.generation.mode.is_positive and isinstance(case.body, dict)
    if response.status_code == 400 and fits and explained(case.body, response.json()["error"]):
        excluded.append(schemathesis.checks.positive_data_acceptance)
    case.validate_response(response, excluded_checks=excluded)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_the_events_of_a_stream_are_what_is_described(url: str, path: str) -> None:
    """OpenAPI has no words for events; the document refers to their schema all the same."""
    raw = openapi_document(ServerConfig(served_names=NAMES, api_keys=(KEY,)))
    operation = raw["paths"][path]["post"]
    described = operation["responses"]["200"]["content"]["text/event-stream"]["x-event-schema"]
    validator = jsonschema_rs.validator_for({**described, "components": raw["components"]})
    chat = "chat" in path
    asked = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a", "echo": True}
    body = {**asked, "stream": True, "n": 2, "max_tokens": 5, "logprobs": True if chat else 2}
    headers = {"authorization": f"Bearer {KEY}"}
    for options in ({}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}):
        events = parse_events(httpx2.post(url + path, json={**body, **options}, headers=headers, timeout=60).content)
        assert len(events) > 2
        for event in events:
            assert [str(error) for error in validator.iter_errors(event)] == []


def explained(body: dict[str, Any], error: dict[str, Any]) -> bool:
    """Whether a body that fits the schema may be refused so: for what the schema leaves to the descriptions."""
    fields = {name: value for name, value in body.items() if value is not None}
    if _holds_whole_float(fields.get(error["param"])):
        return True  # 2.0 is an integer to JSON schema, and none to this server
    limit = fields.get("max_tokens", fields.get("max_completion_tokens"))
    reasons = {
        "best_of": fields.get("best_of") != fields.get("n", 1),
        "max_completion_tokens": fields.get("max_tokens") != fields.get("max_completion_tokens") or limit == 0,
        "max_tokens": limit == 0,
        "min_tokens": fields.get("min_tokens", 0) > (16 if limit is None else limit),
        "stream_options": not fields.get("stream"),
        "top_logprobs": not fields.get("logprobs"),
        "prompt_logprobs": bool(fields.get("stream")),
        "prompt": error["code"] == "context_length_exceeded" or _unknown_id(fields.get("prompt")),
        "messages": error["code"] == "context_length_exceeded",
        "tokens": _unknown_id(fields.get("tokens")),
        "stop_token_ids": _unknown_id(fields.get("stop_token_ids")),
        "logit_bias": _unknown_id([int(key) for key in fields.get("logit_bias", {})]),
        "chat_template_kwargs": True,
        **dict.fromkeys(STRUCTURED_FIELDS, True),  # what compiles only the library knows; and each excludes the others
        **dict.fromkeys(("tools", "tool_choice"), True),  # the template takes none
        "n": isinstance(fields.get("prompt"), list) and len(fields["prompt"]) * fields.get("n", 1) > 1024,
    }
    return reasons.get(error["param"], False)


def _unknown_id(value: Any) -> bool:
    ids = value if isinstance(value, list) else []
    return any(_unknown_id(item) if isinstance(item, list) else isinstance(item, int) and item >= VOCABULARY for item in ids)


def _holds_whole_float(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_whole_float, value))
    return isinstance(value, float) and value.is_integer()
