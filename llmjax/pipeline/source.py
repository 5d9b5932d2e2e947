"""Reading YAML 1.2 with the line and column of every key and value, and layering files. Knows nothing of the schema.

ruamel.yaml gives the events; values are made here by YAML 1.2's core schema alone, because ruamel keeps parts of YAML 1.1
(timestamps, ``1_000``, ``0b1``, merge keys). So ``no``, ``on``, ``12:30`` and dates are strings, ``010`` is ten and
``1e-5`` is a float.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, MappingStartEvent, ScalarEvent, SequenceStartEvent
from ruamel.yaml.reader import ReaderError

from llmjax.pipeline.interpolate import interpolate_text
from llmjax.pipeline.tree import ConfigErrors, Node, Origin, Problem, Scalar, from_value, merge, nest, split_path

API_VERSION = "llmjax/v1"
MAX_DEPTH = 64
MAX_NODES = 100_000

# YAML 1.2.2, chapter 10.3.2, core schema.
_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = re.compile(r"\.(nan|NaN|NAN)")
_TAG = "tag:yaml.org,2002:"
_TAGGED: Mapping[str, type] = {"int": int, "float": float, "bool": bool, "null": type(None)}


def plain_scalar(text: str) -> Scalar:
    """What an unquoted scalar means in YAML 1.2's core schema."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text):
        return True
    if _FALSE.fullmatch(text):
        return False
    if len(text) <= 300:  # Python refuses to read integers of thousands of digits
        if _INT.fullmatch(text):
            return int(text, 10)
        if _OCTAL.fullmatch(text):
            return int(text[2:], 8)
        if _HEX.fullmatch(text):
            return int(text[2:], 16)
        if _FLOAT.fullmatch(text):
            return float(text)
    if _INFINITE.fullmatch(text):
        return float("-inf") if text.startswith("-") else float("inf")
    if _NAN.fullmatch(text):
        return float("nan")
    return text


@dataclasses.dataclass(frozen=True)
class Sources:
    """All layers of a pipeline, merged; before `${...}` is put in.

    Attributes:
        tree: the merged tree.
        problems: mistakes that did not stop the reading (duplicate keys and the like).
        path: the main file.
    """

    tree: Node
    problems: tuple[Problem, ...]
    path: Path


class _Builder:
    """Turns the events of one document into nodes. One use."""

    def __init__(self, text: str, origin: Origin) -> None:
        yaml = YAML(typ="safe", pure=True)
        self.origin = origin
        self.problems: list[Problem] = []
        self._events = iter(yaml.parse(text))
        self._anchors: dict[str, Node | None] = {}
        self._depth = 0
        self._count = 0

    def document(self) -> Node | None:
        """The only document; None when there is none. Raises `ConfigErrors` for broken syntax."""
        try:
            next(self._events)  # stream start
            event = next(self._events)
            if not hasattr(event, "explicit"):
                return None
            node = self._node(next(self._events))
            next(self._events)  # document end
            after = next(self._events)
            if hasattr(after, "explicit"):
                raise self._error(after.start_mark, "a second document starts here; a pipeline is one YAML document")
            return node
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            text = " ".join(part for part in (error.context, error.problem) if part)
            raise self._error(mark, f"not valid YAML: {' '.join(text.split())}") from None
        except ReaderError as error:
            raise self._error(None, f"not valid YAML: character {error.character!r} is not allowed") from None
        except YAMLError as error:
            raise self._error(None, f"not valid YAML: {' '.join(str(error).split())}") from None

    def _at(self, mark: Any) -> Origin:
        if mark is None or self.origin.line < 0:
            return dataclasses.replace(self.origin, line=0)
        return dataclasses.replace(self.origin, line=mark.line + 1, column=mark.column + 1)

    def _error(self, mark: Any, message: str) -> ConfigErrors:
        return ConfigErrors([*map(str, self.problems), str(Problem(self._at(mark), (), message))])

    def _problem(self, mark: Any, message: str) -> None:
        self.problems.append(Problem(self._at(mark), (), message))

    def _node(self, event: Any) -> Node:
        self._count += 1
        if self._count > MAX_NODES:
            raise self._error(event.start_mark, f"more than {MAX_NODES} values")
        if isinstance(event, AliasEvent):
            return self._alias(event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(event.start_mark, f"nested more than {MAX_DEPTH} levels deep")
        if event.anchor is not None:
            self._anchors[event.anchor] = None  # not to be used before it is complete
        if isinstance(event, ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, SequenceStartEvent):
            node = self._sequence(event)
        else:
            assert isinstance(event, MappingStartEvent)
            node = self._mapping(event)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._depth -= 1
        return node

    def _alias(self, event: Any) -> Node:
        target = self._anchors.get(event.anchor)
        if target is None:
            why = "contains itself" if event.anchor in self._anchors else "is not defined above"
            quote = "" if event.anchor in self._anchors else "; quote the value if the '*' is part of it"
            raise self._error(event.start_mark, f"the anchor '{event.anchor}' {why}{quote}")
        self._count += sum(1 for _ in target.walk())
        if self._count > MAX_NODES:  # aliases of aliases grow fast
            raise self._error(event.start_mark, f"more than {MAX_NODES} values")
        at = self._at(event.start_mark)
        return dataclasses.replace(target, key=at)

    def _scalar(self, event: Any) -> Node:
        at = self._at(event.start_mark)
        tag = str(event.ctag)
        plain = event.style is None or event.style == ""
        value: Scalar = event.value
        if tag == "None":
            value = plain_scalar(event.value) if plain else event.value
        elif tag.removeprefix(_TAG) in _TAGGED:
            name = tag.removeprefix(_TAG)
            value = plain_scalar(event.value)
            if name == "float" and type(value) is int:
                value = float(value)
            if type(value) is not _TAGGED[name]:
                self._problem(event.start_mark, f"'{event.value}' does not fit its tag !!{name}")
        elif tag not in (f"{_TAG}str", "!"):
            self._problem(event.start_mark, f"the tag {tag} is not supported; write a plain value")
        return Node(value, at, at)

    def _collection_tag(self, event: Any, tag: str) -> None:
        written = str(event.ctag)
        if written not in ("None", "!", f"{_TAG}{tag}"):
            self._problem(event.start_mark, f"the tag {written} is not supported; write a plain value")

    def _sequence(self, event: Any) -> Node:
        self._collection_tag(event, "seq")
        items: list[Node] = []
        while not _is_end(inner := next(self._events)):
            items.append(self._node(inner))
        at = self._at(event.start_mark)
        return Node(items, at, at)

    def _mapping(self, event: Any) -> Node:
        self._collection_tag(event, "map")
        items: dict[str, Node] = {}
        while not _is_end(key := next(self._events)):
            name_node = self._node(key)
            value = self._node(next(self._events))
            mark = key.start_mark
            if isinstance(name_node.value, dict | list):
                self._problem(mark, "a key must be a plain word, not a mapping or a list")
                continue
            name = key.value if isinstance(key, ScalarEvent) else str(name_node.value)
            if name == "<<":
                self._problem(mark, "merge keys (<<) are YAML 1.1; write the keys out, or use 'extends'")
            elif name in items:
                self._problem(mark, f"the key '{name}' is there twice; the first is at {items[name].key}")
            else:
                items[name] = dataclasses.replace(value, key=self._at(mark))
        at = self._at(event.start_mark)
        return Node(items, at, at)


def _is_end(event: Any) -> bool:
    return type(event).__name__ in ("SequenceEndEvent", "MappingEndEvent")


def parse(text: str, origin: Origin) -> tuple[Node | None, list[Problem]]:
    """The tree of one YAML document and the mistakes found on the way. `ConfigErrors` for broken syntax.

    `origin.line` of -1 says that the source has no lines worth telling (`--set`).
    """
    builder = _Builder(text, origin)
    node = builder.document()
    return node, builder.problems


def read_file(path: Path, shown: str, rank: int) -> tuple[Node, list[Problem]]:
    """The mapping in a YAML file. `shown` is the name for messages. One clear `ConfigErrors` for a file that cannot be one."""
    try:
        raw = path.read_bytes()
    except IsADirectoryError:
        raise ConfigErrors([f"{shown}: is a folder; name a YAML file"]) from None
    except FileNotFoundError:
        raise ConfigErrors([f"{shown}: no such file"]) from None
    except OSError as error:
        raise ConfigErrors([f"{shown}: cannot be read: {error.strerror or error}"]) from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigErrors([f"{shown}: is not UTF-8 (byte {raw[error.start]:#04x} in line {line}); save it as UTF-8"]) from None
    origin = Origin(shown, 0, 0, Path(os.path.abspath(path)).parent, rank)
    node, problems = parse(text, origin)
    if node is None or node.value is None:
        raise ConfigErrors([f"{shown}: is empty; a pipeline starts with 'apiVersion: {API_VERSION}'"])
    if not isinstance(node.value, dict):
        what = "a list" if isinstance(node.value, list) else "a single value"
        raise ConfigErrors([f"{node.origin}: the file holds {what}; a pipeline is a mapping with apiVersion, name and stages"])
    return node, problems


class _Layers:
    """Reads files and what they extend. One use."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.problems: list[Problem] = []
        self.rank = 0

    def file(self, path: Path, shown: str, chain: tuple[tuple[Path, str], ...]) -> Node:
        here = path.resolve()
        names = [name for _, name in chain]
        if here in [seen for seen, _ in chain]:
            raise ConfigErrors([f"{names[-1]}: 'extends' goes in a circle: {' -> '.join([*names, shown])}"])
        self.rank += 1
        node, problems = read_file(path, shown, self.rank)
        self.problems += problems
        children = dict(node.mapping())
        self.check_version(children.get("apiVersion"))
        extends = children.pop("extends", None)
        node = dataclasses.replace(node, value=children)
        low: Node | None = None
        for parent in self._parents(extends):
            located = self._locate(parent, shown)
            if located is None:
                continue
            layer = self.file(Path(located), located, (*chain, (here, shown)))
            low = layer if low is None else merge(low, layer)
        return node if low is None else merge(low, node)

    def check_version(self, node: Node | None) -> None:
        """Note a layer that is written for another version."""
        if node is not None and node.value != API_VERSION:
            self.problems.append(
                Problem(node.origin, ("apiVersion",), f"this llmjax reads '{API_VERSION}', the file says {node.value!r}")
            )

    def _parents(self, extends: Node | None) -> list[Node]:
        if extends is None or extends.value is None:
            return []
        items = extends.value if isinstance(extends.value, list) else [extends]
        for item in items:
            if not isinstance(item.value, str) or not item.value:
                self.problems.append(Problem(item.origin, ("extends",), "expected a path or a list of paths"))
        return [item for item in items if isinstance(item.value, str) and item.value]

    def _locate(self, node: Node, shown: str) -> str | None:
        """The file an `extends` entry means, as it is to be shown; None when there is none."""
        assert isinstance(node.value, str)
        result = interpolate_text(node.value, self.environ, None)
        why = result.problem
        if result.unset:
            why = f"the environment variable {result.unset[0]} is not set"
        text = os.path.expanduser(result.text)
        located = text if result.external else os.path.join(os.path.dirname(shown), text)
        if not why and not os.path.isfile(located):
            why = f"no such file: {located}"
        if why:
            self.problems.append(Problem(node.origin, ("extends",), why))
        return None if why else located


def read_set(text: str, rank: int) -> tuple[Node, list[Problem]]:
    """The tree of one ``--set a.b.c=value``; the value is a YAML document of its own (so nothing after `=` is null)."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigErrors([f"--set {text}: write it as a.b.c=value"])
    try:
        path = split_path(name.strip())
    except ValueError as error:
        raise ConfigErrors([f"--set {name}: {error}"]) from None
    origin = Origin(f"--set {name.strip()}", -1, 0, None, rank)
    leaf, problems = parse(value, origin)
    if leaf is None:
        leaf = Node(None, dataclasses.replace(origin, line=0), dataclasses.replace(origin, line=0))
    return nest(path, leaf), problems


def read_layers(
    path: Path,
    *,
    overlays: Sequence[str | Path] = (),
    sets: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    environ: Mapping[str, str],
) -> Sources:
    """All layers of a pipeline in their order: what it extends, the file, overlays, `sets`, `values` (dotted path to value).

    Raises `ConfigErrors` for what cannot be read at all; lesser mistakes are in the result's `problems`.
    """
    layers = _Layers(environ)
    failures: list[str] = []
    tree: Node | None = None
    for file in (path, *map(Path, overlays)):
        try:
            layer = layers.file(file, str(file), ())
            tree = layer if tree is None else merge(tree, layer)
        except ConfigErrors as error:
            failures += error.messages
    for text in sets:
        layers.rank += 1
        try:
            layer, problems = read_set(text, layers.rank)
            layers.problems += problems
            layers.check_version(layer.mapping().get("apiVersion"))
            tree = layer if tree is None else merge(tree, layer)
        except ConfigErrors as error:
            failures += error.messages
    if failures:
        raise ConfigErrors([*ConfigErrors.of(layers.problems).messages, *failures])
    assert tree is not None
    for name, value in (values or {}).items():
        layers.rank += 1
        leaf = from_value(value, Origin("command line", rank=layers.rank))
        tree = merge(tree, nest(split_path(name), leaf))
    return Sources(tree, tuple(layers.problems), path)
