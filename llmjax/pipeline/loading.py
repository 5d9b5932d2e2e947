"""From a file to a checked `Pipeline`: reads the layers, fills in `${...}`, checks every section, connects the stages.

All mistakes of all layers come in one `ConfigErrors`. Nothing in here touches a device, the store or an input file.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr, ValidationError

from llmjax.pipeline.diagnose import close_to, problems_of
from llmjax.pipeline.interpolate import interpolate
from llmjax.pipeline.recalibration import chain_of
from llmjax.pipeline.schema import (
    STAGE_NAME,
    InputPath,
    OutputPath,
    RootSection,
    RuntimeSection,
    Section,
    StageSection,
    walk_values,
)
from llmjax.pipeline.shipped import find_pipeline
from llmjax.pipeline.source import plain_scalar, read_layers
from llmjax.pipeline.stages import StageKind, get_kind, kind_names
from llmjax.pipeline.tree import ConfigErrors, KeyPath, Node, PlacedText, Problem
from llmjax.pipeline.wiring import Declared, connect

MASK = "********"


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage, checked.

    Attributes:
        name: its name in the file.
        kind: what it does.
        config: its section; None when a variable that is not set stands where a number or a word is expected.
        inputs: input field to the name of the earlier stage it comes from.
        needs: other earlier stages that must have succeeded.
        node: its place in the tree.
        unset: environment variables that it needs and that are not set.
    """

    name: str
    kind: StageKind[Any]
    config: StageSection | None
    inputs: Mapping[str, str]
    needs: tuple[str, ...]
    node: Node
    unset: tuple[str, ...] = ()

    @property
    def when(self) -> Literal["always", "gpu", "never"]:
        """On which machines it runs."""
        return self.config.when if self.config is not None else "always"


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A checked pipeline. `warnings` are located lines; `artifacts` is absolute."""

    name: str
    path: Path
    artifacts: Path
    runtime: RuntimeSection
    stages: tuple[Stage, ...]
    warnings: tuple[str, ...]
    tree: Node

    def stage(self, name: str) -> Stage:
        """The stage of that name. Raises `ConfigErrors` when there is none."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        names = [stage.name for stage in self.stages]
        raise ConfigErrors([f"{self.path}: there is no stage '{name}'{close_to(name, names)}; stages: {', '.join(names)}"])

    def secrets(self) -> list[str]:
        """The secret values of all stages, longest first."""
        found: set[str] = set()
        for stage in self.stages:
            if stage.config is not None:
                found |= {v.get_secret_value() for _, _, v in walk_values(stage.config) if isinstance(v, SecretStr)}
        return sorted(found - {""}, key=lambda secret: (-len(secret), secret))

    def mask(self, text: str) -> str:
        """`text` without any secret value. Those of one to three letters are left: they would be found in every word."""
        for secret in self.secrets():
            if len(secret) > 3:
                text = text.replace(secret, MASK)
        return text


def load(
    source: str | Path,
    *,
    overlays: Sequence[str | Path] = (),
    sets: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    unset_env: Literal["error", "warn"] = "error",
    environ: Mapping[str, str] | None = None,
) -> Pipeline:
    """Reads and checks a pipeline.

    Args:
        source: a path, or the name of a shipped pipeline.
        overlays: files laid over it, in order.
        sets: ``a.b.c=value`` texts over those; the value is read by YAML's rules.
        values: dotted path to Python value over those; None deletes.
        unset_env: what an environment variable that is not set and has no default is.
        environ: the environment; by default the process's own.

    Raises `ConfigErrors` with all mistakes.
    """
    env = os.environ if environ is None else environ
    path = find_pipeline(source)
    sources = read_layers(path, overlays=overlays, sets=sets, values=values, environ=env)
    tree, problems, unset = interpolate(sources.tree, env, plain_scalar)
    needed = [
        Problem(node.origin, at, f"the environment variable {name} is not set; set it, or write ${{env:{name}:-default}}")
        for name, uses in unset.items()
        for at, node in uses
    ]
    problems = [*sources.problems, *problems, *(needed if unset_env == "error" else [])]
    told = {problem.path for problem in problems if problem.path}
    root, found = _check_root(tree)
    stages, more = _check_stages(tree)
    problems += [problem for problem in (*found, *more) if problem.path not in told]
    warnings = ConfigErrors.of(needed).messages if unset_env == "warn" else ()
    if problems:
        raise ConfigErrors.of(problems)
    if root is None:  # a variable that is not set stands at the top of the file
        raise ConfigErrors(warnings)
    artifacts = Path(os.path.abspath(root.artifacts))
    return Pipeline(root.name, path, artifacts, root.runtime, tuple(stages), warnings, tree)


def missing_inputs(pipeline: Pipeline) -> list[str]:
    """One located line for each input file that is not there and that no earlier stage writes."""
    return [str(problem) for problem in input_problems(pipeline)]


def input_problems(pipeline: Pipeline) -> list[Problem]:
    """Input files that are not there and that no earlier stage writes. Stages that are switched off do not count."""
    problems: list[Problem] = []
    written: set[str] = set()
    for stage in pipeline.stages:
        if stage.config is None or stage.when == "never":
            continue
        for path, _, value in walk_values(stage.config):
            node = stage.node.at(path)
            if isinstance(value, InputPath) and not node.unset and not os.path.exists(value) and value not in written:
                problems.append(Problem(node.origin, ("stages", stage.name, *path), f"no such file or folder: {value}"))
        written |= set(output_files(stage))
    return problems


def output_files(stage: Stage) -> list[str]:
    """Absolute paths of the files that a stage writes."""
    if stage.config is None:
        return []
    return [os.path.abspath(value) for _, _, value in walk_values(stage.config) if isinstance(value, OutputPath)]


def check_section(
    section: type[Section], node: Node, at: KeyPath, elsewhere: Sequence[tuple[str, type[Section]]] = ()
) -> tuple[Any, list[Problem]]:
    """`node` checked against `section`: the section or None, and what is wrong.

    Text from `${...}` that a field refuses is tried again as YAML would read it without quotes. Mistakes at a value whose
    environment variable is not set are left out.
    """
    reread: set[KeyPath] = set()
    while True:
        try:
            return section.model_validate(_raw(node, reread)), []
        except ValidationError as error:
            problems = problems_of(error, node, section, at, elsewhere)
        again = {p.path[len(at) :] for p in problems} - reread
        again = {path for path in again if (spot := node.at(path)).filled and spot.reread != spot.value and not spot.unset}
        if not again:
            return None, [p for p in problems if not node.at(p.path[len(at) :]).unset]
        reread |= again


def _raw(node: Node, reread: set[KeyPath], path: KeyPath = ()) -> Any:
    if isinstance(node.value, dict):
        return {name: _raw(child, reread, (*path, name)) for name, child in node.value.items()}
    if isinstance(node.value, list):
        return [_raw(child, reread, (*path, index)) for index, child in enumerate(node.value)]
    value = node.reread if path in reread else node.value
    return PlacedText.of(value, node.origin.base) if isinstance(value, str) else value


def _check_root(tree: Node) -> tuple[RootSection | None, list[Problem]]:
    problems: list[Problem] = []
    children = dict(tree.mapping())
    for name in list(children):
        if name not in RootSection.model_fields and get_kind(name) is not None:
            problems.append(Problem(children.pop(name).key, (name,), "unknown key; it belongs under 'stages'"))
    version = children.get("apiVersion")
    if version is not None and version.value != "llmjax/v1":
        children["apiVersion"] = dataclasses.replace(version, value="llmjax/v1")  # told when its file was read
    elsewhere: list[tuple[str, type[Section]]] = []
    if any(name not in RootSection.model_fields for name in children):  # only then are all kinds worth importing
        elsewhere = [(f"stages.{name}", kind.section) for name in kind_names() if (kind := get_kind(name)) is not None]
    root, found = check_section(RootSection, dataclasses.replace(tree, value=children), (), elsewhere)
    return root, problems + found


def _check_stages(tree: Node) -> tuple[list[Stage], list[Problem]]:
    node = tree.mapping().get("stages")
    problems: list[Problem] = []
    declared: list[Declared] = []
    for name, child in node.mapping().items() if node is not None else ():
        kind, found = _kind_of(name, child)
        problems += found
        declared.append(Declared(name, child, kind))
    problems += connect(declared)
    stages: list[Stage] = []
    together: dict[str, list[Stage]] = {}
    for item in declared:
        if item.kind is None:
            continue
        config, found = check_section(item.kind.section, item.node, ("stages", item.name), [("runtime", RuntimeSection)])
        problems += found
        names = dict.fromkeys(name for _, below in item.node.walk() for name in below.unset)
        stage = Stage(item.name, item.kind, config, item.inputs, item.needs, item.node, tuple(names))
        stages.append(stage)
        if config is not None and not item.off:
            wrong = item.kind.check_inputs(config, item.inputs)
            problems += [Problem(item.node.at(path).origin, ("stages", item.name, *path), text) for path, text in wrong]
        if config is not None and not item.off:
            together.setdefault(item.kind.name, []).append(stage)
    problems += _not_last(declared)
    problems += chain_of(stages)[1]
    for group in together.values():
        for name, path, message in group[0].kind.check_together([(s.name, s.config) for s in group]):
            spot = next(s.node for s in group if s.name == name).at(path)
            problems.append(Problem(spot.origin, ("stages", name, *path), message))
    return stages, problems


def _not_last(declared: Sequence[Declared]) -> list[Problem]:
    """A server that no later stage uses would hold up those that follow until it is stopped."""
    on = [item for item in declared if item.kind is not None and not item.off]
    problems = []
    for index, item in enumerate(on):
        later = on[index + 1 :]
        used = any(item.name in (*other.inputs.values(), *other.needs) for other in later)
        if item.kind is not None and item.kind.stays and later and not used:
            other = later[0].name
            text = f"it stays until it is stopped, and '{other}' would wait for that: put it last, or let '{other}' need it"
            problems.append(Problem(item.node.key, ("stages", item.name), f"{text} (needs: [{item.name}])"))
    return problems


def _kind_of(name: str, node: Node) -> tuple[StageKind[Any] | None, list[Problem]]:
    at: KeyPath = ("stages", name)
    problems = []
    if re.fullmatch(STAGE_NAME, name) is None:
        problems.append(Problem(node.key, at, f"'{name}' is not a valid stage name; use letters, digits, - and _"))
    if node.value is None:
        text = "the stage is empty; write {} for a stage with all defaults (null takes away a stage of the file that is extended)"
        return None, [*problems, Problem(node.key, at, text)]
    uses = node.mapping().get("uses")
    wanted, spot, path = name, node.key, at
    if uses is not None and uses.value is not None:
        if not isinstance(uses.value, str):
            return None, [*problems, Problem(uses.origin, (*at, "uses"), "expected the name of a stage kind")]
        wanted, spot, path = uses.value, uses.origin, (*at, "uses")
    kind = get_kind(wanted)
    if kind is None:
        known = ", ".join(kind_names())
        hint = "" if path != at else "; a stage of another name says its kind with 'uses'"
        text = f"unknown kind '{wanted}'{close_to(wanted, kind_names())}; known: {known}{hint}"
        problems.append(Problem(spot, path, text))
    return kind, problems
