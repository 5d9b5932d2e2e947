"""What the keys mean: `explain KEY` and the JSON Schema for editors, both from the fields' own descriptions."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Annotated, Any

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from llmjax.pipeline import units
from llmjax.pipeline.diagnose import close_to
from llmjax.pipeline.schema import InputPath, OutputPath, RootSection, Section, section_of
from llmjax.pipeline.stages import get_kind, kind_names
from llmjax.pipeline.tree import ConfigErrors, split_path

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_UNITS = {
    units.parse_size: "size (256MiB)",
    units.parse_duration: "duration (30s)",
    units.parse_share: "share (90% or 0.9)",
}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What is known of a key.

    Attributes:
        key: as asked, without `stages.`.
        type: in words.
        default: as YAML writes it; "required" or "none".
        doc: a sentence.
        children: keys below, each with its doc.
    """

    key: str
    type: str
    default: str
    doc: str
    children: tuple[tuple[str, str], ...] = ()

    def text(self) -> str:
        """For people, several lines."""
        lines = [self.key, f"  {self.doc}", f"  type: {self.type}", f"  default: {self.default}"]
        width = max((len(name) for name, _ in self.children), default=0)
        return "\n".join([*lines, *(f"    {name:<{width}}  {doc}" for name, doc in self.children)])


def explain(key: str) -> Explanation:
    """Explains ``engine``, ``engine.kv_cache.memory``, ``runtime.seed``, ``name``. Raises `ConfigErrors`."""
    try:
        path = list(split_path(key))
    except ValueError as error:
        raise ConfigErrors([str(error)]) from None
    if path[0] == "stages" and len(path) > 1:
        path = path[1:]
    kind = get_kind(path[0])
    if kind is not None:
        section: type[Section] = kind.section
        if len(path) == 1:
            doc = _first_line(section)
            takes = ", ".join(dict.fromkeys(wanted.gives for wanted in kind.inputs)) or "nothing"
            return Explanation(path[0], f"stage; takes {takes}, gives {kind.gives}", "none", doc, _children(section))
        done, rest = [path[0]], path[1:]
    else:
        section, done, rest = RootSection, [], path
    while True:
        name, rest = rest[0], rest[1:]
        field = section.model_fields.get(name)
        if field is None:
            choices = [*section.model_fields, *(kind_names() if not done else [])]
            where = f"'{'.'.join(done)}' has no key '{name}'" if done else f"there is no key '{name}'"
            raise ConfigErrors([f"{where}{close_to(name.replace('-', '_'), choices) or '; known: ' + ', '.join(choices)}"])
        done.append(name)
        inner = section_of(field.annotation)
        if not rest:
            below = _children(inner) if inner is not None else ()
            return Explanation(".".join(done), type_text(field), default_text(field), field.description or "", below)
        if inner is None:
            raise ConfigErrors([f"'{'.'.join(done)}' has no keys of its own"])
        section = inner


def type_text(field: FieldInfo) -> str:
    """The type of a field in words."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "type_text" in extra:
        return str(extra["type_text"])
    for part in field.metadata:
        if getattr(part, "func", None) in _UNITS:
            return _UNITS[part.func]
    return _type(field.annotation)


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        for part in parts[1:]:
            if getattr(part, "func", None) in _UNITS:
                return _UNITS[part.func]
        return _type(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in parts if part is not type(None)))
    if origin is typing.Literal:
        return " or ".join(_yaml(value) for value in parts)
    if origin is list:
        return f"list of {_type(parts[0])}"
    if origin is dict:
        return f"mapping of name to {_type(parts[1])}"
    if annotation is InputPath:
        return "path of an input (relative to the file it is written in)"
    if annotation is OutputPath:
        return "path of an output (relative to the working directory)"
    if annotation is SecretStr:
        return "secret"
    if section_of(annotation) is not None:
        return "mapping"
    return _WORDS.get(annotation, "anything")


def default_text(field: FieldInfo) -> str:
    """The default of a field as YAML writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True) if field.default_factory is not None else field.default
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, Section):
        return "{}"
    return _yaml(value)


def _yaml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "[]" if value == [] else "{}" if value == {} else str(value)


def _children(section: type[Section]) -> tuple[tuple[str, str], ...]:
    return tuple((name, field.description or "") for name, field in section.model_fields.items())


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a pipeline file. Every value may also be `${…}` text or null, which the file format allows."""
    from pydantic.json_schema import models_json_schema

    kinds = {name: kind for name in kind_names() if (kind := get_kind(name)) is not None}
    models: list[tuple[type[Section], typing.Literal["validation"]]] = [(RootSection, "validation")]
    models += [(kind.section, "validation") for kind in kinds.values()]
    refs, schema = models_json_schema(models, ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = schema["$defs"]
    for definition in definitions.values():
        _allow_overrides(definition)
    root = definitions.pop("RootSection")
    sections = {name: refs[(kind.section, "validation")] for name, kind in kinds.items()}
    chosen = [
        {"if": {"properties": {"uses": {"const": name}}, "required": ["uses"]}, "then": ref} for name, ref in sections.items()
    ]
    uses = {"anyOf": [{"enum": list(sections)}, {"$ref": "#/$defs/Override"}]}
    definitions["Stage"] = {"type": ["object", "null"], "properties": {"uses": uses}, "allOf": chosen}
    definitions["Override"] = {"anyOf": [{"type": "string", "pattern": r"\$\{"}, {"type": "null"}]}
    named = {
        name: {
            "if": {"type": "object", "required": ["uses"]},
            "then": {"$ref": "#/$defs/Stage"},
            "else": {"if": {"type": "object"}, "then": ref, "else": {"type": "null"}},
        }
        for name, ref in sections.items()
    }
    root["properties"]["stages"] = {
        "description": root["properties"]["stages"].get("description", ""),
        "type": "object",
        "properties": named,
        "additionalProperties": {"$ref": "#/$defs/Stage"},
    }
    paths = {"type": "string", "minLength": 1}
    root["properties"]["extends"] = {
        "description": "Files this one builds on, relative to it; later ones win, and this file wins over all.",
        "anyOf": [paths, {"type": "array", "items": paths}],
    }
    root["required"] = ["apiVersion"]
    return {"$schema": _DIALECT, "title": "llmjax pipeline", **root, "$defs": dict(sorted(definitions.items()))}


def _allow_overrides(definition: dict[str, Any]) -> None:
    """Editors must not mark `${env:PORT}` where a number is expected, nor null, which takes the default."""
    for name, value in definition.get("properties", {}).items():
        kept = {key: value.pop(key) for key in ("description", "title", "default") if key in value}
        kept.pop("title", None)
        definition["properties"][name] = {
            **kept,
            "anyOf": [*value.pop("anyOf", [value] if value else []), {"$ref": "#/$defs/Override"}],
        }
        if not value and definition["properties"][name]["anyOf"] == [{"$ref": "#/$defs/Override"}]:
            definition["properties"][name] = kept
    definition.pop("title", None)
    definition.pop("required", None)  # what is missing here may be in the file that is extended
