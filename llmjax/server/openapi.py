"""`/openapi.json`: the routes, who may use them, what they answer. The bodies are in `openapi_schemas.py`."""

from __future__ import annotations

from typing import Any

from llmjax.server.config import ServerConfig
from llmjax.server.openapi_schemas import (
    BOOLEAN,
    IDS,
    INTEGER,
    OBJECT,
    STRING,
    Schema,
    components,
    model_name,
    optional,
    record,
    ref,
    request_schema,
)
from llmjax.server.protocol import Endpoint
from llmjax.version import __version__

_HEADERS: dict[str, Schema] = {
    "x-request-id": {"description": "The id of this exchange: the one that was sent, if it could be taken.", "schema": STRING},
    "retry-after": {"description": "Seconds to wait before trying again.", "schema": STRING},
    "x-llmjax-warning": {"description": "Fields of the body that were ignored.", "schema": STRING},
    "www-authenticate": {"description": "How to send a key.", "schema": STRING},
}
_READING = {
    "400": "The body is no JSON object, or a field is wrong; `param` names it.",
    "404": "No such model.",
    "408": "The body did not come in time.",
    "413": "The body is too large.",
    "415": "The body is compressed.",
}
_RETRIED = ("429", "503")
_STREAM = (
    "With `stream: true`: events `data: {chunk}`, then `data: [DONE]`. A chunk is a {chunk_name}; what goes wrong after the "
    "first is an event with an Error. Lines that begin with a colon are comments, sent while nothing else is."
)


def openapi_document(config: ServerConfig) -> dict[str, Any]:
    """The document, OpenAPI 3.1, of a server with these settings."""
    model = {"model": model_name(config.served_names)}
    template = {"add_generation_prompt": optional(BOOLEAN), "chat_template_kwargs": optional(OBJECT)}
    tokenize = {
        **model,
        "prompt": optional(STRING),
        "messages": optional({"type": "array", "items": ref("Message"), "minItems": 1}),
        "add_special_tokens": optional(BOOLEAN),
        "return_token_strs": optional(BOOLEAN),
        "tools": optional({"type": "array", "items": OBJECT}),
        **template,
    }
    tokens = {
        "tokens": IDS, "count": INTEGER, "max_model_len": INTEGER, "token_strs": {"type": "array", "items": STRING}
    }  # fmt: skip
    abort = {**model, "request_id": optional(STRING), "abort_all": optional(BOOLEAN)}
    health = {"200": ("It is so.", ref("Health")), "503": ("It is not.", ref("Health"))}
    paths = {
        "/v1/completions": _generates("Complete a prompt.", "completions", config),
        "/v1/chat/completions": _generates("Answer a conversation.", "chat", config),
        "/tokenize": _post(
            "Token ids of a text or a conversation.",
            {**record(tokenize, required=()), "oneOf": [_has("prompt", STRING), _has("messages", {"type": "array"})]},
            record(tokens, required=("tokens", "count", "max_model_len")),
        ),
        "/detokenize": _post(
            "The text of token ids.", record({**model, "tokens": IDS}, required=("tokens",)), record({"prompt": STRING})
        ),
        "/abort": _post(
            "End answers under way: the one of an id, or all.",
            {**record(abort, required=()), "anyOf": [_has("request_id", STRING), _has("abort_all", {"const": True})]},
            record({"aborted": INTEGER}),
        ),
        "/v1/models": _get("The models served here.", {"200": ("The answer.", ref("Models"))}),
        "/v1/models/{id}": _get(
            "One of them.", {"200": ("The answer.", ref("Model")), "404": (_READING["404"], ref("Error"))}, parameter="id"
        ),
        "/livez": _get("Whether the process should live on.", health, probe=True),
        "/readyz": _get("Whether requests are taken.", health, probe=True),
        "/health": _get("The same as `/readyz`.", health, probe=True),
        "/metrics": _get("Prometheus metrics.", {"200": ("The answer.", STRING)}, form="text/plain"),
        "/memory": _get(
            "Where the engine's memory is: page by page, and on the device by purpose.",
            {"200": ("The answer.", OBJECT), "503": (_FAILURES["503"], ref("Error"))},
        ),
        "/version": _get("The version of llmjax.", {"200": ("The answer.", record({"version": STRING}))}),
        "/openapi.json": _get("This document.", {"200": ("The answer.", OBJECT)}),
    }
    key = {"key": {"type": "http", "scheme": "bearer", "description": "Needed by every route but the probes."}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmjax",
            "version": __version__,
            "description": "OpenAI's API for one model. Every error is OpenAI's error object.",
        },
        "paths": paths if config.api_keys else {path: _open(item) for path, item in paths.items()},
        "components": {"schemas": components(), **({"securitySchemes": key} if config.api_keys else {})},
        "security": [{"key": []}] if config.api_keys else [],
    }


def _open(item: dict[str, Any]) -> dict[str, Any]:
    """The same without the answer to a wrong key."""
    for operation in item.values():
        operation["responses"].pop("401", None)
    return item


def _has(name: str, schema: Schema) -> Schema:
    return {"required": [name], "properties": {name: schema}}


def _generates(summary: str, endpoint: Endpoint, config: ServerConfig) -> dict[str, Any]:
    name = "ChatCompletion" if endpoint == "chat" else "Completion"
    item = _post(summary, request_schema(endpoint, config.served_names, strict=config.strict), ref(name))
    operation = item["post"]
    responses = operation["responses"]
    operation["description"] = _STREAM.replace("{chunk_name}", f"{name}Chunk")
    responses["200"]["content"]["text/event-stream"] = {"schema": STRING, "x-event-schema": ref(f"{name}Chunk")}
    responses["200"]["headers"]["x-llmjax-warning"] = _HEADERS["x-llmjax-warning"]
    responses["429"] = _response("The queue is full.", ref("Error"), retry=True)
    return item


def _post(summary: str, body: Schema, answer: Schema) -> dict[str, Any]:
    responses = {"200": _response("The answer.", answer)}
    responses |= {status: _response(text, ref("Error")) for status, text in {**_READING, **_FAILURES}.items()}
    request = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": {"summary": summary, "requestBody": request, "responses": responses}}


_FAILURES = {
    "401": "A valid API key is needed.",
    "500": "A bug of the server; its log says more.",
    "503": "The engine is draining, stuck or dead.",
}


def _get(
    summary: str,
    answers: dict[str, tuple[str, Schema]],
    *,
    parameter: str | None = None,
    probe: bool = False,
    form: str = "application/json",
) -> dict[str, Any]:
    responses = {status: _response(text, schema, form=form, retry=status == "503") for status, (text, schema) in answers.items()}
    if not probe:
        responses |= {status: _response(_FAILURES[status], ref("Error")) for status in ("401", "500")}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if parameter is not None:
        name = {"name": parameter, "in": "path", "required": True, "schema": {**STRING, "minLength": 1}}
        operation["parameters"] = [name]
    if probe:
        operation["security"] = []
    return {"get": operation}


def _response(text: str, schema: Schema, *, form: str = "application/json", retry: bool = False) -> dict[str, Any]:
    headers = {"x-request-id": _HEADERS["x-request-id"]}
    if retry:
        headers["retry-after"] = _HEADERS["retry-after"]
    return {"description": text, "headers": headers, "content": {form: {"schema": schema}}}
