"""Turns the schema's errors into messages for people: where, what is wrong, and the most likely cure."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import ValidationError

from llmjax.pipeline.schema import Section, is_secret, section_of
from llmjax.pipeline.tree import KeyPath, Node, Problem

# What other engines call it -> the name here.
OTHER_NAMES = {
    "block_size": "page_size",
    "chat_template_path": "chat_template",
    "context_length": "max_context",
    "ctx_size": "max_context",
    "chunked_prefill_size": "prefill_chunk",
    "gpu_memory_utilization": "fraction",
    "max_batch_size": "max_sequences",
    "max_model_len": "max_context",
    "max_new_tokens": "max_tokens",
    "max_num_batched_tokens": "max_tokens_per_step",
    "max_num_seqs": "max_sequences",
    "max_running_requests": "max_sequences",
    "mem_fraction_static": "fraction",
    "model_path": "path",
    "num_scheduler_steps": "decode_steps",
    "version": "apiVersion",
}
# What people write for a value -> its name here.
OTHER_VALUES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "gpu": "cuda",
    "half": "float16",
}

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "path_type": "a path",
}


def shown(value: Any) -> str:
    """A value of the file in a few words."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 60 else f"'{value[:57]}...'"
    return str(value)


def close_to(name: str, choices: Sequence[str]) -> str:
    """ "; did you mean 'x'" or ""."""
    found = difflib.get_close_matches(name, choices, n=1, cutoff=0.6)
    return f"; did you mean '{found[0]}'" if found else ""


def keys_below(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every key of a section and of the sections in it, with the path of the section it is in."""
    for name, field in section.model_fields.items():
        yield path, name
        if (inner := section_of(field.annotation)) is not None:
            yield from keys_below(inner, (*path, name))


def unknown_key(
    name: str,
    section: type[Section],
    where: tuple[str, ...],
    root: type[Section],
    elsewhere: Sequence[tuple[str, type[Section]]] = (),
) -> str:
    """The message for the key `name`, found at `where` below `root`, in `section`.

    `elsewhere` are other parts of the file it may belong to, by name.
    """
    if name in section.refused:
        return section.refused[name]
    own = list(section.model_fields)
    written = name.replace("-", "_")
    if written in own:
        return f"unknown key; write it with underscores: '{written}'"
    for wanted in dict.fromkeys((name, written, OTHER_NAMES.get(written, written))):
        other = "" if wanted in (name, written) else f"'{wanted}' is its name here; "
        if other and wanted in own:
            return f"unknown key; did you mean '{wanted}'"
        places = [place for place, key in keys_below(root) if key == wanted and place != where]
        if places:
            place = min(places, key=lambda p: (_distance(p, where), len(p)))
            under = place[len(where) :] if place[: len(where)] == where else place
            target = f"under '{'.'.join(under)}'" if under else "directly in the stage" if where else "at the top"
            return f"unknown key; {other}it belongs {target}"
        for part, other_section in elsewhere:
            for place, key in keys_below(other_section):
                if key == wanted:
                    return f"unknown key; {other}it belongs under '{'.'.join((part, *place))}'"
    if hint := close_to(written, own):
        return f"unknown key{hint}"
    deeper = {key: place for place, key in keys_below(root)}
    found = difflib.get_close_matches(written, list(deeper), n=1, cutoff=0.8)
    if found:
        return f"unknown key; did you mean '{'.'.join((*deeper[found[0]], found[0]))}'"
    return f"unknown key; known: {', '.join(own)}"


def _distance(one: tuple[str, ...], two: tuple[str, ...]) -> int:
    shared = 0
    for left, right in zip(one, two, strict=False):
        if left != right:
            break
        shared += 1
    return len(one) + len(two) - 2 * shared


def section_at(root: type[Section], path: Sequence[str | int]) -> type[Section]:
    """The section at `path` below `root`, or the deepest on the way."""
    section = root
    for step in path:
        field = section.model_fields.get(step) if isinstance(step, str) else None
        if field is not None:
            section = section_of(field.annotation) or section
    return section


def problems_of(
    error: ValidationError,
    node: Node,
    root: type[Section],
    at: KeyPath = (),
    elsewhere: Sequence[tuple[str, type[Section]]] = (),
) -> list[Problem]:
    """Located problems for a failed validation of `node` (at `at` in the file) against `root`. One a place and cause."""
    found: dict[KeyPath, list[tuple[str, str]]] = {}
    for item in error.errors(include_url=False):
        kind = item["type"]
        context = item.get("ctx", {})
        path = tuple(item["loc"])
        if kind == "located":
            path = (*path, *context["at"])
        elif kind not in ("missing", "extra_forbidden"):
            path = _existing(node, path)  # without the names of union members
        found.setdefault(path, []).append((kind, _message(item, node, path, root, elsewhere)))
    problems: list[Problem] = []
    for path, entries in found.items():
        kinds = [kind for kind, _ in entries]
        target = node.at(path)
        if all(kind in _WANTED for kind in kinds):
            wanted = " or ".join(dict.fromkeys(_WANTED[kind] for kind in kinds))
            field = section_at(root, path[:-1]).model_fields.get(str(path[-1])) if path else None
            got = "something else" if field is not None and is_secret(field) else shown(target.value)
            entries = [(kinds[0], f"expected {wanted}, got {got}{_advice(kinds, target.value)}")]
        for kind, text in entries:
            missing = kind == "missing" or not node.has(path)
            spot = target.key if kind == "extra_forbidden" or missing else target.origin
            problems.append(Problem(spot, (*at, *path), text))
    return problems


def _existing(node: Node, path: KeyPath) -> KeyPath:
    while path and not node.has(path):
        path = path[:-1]
    return path


def _message(item: Any, node: Node, path: KeyPath, root: type[Section], elsewhere: Sequence[tuple[str, type[Section]]]) -> str:
    kind, context = item["type"], item.get("ctx", {})
    value = node.at(path).value
    if kind == "missing":
        return "this key is required"
    if kind == "extra_forbidden":
        section = section_at(root, path[:-1])
        where = tuple(step for step in path[:-1] if isinstance(step, str))
        return unknown_key(str(path[-1]), section, where, root, elsewhere)
    if kind == "located":
        return str(context["message"])
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return _choice(value, field_choices(root, path))
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        words = {"greater_than_equal": "at least", "greater_than": "above", "less_than_equal": "at most", "less_than": "below"}
        return f"must be {words[kind]} {next(iter(context.values())):g}, got {shown(value)}"
    if kind == "string_pattern_mismatch":
        return f"{shown(value)} is not a valid name; use lower case letters, digits, - and _"
    if kind == "too_short":
        return "must not be empty"
    if kind == "finite_number":
        return f"expected a finite number, got {shown(value)}"
    return f"{item['msg']}, got {shown(value)}"


def _advice(kinds: Sequence[str], value: Any) -> str:
    if "string_type" in kinds and isinstance(value, bool | int | float):
        return "; quote it if it is meant as text"
    if "bool_type" in kinds and isinstance(value, str) and value.lower() in ("yes", "on", "no", "off", "y", "n"):
        return f"; YAML 1.2 has only true and false: write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
    if kinds[0] in ("int_type", "float_type") and isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return ""
        return "; write it without quotes"
    return ""


def _choice(value: Any, choices: Sequence[Any]) -> str:
    names = [shown(choice).strip("'") for choice in choices]
    hint = ""
    if isinstance(value, str):
        alias = OTHER_VALUES.get(
            value.removeprefix("torch.").removeprefix("jnp."), value.removeprefix("torch.").removeprefix("jnp.")
        )
        hint = f"; did you mean '{alias}'" if alias in names else close_to(value, names)
    return f"expected one of {', '.join(names)}, got {shown(value)}{hint}"


def field_choices(root: type[Section], path: KeyPath) -> list[Any]:
    """The values of the `Literal` at `path`."""
    field = section_at(root, path[:-1]).model_fields.get(str(path[-1])) if path else None
    return literals(field.annotation) if field is not None else []


def literals(annotation: Any) -> list[Any]:
    """All values of the `Literal`s in an annotation."""
    origin = typing.get_origin(annotation)
    if origin is typing.Literal:
        return list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType, list, Annotated):
        return [value for part in typing.get_args(annotation) for value in literals(part)]
    return []
