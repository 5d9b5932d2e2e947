"""The merged file as text: `config show`. Secrets are masked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from llmjax.pipeline.interpolate import scalar_text
from llmjax.pipeline.loading import MASK, Pipeline, Stage
from llmjax.pipeline.schema import InputPath, RootSection, Section, walk_values
from llmjax.pipeline.source import plain_scalar
from llmjax.pipeline.tree import KeyPath, Node, Origin

_SAFE = re.compile(r"[A-Za-z0-9_./~+@=%-][A-Za-z0-9_./~+@=%: -]*")
_DEFAULT = Origin("default")


def show(pipeline: Pipeline, *, origin: bool = False) -> str:
    """The merged pipeline as YAML that means the same: variables filled in, input paths absolute, secrets masked.

    With `origin`, defaults are there too, and every value says where it comes from: ``file:line:col``, ``--set …``, ``default``.
    """
    tree = dict(pipeline.tree.mapping())
    stages = {stage.name: _stage_node(pipeline, stage, origin) for stage in pipeline.stages}
    if "stages" in tree:
        tree["stages"] = Node(stages, tree["stages"].origin, tree["stages"].key)
    if origin:
        for name in ("artifacts", "runtime"):
            default = RootSection.model_fields[name].get_default(call_default_factory=True)
            if isinstance(default, Section):
                tree[name] = _with_defaults(tree.get(name), default.model_dump(mode="json"))
            elif name not in tree:
                tree[name] = _from_plain(str(default), _DEFAULT)
    order = [name for name in RootSection.model_fields if name in tree]
    lines: list[tuple[str, str]] = []
    for name in [*order, *(other for other in tree if other not in order)]:
        _write(lines, name, tree[name], 0)
    if not origin:
        return "".join(f"{pipeline.mask(text)}\n" for text, _ in lines)
    width = min(max((len(text) for text, _ in lines), default=0), 60)
    return "".join(f"{pipeline.mask(f'{text:<{width}}  # {where}' if where else text)}\n" for text, where in lines)


def _stage_node(pipeline: Pipeline, stage: Stage, origin: bool) -> Node:
    node = stage.node
    if stage.config is None:
        return node
    paths: dict[KeyPath, str] = {}
    for path, _, value in walk_values(stage.config):
        if isinstance(value, InputPath):
            paths[path] = value
        elif isinstance(value, SecretStr) and value.get_secret_value():
            paths[path] = MASK
    node = _replace(node, paths)
    if origin:
        node = _with_defaults(node, stage.config.model_dump(mode="json"))
        for field, name in stage.inputs.items():
            spot = node.at(field.split("."))
            if spot.value is None:
                spot.value, spot.origin = name, Origin("the only earlier stage that gives it")
    return node


def _replace(node: Node, values: Mapping[KeyPath, str], path: KeyPath = ()) -> Node:
    if isinstance(node.value, dict):
        return Node({k: _replace(v, values, (*path, k)) for k, v in node.value.items()}, node.origin, node.key)
    if isinstance(node.value, list):
        return Node([_replace(v, values, (*path, i)) for i, v in enumerate(node.value)], node.origin, node.key)
    if path in values and (not node.unset or values[path] == MASK):
        return Node(str(values[path]), node.origin, node.key)
    return Node(node.value, node.origin, node.key)


def _with_defaults(node: Node | None, values: Mapping[str, Any]) -> Node:
    """`node` and, marked as defaults, those of `values` that it does not have."""
    if node is None:
        return _from_plain(dict(values), _DEFAULT)
    if not isinstance(node.value, dict):
        return node
    merged = dict(node.value)
    for name, value in values.items():
        if name not in merged:
            merged[name] = _from_plain(value, _DEFAULT)
        elif isinstance(value, Mapping):
            merged[name] = _with_defaults(merged[name], value)
    return Node(merged, node.origin, node.key)


def _from_plain(value: Any, origin: Origin) -> Node:
    if isinstance(value, Mapping):
        return Node({str(k): _from_plain(v, origin) for k, v in value.items()}, origin, origin)
    if isinstance(value, list | tuple):
        return Node([_from_plain(v, origin) for v in value], origin, origin)
    return Node(value, origin, origin)


def _write(lines: list[tuple[str, str]], name: str, node: Node, depth: int) -> None:
    """Appends pairs of line and origin; only lines with a value have one."""
    head = f"{'  ' * depth}{_quote(name)}:"
    if isinstance(node.value, dict) and node.value:
        lines.append((head, ""))
        for key, child in node.value.items():
            _write(lines, key, child, depth + 1)
    else:
        lines.append((f"{head} {_flow(node)}", str(node.origin)))


def _flow(node: Node) -> str:
    if isinstance(node.value, dict):
        return "{" + ", ".join(f"{_quote(key)}: {_flow(child)}" for key, child in node.value.items()) + "}"
    if isinstance(node.value, list):
        return "[" + ", ".join(_flow(child) for child in node.value) + "]"
    return _quote(node.value) if isinstance(node.value, str) else _number(node.value)


def _number(value: Any) -> str:
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return ".inf" if value > 0 else "-.inf"
    return ".nan" if value != value else scalar_text(value)


def _quote(text: str) -> str:
    """A string as YAML, quoted unless it reads back as itself; `${` is escaped."""
    escaped = text.replace("${", "$${")
    plain = _SAFE.fullmatch(escaped) and ": " not in escaped and not escaped.endswith((" ", ":")) and escaped[0] not in "-%@=~"
    if (plain and plain_scalar(escaped) == escaped) or escaped == MASK:
        return escaped if escaped != MASK else f'"{MASK}"'
    return json.dumps(escaped, ensure_ascii=False)
