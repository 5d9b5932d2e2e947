"""`${env:NAME}`, `${env:NAME:-default}` and `${vars.name}` inside strings. Knows neither YAML files nor the schema.

`$${` stands for a literal `${`. Nothing else is special: no expressions, no references to other keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from llmjax.pipeline.tree import KeyPath, Node, Problem, Scalar

_START = re.compile(r"\$(\$?)\{")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ENV = re.compile(rf"env:({_NAME})(?::-(.*))?", re.DOTALL)
_VARS = re.compile(r"vars\.([A-Za-z_][A-Za-z0-9_-]*)")


@dataclasses.dataclass(frozen=True)
class Interpolated:
    """The outcome for one string.

    Attributes:
        text: the string with everything put in; a variable that is not set stays as it was written.
        external: the text *starts* with something from the environment, so a relative path starts at the working directory.
        whole: the variable (of `vars`) that is the whole string; its own type and place count then.
        leading: the variable (of `vars`) the text starts with.
        unset: environment variables that are needed and not set.
        problem: what is wrong with the string, or "".
    """

    text: str
    external: bool = False
    whole: Node | None = None
    leading: Node | None = None
    unset: tuple[str, ...] = ()
    problem: str = ""


def interpolate_text(text: str, environ: Mapping[str, str], variables: Mapping[str, Node] | None) -> Interpolated:
    """Puts the environment and `variables` into `text`. `variables` of None says that `${vars.…}` is not possible here."""
    out: list[str] = []
    unset: list[str] = []
    whole: Node | None = None
    leading: Node | None = None
    external = False
    position = 0
    while (start := _START.search(text, position)) is not None:
        out.append(text[position : start.start()])
        if start[1]:
            out.append("${")
            position = start.end()
            continue
        end = text.find("}", start.end())
        if end < 0:
            return Interpolated(text, problem="'${' is never closed; write '$${' for a literal '${'")
        inner = text[start.end() : end]
        first = start.start() == 0
        if (env := _ENV.fullmatch(inner)) is not None:
            value = environ.get(env[1])
            if env[2] is not None and not value:
                out.append(env[2])
            elif value is None:
                unset.append(env[1])
                out.append(text[start.start() : end + 1])
                external |= first
            else:
                out.append(value)
                external |= first
        elif (var := _VARS.fullmatch(inner)) is not None:
            if variables is None:
                return Interpolated(text, problem=f"'${{{inner}}}' cannot be used here; use ${{env:NAME}}")
            if var[1] not in variables:
                known = ", ".join(sorted(variables)) or "none are defined"
                return Interpolated(text, problem=f"unknown variable 'vars.{var[1]}'; vars: {known}")
            node = variables[var[1]]
            out.append(scalar_text(node.value))  # type: ignore[arg-type]  # vars hold scalars, checked by `interpolate`
            unset += node.unset
            if first:
                leading = node
                whole = node if end + 1 == len(text) else None
        else:
            hint = "use ${env:NAME}, ${env:NAME:-default} or ${vars.name}, and '$${' for a literal '${'"
            return Interpolated(text, problem=f"'${{{inner}}}' is not known; {hint}")
        position = end + 1
    out.append(text[position:])
    return Interpolated("".join(out), external, whole, leading, tuple(unset))


def scalar_text(value: Scalar) -> str:
    """A scalar as YAML writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def interpolate(
    tree: Node, environ: Mapping[str, str], read_plain: Callable[[str], Scalar]
) -> tuple[Node, list[Problem], dict[str, list[tuple[KeyPath, Node]]]]:
    """`tree` with every string filled in. `read_plain` reads a plain scalar by YAML's rules.

    Returns the new tree, the mistakes, and for each environment variable that is not set the values that need it.
    """
    problems: list[Problem] = []
    unset: dict[str, list[tuple[KeyPath, Node]]] = {}

    def fill(node: Node, path: KeyPath, variables: Mapping[str, Node] | None) -> Node:
        if isinstance(node.value, dict):
            return dataclasses.replace(node, value={k: fill(v, (*path, k), variables) for k, v in node.value.items()})
        if isinstance(node.value, list):
            return dataclasses.replace(node, value=[fill(v, (*path, i), variables) for i, v in enumerate(node.value)])
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        result = interpolate_text(node.value, environ, variables)
        if result.problem:
            problems.append(Problem(node.origin, path, result.problem))
            return node
        for name in result.unset:
            unset.setdefault(name, []).append((path, node))
        base: Path | None = node.origin.base
        if result.external:
            base = None
        elif result.leading is not None:
            base = result.leading.origin.base
        origin = dataclasses.replace(node.origin, base=base)
        if result.whole is not None:
            kept = result.whole
            return dataclasses.replace(
                node, value=kept.value, origin=origin, filled=kept.filled, reread=kept.reread, unset=result.unset
            )
        reread = read_plain(result.text)
        return dataclasses.replace(node, value=result.text, origin=origin, filled=True, reread=reread, unset=result.unset)

    root = tree.mapping()
    variables: dict[str, Node] = {}
    for name, node in root["vars"].mapping().items() if "vars" in root else ():
        if isinstance(node.value, dict | list):
            problems.append(Problem(node.origin, ("vars", name), "a variable is a single value, not a mapping or a list"))
        else:
            variables[name] = fill(node, ("vars", name), None)
    filled: dict[str, Node] = {}
    for name, node in root.items():
        if name == "vars":
            filled[name] = dataclasses.replace(node, value=dict(variables)) if isinstance(node.value, dict) else node
        else:
            filled[name] = fill(node, (name,), variables)
    return dataclasses.replace(tree, value=filled), problems, unset
