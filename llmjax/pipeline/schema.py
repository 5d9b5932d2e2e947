"""What a pipeline file may say: the base of all sections, the field types, and the part of the file that is not a stage.

Stage kinds bring their own section (`stages/`). Values are checked strictly: "8000" is not a number, 1 is not true.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    SecretStr,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from llmjax.pipeline import units
from llmjax.pipeline.tree import KeyPath, PlacedText

__all__ = [
    "DType",
    "Duration",
    "InputPath",
    "OneOrMore",
    "OutputPath",
    "RootSection",
    "RuntimeSection",
    "SecretStr",
    "Section",
    "Share",
    "Size",
    "StageSection",
    "located",
    "section_of",
    "walk_values",
]

STAGE_NAME = r"^[A-Za-z][A-Za-z0-9_-]*$"


class Section(BaseModel):
    """A mapping of the file with known keys. Every field has a description; `explain` and the JSON schema show it.

    `refused` holds keys that people will try and that are left out on purpose, with the reason; `null_is_a_value` those whose
    null is not the same as leaving them out.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)
    refused: ClassVar[Mapping[str, str]] = {}
    null_is_a_value: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        """A null that covered nothing means the default; under a wrong key it stays, and is reported."""
        if isinstance(data, dict):
            kept = cls.null_is_a_value
            return {k: v for k, v in data.items() if v is not None or k in kept or k not in cls.model_fields}
        return data


def located(message: str, *at: str | int) -> PydanticCustomError:
    """An error for a model validator to raise about the value at `at` below its section."""
    return PydanticCustomError("located", "{message}", {"message": message, "at": at})


class InputPath(str):
    """A file or folder that is read. Always absolute: a relative one starts at the folder of the file it was written in.

    `written` is the text as the user wrote it, for messages.
    """

    written: str = ""

    @classmethod
    def _read(cls, value: object) -> InputPath:
        text = _path_text(value)
        base = value.base if isinstance(value, PlacedText) else None
        path = cls(os.path.normpath(os.path.join(base or Path.cwd(), os.path.expanduser(text))))
        path.written = text
        return path

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._read, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


class OutputPath(str):
    """A file or folder that is written. A relative one starts at the working directory."""

    @classmethod
    def _read(cls, value: object) -> OutputPath:
        return cls(os.path.expanduser(_path_text(value)))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._read, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "minLength": 1}


def _path_text(value: object) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("path_type", "expected a path", {"wanted": "a path"})
    if not value or "\0" in value:
        raise ValueError("expected a path, got an empty text" if not value else "a path cannot hold a zero byte")
    return str(value)


_QUANTITY_SCHEMA = r"^\s*([0-9]+(\.[0-9]+)?|\.[0-9]+) ?(%s)\s*$"

Size = Annotated[
    int,
    BeforeValidator(units.parse_size),
    PlainSerializer(units.format_size, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _QUANTITY_SCHEMA % "|".join(units.SIZES), "examples": ["256MiB"]}),
]
Duration = Annotated[
    float,
    BeforeValidator(units.parse_duration),
    PlainSerializer(units.format_duration, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": _QUANTITY_SCHEMA % "|".join(units.DURATIONS), "examples": ["30s"]}),
]
Share = Annotated[
    float,
    BeforeValidator(units.parse_share),
    PlainSerializer(units.format_share, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                {"type": "string", "pattern": _QUANTITY_SCHEMA % "%"},
            ]
        }
    ),
]
DType = Literal["float32", "bfloat16", "float16"]


class _OneOrMore:
    """``Annotated[list[T], OneOrMore]``: a single value is a list of one."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_before_validator_function(_as_list, handler(source))

    def __get_pydantic_json_schema__(self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        many = handler(schema)
        return {"anyOf": [many, many["items"]]}


def _as_list(value: object) -> object:
    return value if isinstance(value, list) or value is None else [value]


OneOrMore = _OneOrMore()


class StageSection(Section):
    """What every stage may say."""

    uses: str | None = Field(None, description="Kind of the stage; by default the stage's own name, if that is a kind.")
    needs: Annotated[list[str], OneOrMore] = Field(
        default_factory=list, description="Earlier stages that must have succeeded first, besides the inputs."
    )
    when: Literal["always", "gpu", "never"] = Field(
        "always", description="On which machines the stage runs: everywhere, only with a GPU, or nowhere (switched off)."
    )


class RuntimeSection(Section):
    """The process that runs the stages."""

    platform: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device to compute on; auto takes a GPU when there is one."
    )
    seed: int | None = Field(
        None, ge=0, le=2**63 - 1, description="For requests without a seed of their own; by default a fresh one for each run."
    )
    memory_fraction: Share | None = Field(
        None, description="Share of the GPU's memory this process may take, e.g. 90%; by default JAX's own setting."
    )
    log: Literal["text", "json"] = Field("text", description="Form of the log on stderr; json is one object a line.")


class RootSection(Section):
    """A pipeline file. `stages` is checked kind by kind elsewhere."""

    refused: ClassVar[Mapping[str, str]] = {
        "extends": "'extends' can only be written in a file; use --overlay on the command line"
    }

    apiVersion: Literal["llmjax/v1"] = Field(description="Version of this format.")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="Name of the pipeline: lower case letters, digits, - and _.")
    vars: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="Values for ${vars.name} anywhere in the file."
    )
    artifacts: OutputPath = Field(
        OutputPath(".llmjax"), description="Folder of the store and the lock, relative to the working directory."
    )
    runtime: RuntimeSection = Field(default_factory=lambda: RuntimeSection.model_validate({}), description="The process.")
    stages: dict[str, Any] = Field(
        min_length=1, description="The stages by name; the order in the file is the order they run in."
    )


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field's annotation holds: itself, in a list, or optional."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, Annotated):
        for part in typing.get_args(annotation):
            if (found := section_of(part)) is not None:
                return found
    return None


def counts(field: pydantic.fields.FieldInfo) -> bool:
    """Whether a field is part of a stage's key: secrets are not, nor fields with ``json_schema_extra={"keyed": False}``."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and extra.get("keyed") is False:
        return False
    return not is_secret(field)


def is_secret(field: pydantic.fields.FieldInfo) -> bool:
    """Whether a field holds a secret, which is never shown."""
    return SecretStr in (field.annotation, *typing.get_args(field.annotation))


def walk_values(section: Section, path: KeyPath = ()) -> Iterator[tuple[KeyPath, pydantic.fields.FieldInfo, Any]]:
    """Every field below `section` that is not a section itself, with its dotted path; lists are gone into."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from walk_values(value, (*path, name))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Section):
                    yield from walk_values(item, (*path, name, index))
                else:
                    yield (*path, name, index), field, item
        else:
            yield (*path, name), field, value


@functools.cache
def from_dataclass(
    source: type, name: str, descriptions: frozenset[tuple[str, str]], leave_out: tuple[str, ...] = ()
) -> type[Section]:
    """A section with the fields of the dataclass `source`, all optional and of any type: the dataclass checks the values.

    It is what keeps the file and the Python API at one truth. `descriptions` are pairs of field and text,
    `leave_out` fields that are not the file's.
    """
    texts = dict(descriptions)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(source):
        if field.name in leave_out:
            continue
        default: Any = None if field.default is dataclasses.MISSING else field.default
        extra: dict[str, Any] = {"type_text": str(field.type)}
        fields[field.name] = (Any, Field(default, description=texts.get(field.name, ""), json_schema_extra=extra))
    made = pydantic.create_model(name, __base__=Section, __doc__=f"The fields of `{source.__name__}`.", **fields)
    made.null_is_a_value = frozenset(field.name for field in dataclasses.fields(source) if "None" in str(field.type))
    return made


def attribute_docs(source: type) -> frozenset[tuple[str, str]]:
    """The `Attributes:` of a class's docstring as pairs of name and text (a line may name several fields)."""
    found: list[tuple[str, str]] = []
    lines = (source.__doc__ or "").partition("Attributes:")[2].splitlines()
    for line in lines:
        head, colon, text = line.strip().partition(": ")
        if colon and all(part.isidentifier() for part in head.split(", ")):
            found += [(part, text) for part in head.split(", ")]
        elif found and line.strip():
            count = len([1 for _, known in found if known == found[-1][1]])
            found[-count:] = [(part, f"{known} {line.strip()}") for part, known in found[-count:]]
    return frozenset(found)


def given(section: Section) -> dict[str, Any]:
    """The fields that the file set, by name."""
    return {name: getattr(section, name) for name in type(section).model_fields if name in section.model_fields_set}
