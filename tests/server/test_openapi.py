"""The description of the API follows the settings, and no field that is read is left out. What it says is tried in clients/."""

from __future__ import annotations

from typing import Any

import pytest

from llmjax.server.config import ServerConfig
from llmjax.server.openapi import openapi_document
from llmjax.server.protocol import ENDPOINTS, known_fields, values_without_effect

ROUTES_OF_BODIES = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort")


def document(**options: Any) -> dict[str, Any]:
    return openapi_document(ServerConfig(**{"served_names": ("one", "two")} | options))


def body_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    found: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return found


@pytest.mark.parametrize("path", sorted(ENDPOINTS))
def test_every_field_that_is_read_is_described_and_may_be_null(path: str) -> None:
    properties = body_of(document(), path)["properties"]
    assert known_fields(ENDPOINTS[path]) | values_without_effect().keys() | {"best_of"} == properties.keys()
    for name in known_fields(ENDPOINTS[path]) - {"prompt", "messages"}:
        text = repr(properties[name])
        assert properties[name].keys() & {"description", "type", "anyOf"}, name
        assert "null" in text or None in properties[name].get("enum", ()), name


def test_unknown_fields_are_as_the_server_takes_them() -> None:
    assert "additionalProperties" not in body_of(document(), "/v1/completions")
    assert body_of(document(strict=True), "/v1/completions")["additionalProperties"] is False


@pytest.mark.parametrize("path", ROUTES_OF_BODIES)
def test_models_are_those_that_are_served(path: str) -> None:
    assert body_of(document(), path)["properties"]["model"]["enum"] == ["one", "two", None]


def test_keys_are_described_where_there_are_some() -> None:
    without, locked = document(), document(api_keys=("k",))
    assert without["security"] == []
    assert locked["security"] == [{"key": []}]
    for path, item in locked["paths"].items():
        ((_, operation),) = item.items()
        probe = path in ("/livez", "/readyz", "/health")
        assert (operation.get("security") == []) == probe == ("401" not in operation["responses"]), path
        ((_, plain),) = without["paths"][path].items()
        assert "401" not in plain["responses"]


def test_every_reference_leads_somewhere() -> None:
    whole = document(api_keys=("k",))
    stack: list[Any] = [whole]
    found = 0
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if (target := value.get("$ref")) is not None:
                assert target.rpartition("/")[2] in whole["components"]["schemas"], target
                found += 1
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    assert found > 20
