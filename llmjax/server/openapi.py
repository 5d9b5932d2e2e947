"""`/openapi.json`: the routes and their bodies, described from the types that the server reads them with."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import typing
from typing import Any

import pydantic

from llmjax.sampling_params import SamplingParams
from llmjax.server.prompts import ROLES
from llmjax.server.protocol import Endpoint, known_fields
from llmjax.server.tool_calls import MAX_TOOLS

_NON_EMPTY = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        _NON_EMPTY,
        _IDS,
        {"type": "array", "items": _NON_EMPTY, "minItems": 1},
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_BOOLEAN, _STRING, _OBJECT = {"type": "boolean"}, {"type": "string"}, {"type": "object"}
_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": _STRING,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _STRING, "arguments": _STRING},
        },
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"type": ["string", "null"]},
        "tool_calls": {"type": "array", "items": _CALL},
        "tool_call_id": _STRING,
    },
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                "description": _STRING,
                "parameters": _OBJECT,
                "strict": _BOOLEAN,
            },
        },
    },
}
_TOOL_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "required": ["name"], "properties": {"name": _STRING}},
            },
        },
    ]
}
_CHOICE = {"type": "array", "items": {"type": "string"}, "minItems": 1}
# Fields that are not sampling settings, or that an endpoint writes in a way of its own.
_OTHER: dict[str, Any] = {
    "model": _STRING,
    "prompt": _PROMPT,
    "messages": _MESSAGES,
    "stream": _BOOLEAN,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _BOOLEAN, "continuous_usage_stats": _BOOLEAN},
    },
    "echo": _BOOLEAN,
    "add_special_tokens": _BOOLEAN,
    "max_completion_tokens": {"type": "integer", "minimum": 1},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    "chat_template_kwargs": _OBJECT,
    "tools": {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS},
    "tool_choice": _TOOL_CHOICE,
    "parallel_tool_calls": _BOOLEAN,
    "response_format": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {"name": _STRING, "description": _STRING, "schema": _OBJECT, "strict": _BOOLEAN},
            },
        },
    },
    "structured_outputs": {
        "type": "object",
        "properties": {
            "json": _OBJECT,
            "regex": _NON_EMPTY,
            "choice": _CHOICE,
            "grammar": _NON_EMPTY,
            "json_object": _BOOLEAN,
            "disable_any_whitespace": _BOOLEAN,
        },
    },
    "guided_json": _OBJECT,
    "guided_regex": _NON_EMPTY,
    "guided_choice": _CHOICE,
    "guided_grammar": _NON_EMPTY,
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _STRING,
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": _STRING,
            },
        }
    },
}


def openapi_document() -> dict[str, Any]:
    """The document, OpenAPI 3.1."""
    model = {"model": _STRING}
    tokenize = {
        **model, "prompt": _STRING, "messages": _MESSAGES, "tools": _OTHER["tools"], "add_special_tokens": _BOOLEAN
    }  # fmt: skip
    paths = {
        "/v1/completions": _generates("Complete a prompt.", "completions", ["prompt"]),
        "/v1/chat/completions": _generates("Answer a conversation.", "chat", ["messages"]),
        "/tokenize": _post("Token ids of a text or a conversation.", tokenize),
        "/detokenize": _post("The text of token ids.", {**model, "tokens": _IDS}, ["tokens"]),
        "/abort": _post("End answers under way.", {"request_id": _STRING, "abort_all": _BOOLEAN}),
        "/v1/models": _get("The models served here."),
        "/v1/models/{id}": _get("One of them.", parameter="id"),
        "/livez": _get("Whether the process should live on.", probe=True),
        "/readyz": _get("Whether requests are taken.", probe=True),
        "/health": _get("The same.", probe=True),
        "/metrics": _get("Prometheus metrics."),
        "/version": _get("The version of llmjax."),
        "/openapi.json": _get("This document."),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmjax", "version": importlib.metadata.version("llmjax")},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _generates(summary: str, endpoint: Endpoint, required: list[str]) -> dict[str, Any]:
    hints = typing.get_type_hints(SamplingParams)
    sampling = {field.name: hints[field.name] for field in dataclasses.fields(SamplingParams)}
    properties: dict[str, Any] = {}
    for name in sorted(known_fields(endpoint)):
        if name in _OTHER:
            properties[name] = _OTHER[name]
        elif name == "logprobs" and endpoint == "chat":
            properties[name] = _BOOLEAN
        else:
            properties[name] = pydantic.TypeAdapter(sampling[name]).json_schema()
    operation = _post(summary, properties, required)
    stream = {"text/event-stream": {"schema": _STRING}}
    operation["post"]["responses"]["200"]["content"].update(stream)
    return operation


def _post(summary: str, properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    statuses = {"400": "A field is wrong.", "413": "The body is too large.", "429": "The queue is full."}
    return {"post": {"summary": summary, "requestBody": body, "responses": _responses(statuses)}}


def _get(summary: str, *, parameter: str | None = None, probe: bool = False) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": _responses({}, probe=probe)}
    if parameter is not None:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": _STRING}]
    if probe:
        operation["security"] = []
    return {"get": operation}


def _responses(statuses: dict[str, str], *, probe: bool = False) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    failures = {} if probe else {"401": "An API key is needed.", "404": "No such model.", **statuses}
    answers: dict[str, Any] = {status: {"description": text, "content": content} for status, text in failures.items()}
    answers["200"] = {"description": "The answer.", "content": {"application/json": {"schema": {}}}}
    answers["503"] = {"description": "The engine is draining, stuck or dead."}
    return answers
