"""The configuration tree: values that remember where they were written. Knows neither YAML nor the schema.

Every layer (a file, an overlay, a ``--set``) becomes a tree of `Node`; `merge` lays one over the other, so that the winning
place of each value survives to error messages, `config show --origin` and the meaning of relative paths.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmjax.errors import ConfigError

Scalar = str | int | float | bool | None
KeyPath = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value was written.

    Attributes:
        source: a file as the user named it, ``--set a.b`` or ``command line``.
        line, column: from 1; 0 when the source has no lines.
        base: folder that a relative input path written here starts from; None is the working directory.
        rank: order of the source among all that were read, so that messages come in reading order.
    """

    source: str
    line: int = 0
    column: int = 0
    base: Path | None = None
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclasses.dataclass
class Node:
    """One value: a mapping of nodes, a list of nodes, or a scalar.

    Attributes:
        origin: where the value starts.
        key: where its key starts (the same as `origin` in lists and at the top).
        filled: something was put in by `${...}`.
        reread: then, what YAML would make of the text without quotes. A field that wants a number takes this one, a field
            that wants text takes the text, so that a password of digits stays a password.
        unset: names of environment variables that the value needs and that are not set.
    """

    value: dict[str, Node] | list[Node] | Scalar
    origin: Origin
    key: Origin
    filled: bool = False
    reread: Scalar = None
    unset: tuple[str, ...] = ()

    def mapping(self) -> dict[str, Node]:
        """The children by key; empty for anything that is not a mapping."""
        return self.value if isinstance(self.value, dict) else {}

    def at(self, path: Sequence[str | int]) -> Node:
        """The node at `path`, or its deepest ancestor that exists."""
        node = self
        for step in path:
            child = node._child(step)
            if child is None:
                break
            node = child
        return node

    def has(self, path: Sequence[str | int]) -> bool:
        """Whether there is a node at `path`."""
        node: Node | None = self
        for step in path:
            node = node._child(step) if node is not None else None
        return node is not None

    def _child(self, step: str | int) -> Node | None:
        if isinstance(self.value, dict):
            return self.value.get(step) if isinstance(step, str) else None
        if isinstance(self.value, list) and isinstance(step, int) and 0 <= step < len(self.value):
            return self.value[step]
        return None

    def walk(self, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
        """This node and all below it, parents first."""
        yield path, self
        if isinstance(self.value, dict):
            for name, child in self.value.items():
                yield from child.walk((*path, name))
        elif isinstance(self.value, list):
            for index, child in enumerate(self.value):
                yield from child.walk((*path, index))


class PlacedText(str):
    """A string that knows the folder its author meant: what the schema's path fields resolve against."""

    base: Path | None = None

    @classmethod
    def of(cls, text: str, base: Path | None) -> PlacedText:
        """`text`, written in a file of folder `base` (None: the working directory)."""
        placed = cls(text)
        placed.base = base
        return placed


@dataclasses.dataclass(frozen=True)
class Problem:
    """One mistake: where, on which value, and what to do about it."""

    origin: Origin
    path: KeyPath
    message: str

    def __str__(self) -> str:
        where = f"{self.origin}: "
        name = dotted(self.path)
        if not name or self.origin.source == f"--set {name}":
            return where + self.message
        return f"{where}{name}: {self.message}"


class ConfigErrors(ConfigError):
    """All mistakes of a pipeline at once. `messages` has one line each, in reading order."""

    def __init__(self, messages: Sequence[str]) -> None:
        super().__init__("\n".join(messages))
        self.messages = tuple(messages)

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> ConfigErrors:
        """From located problems, sorted by place; repeated ones are told once."""
        ordered = sorted(problems, key=lambda p: (p.origin.rank, p.origin.line, p.origin.column))
        return cls(list(dict.fromkeys(str(p) for p in ordered)))


def dotted(path: Sequence[str | int]) -> str:
    """`path` as people write it: ``stages.gate.limits[0].metric``."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = step if re.fullmatch(r"[^\s.\"\[\]]+", step) else f'"{step}"'
            text += f".{name}" if text else name
    return text


def split_path(text: str) -> tuple[str, ...]:
    """The keys of ``a.b."c.d"``. Raises `ValueError` for an empty one or an open quote."""
    keys: list[str] = []
    position = 0
    while True:
        match = re.compile(r'"((?:[^"\\]|\\.)*)"|([^."]+)').match(text, position)
        if match is None:
            raise ValueError(f"'{text}' is not a path of keys such as stages.engine.max_context")
        keys.append(re.sub(r"\\(.)", r"\1", match[1]) if match[1] is not None else match[2].strip())
        position = match.end()
        if position == len(text):
            return tuple(keys)
        if text[position] != ".":
            raise ValueError(f"'{text}' is not a path of keys such as stages.engine.max_context")
        position += 1


def nest(path: Sequence[str], leaf: Node) -> Node:
    """A tree that holds only `leaf`, at `path`."""
    node = leaf
    for name in reversed(path):
        node = Node({name: node}, leaf.origin, leaf.origin)
    return node


def from_value(value: Any, origin: Origin) -> Node:
    """A tree from Python values (command line flags). Strings are taken as they are, `${` in them included."""
    if isinstance(value, Mapping):
        return Node({str(key): from_value(item, origin) for key, item in value.items()}, origin, origin)
    if isinstance(value, list | tuple):
        return Node([from_value(item, origin) for item in value], origin, origin)
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        value = value.replace("${", "$${")
    if value is not None and not isinstance(value, str | int | float | bool):
        raise TypeError(f"{origin}: a pipeline value cannot be a {type(value).__name__}")
    return Node(value, origin, origin)


def merge(low: Node, high: Node) -> Node:
    """`high` over `low`: mappings key by key and at any depth, anything else replaces, null deletes what it covers.

    A key keeps the place it has in `low`; new ones follow. A null with nothing below it stays, so that a wrong key is noticed.
    """
    if not isinstance(low.value, dict) or not isinstance(high.value, dict):
        return high
    merged = dict(low.value)
    for name, node in high.value.items():
        if name not in merged:
            merged[name] = node
        elif node.value is None and merged[name].value is not None:
            del merged[name]
        else:
            merged[name] = merge(merged[name], node)
    return Node(merged, low.origin if low.value else high.origin, low.key if low.value else high.key)
