"""The fields of a body that ask for an output of some form: OpenAI's `response_format`, and vLLM's two ways. Host only.

Owns their names and shapes. What each form may hold is checked by `StructuredOutput`, and by the engine when it compiles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmjax.errors import RequestError
from llmjax.server.strict_json import kind, printable
from llmjax.structured_output import StructuredOutput

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}
NAMES = frozenset({"response_format", "structured_outputs", *_GUIDED})


def read_structured(fields: Mapping[str, Any]) -> StructuredOutput | None:
    """The form that a body asks for, None when it asks for none. Raises `RequestError` naming the field."""
    wanted = [form for name in sorted(NAMES & fields.keys()) if (form := _read(name, fields[name])) is not None]
    if len(wanted) > 1:
        raise RequestError(f"{wanted[0].field} and {wanted[1].field} both ask for a form: give one of them", wanted[1].field)
    return wanted[0] if wanted else None


def _read(name: str, value: Any) -> StructuredOutput | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return StructuredOutput(**{_GUIDED[name]: value}, field=name)


def _response_format(value: Any) -> StructuredOutput | None:
    name = "response_format"
    _object(name, value)
    form = value.get("type")
    if form not in ("text", "json_object", "json_schema"):
        raise RequestError(f"{name}.type must be text, json_object or json_schema, got {printable(repr(form))}", name)
    _known(name, value, ("type", "json_schema") if form == "json_schema" else ("type",))
    if form == "text":
        return None
    if form == "json_object":
        return StructuredOutput(json_object=True, field=name)
    schema = value.get("json_schema")
    where = f"{name}.json_schema"
    _object(where, schema)
    _known(where, schema, ("name", "description", "schema", "strict"))
    for text in ("name", "description"):
        if not isinstance(schema.get(text), str | None):
            raise RequestError(f"{where}.{text} must be a string, got {kind(schema[text])}", name)
    if not isinstance(schema.get("strict"), bool | None):
        raise RequestError(f"{where}.strict must be true or false, got {kind(schema['strict'])}", name)
    _object(f"{where}.schema", schema.get("schema"))
    # Only who says that it need not be strict has keywords ignored that cannot be enforced.
    return StructuredOutput(json_schema=schema["schema"], lenient=schema.get("strict") is False, field=name)


def _structured_outputs(value: Any) -> StructuredOutput:
    name = "structured_outputs"
    _object(name, value)
    _known(name, value, (*_STRUCTURED, "disable_any_whitespace"))
    compact = value.get("disable_any_whitespace")
    if not isinstance(compact, bool | None):
        raise RequestError(f"{name}.disable_any_whitespace must be true or false, got {kind(compact)}", name)
    forms = {ours: value[theirs] for theirs, ours in _STRUCTURED.items() if value.get(theirs) is not None}
    return StructuredOutput(**forms, any_whitespace=not compact, field=name)


def _object(where: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object, got {kind(value)}", where.split(".")[0])


def _known(where: str, value: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in value:
        if name not in names:
            known = ", ".join(names)
            raise RequestError(f"unknown field {printable(name)!r} in {where}: it takes {known}", where.split(".")[0])
