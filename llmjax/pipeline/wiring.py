"""Which earlier stage each input comes from. Works on what the file says, so that it can report beside all other mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from llmjax.pipeline.diagnose import close_to
from llmjax.pipeline.stages import StageInput, StageKind
from llmjax.pipeline.tree import KeyPath, Node, Problem


@dataclasses.dataclass
class Declared:
    """A stage as the file has it, before its inputs are known. `kind` is None when the file names one that does not exist."""

    name: str
    node: Node
    kind: StageKind[Any] | None
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def off(self) -> bool:
        """Switched off in the file, so that it does not count as a choice."""
        when = self.node.mapping().get("when")
        return when is not None and when.value == "never"


def connect(stages: Sequence[Declared]) -> list[Problem]:
    """Fills in `inputs` and `needs` of every stage, in place, and returns what is wrong with them.

    An input that is not written is taken from the only earlier stage that gives it; several are an error that names them, because
    "the last one" would serve a draft model.
    """
    problems: list[Problem] = []
    for position, stage in enumerate(stages):
        for wanted in stage.kind.inputs if stage.kind is not None else ():
            path = tuple(wanted.field.split("."))
            node = stage.node.at(path)
            written = stage.node.has(path) and node.value is not None
            if not written:
                if wanted.implicit:
                    problems += _choose(stages, position, wanted)
            elif isinstance(node.value, str) and not node.unset and not wanted.leaves(node.value):
                found = _refer(stages, position, path, node, wanted)
                problems += found
                if not found:
                    stage.inputs[wanted.field] = node.value
        problems += _needs(stages, position)
    return problems


def _choose(stages: Sequence[Declared], position: int, wanted: StageInput) -> list[Problem]:
    stage = stages[position]
    earlier = [s for s in stages[:position] if not s.off]
    choices = [s.name for s in earlier if s.kind is not None and s.kind.gives == wanted.gives]
    at: KeyPath = ("stages", stage.name)
    if len(choices) == 1:
        stage.inputs[wanted.field] = choices[0]
        return []
    if choices:
        text = f"several earlier stages give {_a(wanted.gives)}: {', '.join(choices)}; say which with '{wanted.field}: NAME'"
        return [Problem(stage.node.key, at, text)]
    if wanted.optional or any(s.kind is None for s in earlier):  # the unknown may be the one; its own mistake is reported
        return []
    later = [s.name for s in stages[position + 1 :] if s.kind is not None and s.kind.gives == wanted.gives and not s.off]
    hint = f"; '{later[0]}' gives one but comes later, and the order in the file is the order they run in" if later else ""
    return [Problem(stage.node.key, at, f"needs {_a(wanted.gives)}, and no earlier stage gives one{hint}")]


def _refer(stages: Sequence[Declared], position: int, path: KeyPath, node: Node, wanted: StageInput | None) -> list[Problem]:
    """What is wrong with naming stage `node.value` from the stage at `position`."""
    stage = stages[position]
    at = ("stages", stage.name, *path)
    name = str(node.value)
    earlier = {s.name: s for s in stages[:position]}
    if name not in earlier:
        if name in {s.name for s in stages[position:]}:
            why = "is this stage itself" if name == stage.name else "comes later in the file; move it up"
            return [Problem(node.origin, at, f"the stage '{name}' {why}")]
        fits = [s.name for s in earlier.values() if wanted is None or (s.kind is not None and _fits(s.kind.gives, wanted))]
        hint = close_to(name, fits) or (f"; earlier stages: {', '.join(fits)}" if fits else "")
        return [Problem(node.origin, at, f"there is no stage '{name}'{hint}")]
    kind = earlier[name].kind
    if wanted is not None and kind is not None and not _fits(kind.gives, wanted):
        these = " or ".join(_a(gives) for gives in (wanted.gives, *wanted.also))
        return [Problem(node.origin, at, f"the stage '{name}' gives {_a(kind.gives)}, and this has to be {these}")]
    return []


def _fits(gives: str, wanted: StageInput) -> bool:
    return gives == wanted.gives or gives in wanted.also


def _needs(stages: Sequence[Declared], position: int) -> list[Problem]:
    stage = stages[position]
    node = stage.node.mapping().get("needs")
    if node is None:
        return []
    items = list(enumerate(node.value)) if isinstance(node.value, list) else [(None, node)]
    problems: list[Problem] = []
    names: list[str] = []
    for index, item in items:
        if not isinstance(item.value, str) or item.unset:
            continue  # the schema reports it
        path: KeyPath = ("needs",) if index is None else ("needs", index)
        found = _refer(stages, position, path, item, None)
        problems += found
        if not found:
            names.append(item.value)
    stage.needs = tuple(names)
    return problems


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
