"""The grammar of an output that calls tools, in llguidance's Lark syntax, with the JSON schemas of the arguments inside.

It writes calls as the models' chat templates do: the members in their order, a space after commas and colons, no other white
space. Text in, text out: knows neither the tokenizer nor the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llmjax.server.tool_calls import ToolUse

_WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A schema with one of these may allow members that `properties` does not list.
_OPEN = frozenset(
    ("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames", "dependentSchemas",
     "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef")
)  # fmt: skip

_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$comment"))  # for the prompt, where they stand anyway
_SCHEMAS = frozenset(
    ("items", "prefixItems", "additionalItems", "contains", "additionalProperties", "unevaluatedProperties", "unevaluatedItems",
     "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else")
)  # fmt: skip
_NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))


def call_grammar(use: ToolUse, tokens: Mapping[str, int]) -> str:
    """The grammar for an output: nothing but calls where one is required, else text with any number of calls.

    In text the arguments of strict functions keep to their schemas; of others they are any object. A required call keeps to its
    schema in any case, except that keywords which cannot be enforced are ignored unless the function is strict.

    Args:
        use: its `form` is known, and has a beginning mark where no call is required.
        tokens: marks that are one token of the model, and its id.
    """
    form = use.form
    assert form is not None
    lines: list[str] = []
    if use.required:
        several = f" ({_text(form.between)} call)*" if use.parallel else ""
        lines.append(f"start: call{several}")
        begin, end = ("", "") if form.bare else (f'{_mark(form.begin, tokens)} "\\n" ', f' "\\n" {_mark(form.end, tokens)}')
    else:
        assert not form.bare
        lines += [f"start: (head call){'*' if use.parallel else '?'} TEXT", "TEXT: /(?s:.*)/"]
        # A special token cannot be within a terminal, and a text cannot be a special token.
        lines.append(
            f"head: TEXT {_mark(form.begin, tokens)}" if form.begin in tokens else f"head[lazy]: TEXT {_text(form.begin)}"
        )
        begin, end = '"\\n" ', f' "\\n" {_mark(form.end, tokens)}'
    functions = use.callable
    lines.append(f"call: {begin}({' | '.join(f'call{index}' for index in range(len(functions)))}){end}")
    for index, (name, parameters) in enumerate(functions.items()):
        schema = _schema(parameters, strict=name in use.strict) if use.required or name in use.strict else _ANY
        head = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '
        lines.append(f'call{index}: {_text(head)} arguments{index} "}}"')
        lines.append(f"arguments{index}: %json {json.dumps(schema)}")
    return "\n".join(lines)


_ANY = {"type": "object", "x-guidance": _WHITESPACE}


def _schema(parameters: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """The schema with the library's options. Members that a plain list of properties does not name are not allowed: whoever is
    called would not know them."""
    schema: dict[str, Any] = _without_annotations(parameters)
    schema |= {"type": "object", "x-guidance": {**_WHITESPACE, "lenient": not strict}}
    if not _OPEN & schema.keys():
        schema["additionalProperties"] = False
    return schema


def _without_annotations(schema: Any) -> Any:
    """A schema that allows the same in fewer characters. What is no schema is left as it is: a property may have any name."""
    if isinstance(schema, list):
        return [_without_annotations(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = dict[str, Any]()
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            kept[key] = {name: _without_annotations(item) for name, item in value.items()}
        elif key not in _ANNOTATIONS:
            kept[key] = _without_annotations(value) if key in _SCHEMAS else value
    return kept


def _mark(mark: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[mark]}]>" if mark in tokens else _text(mark)


def _text(text: str) -> str:
    return json.dumps(text)
