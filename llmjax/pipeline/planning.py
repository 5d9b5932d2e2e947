"""What a run would do, and why: keys, reasons, actions. `plan` and `run` use this one function.

A stage's key is a hash of its kind, the kind's version, its resolved settings, the keys of its inputs and the digests of its
input files. Nothing in here imports JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from llmjax.errors import LlmjaxError
from llmjax.pipeline.digest import Digests
from llmjax.pipeline.hardware import decide_platform
from llmjax.pipeline.loading import Pipeline, Stage, input_problems, output_files
from llmjax.pipeline.lock import Identity, LockedStage, differences, lock_path, read_lock
from llmjax.pipeline.schema import InputPath, StageSection, counts, walk_values
from llmjax.pipeline.stages import Runtime
from llmjax.pipeline.store import Store
from llmjax.pipeline.tree import ConfigErrors, Problem, dotted

Action = Literal["run", "reuse", "off", "unused", "beyond"]
_COMMON = ("uses", "needs", "when")


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """What happens to one stage.

    Attributes:
        name, kind: of the stage.
        key: its key; None when it depends on an environment variable that is not set.
        action: "run"; "reuse" what the store has; "off" (switched off, or an input is); "unused" (nothing that runs needs
            it); "beyond" (after `until`).
        reasons: why, one short line each.
        config: its section, resolved for this machine.
        identity: what the key is made of.
        again: the stage is forced, or an input is made again under the same key.
    """

    name: str
    kind: str
    key: str | None
    action: Action
    reasons: tuple[str, ...]
    config: StageSection | None
    identity: Identity | None
    again: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run would do, stage by stage in the order of the file."""

    pipeline: Pipeline
    runtime: Runtime
    stages: tuple[StagePlan, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data for machines, without secrets."""
        return {
            "pipeline": self.pipeline.name,
            "file": str(self.pipeline.path),
            "artifacts": str(self.pipeline.artifacts),
            "platform": self.runtime.platform,
            "warnings": list(self.pipeline.warnings),
            "stages": [
                {
                    "name": stage.name,
                    "kind": stage.kind,
                    "key": stage.key,
                    "action": stage.action,
                    "reasons": list(stage.reasons),
                    "config": dict(stage.identity.config) if stage.identity is not None else None,
                    "inputs": dict(self.pipeline.stage(stage.name).inputs),
                }
                for stage in self.stages
            ],
        }

    def lines(self) -> list[str]:
        """The plan for people, one line a stage."""
        width = max((len(s.name) for s in self.stages), default=0)
        kinds = max((len(s.kind) for s in self.stages), default=0)
        return [
            f"{s.name:<{width}}  {s.kind:<{kinds}}  {(s.key or '?')[:12]:<12}  {s.action:<6}  {'; '.join(s.reasons)}".rstrip()
            for s in self.stages
        ]


def plan(pipeline: Pipeline, *, force: Collection[str] = (), until: str | None = None) -> Plan:
    """Plans a run. Raises `ConfigErrors` for missing input files and for stages in `force` or `until` that do not exist."""
    return make_plan(pipeline, Digests(pipeline.artifacts / "digests.json"), force=force, until=until)


def make_plan(pipeline: Pipeline, digests: Digests, *, force: Collection[str] = (), until: str | None = None) -> Plan:
    """`plan` with the caller's digest cache."""
    for name in (*force, *([until] if until is not None else [])):
        pipeline.stage(name)
    last = [s.name for s in pipeline.stages].index(until) if until is not None else len(pipeline.stages) - 1
    considered = pipeline.stages[: last + 1]
    names = {s.name for s in considered}
    problems = [p for p in input_problems(pipeline) if p.path[1] in names]
    if problems:
        raise ConfigErrors.of(problems)
    asked = pipeline.runtime
    runtime = Runtime(decide_platform(asked.platform), asked.platform, asked.seed, asked.memory_fraction)
    made: dict[str, StagePlan] = {}
    locked = read_lock(lock_path(pipeline.artifacts, pipeline.name))
    store = Store(pipeline.artifacts / "store")
    writers: dict[str, str] = {}
    renewed: set[str] = set()
    for position, stage in enumerate(pipeline.stages):
        if position > last:
            made[stage.name] = StagePlan(stage.name, stage.kind.name, None, "beyond", (f"after '{until}'",), None, None)
            continue
        made[stage.name] = _plan_stage(stage, made, runtime, digests, locked, store, frozenset(force), writers, renewed)
        for path in output_files(stage):
            writers[path] = stage.name
    digests.save()
    return Plan(pipeline, runtime, _drop_unused(pipeline, made, until, frozenset(force)))


def frozen_problems(plan: Plan) -> list[str]:
    """Stages whose key differs from the lock's, one line each: what `--frozen` refuses."""
    pipeline = plan.pipeline
    path = lock_path(pipeline.artifacts, pipeline.name)
    locked = read_lock(path)
    if not locked:
        return [f"--frozen: there is no readable lock at {path}; run once without it"]
    lines: list[str] = []
    for stage in plan.stages:
        if stage.action in ("off", "beyond") or stage.identity is None:
            continue
        before = locked.get(stage.name)
        if before is None:
            lines.append(f"--frozen: the stage '{stage.name}' is not in the lock")
        elif before.key != stage.key:
            why = "; ".join(differences(stage.identity, before.identity)) or "it was made differently"
            lines.append(f"--frozen: the stage '{stage.name}' differs from the lock: {why}")
    return lines


def _plan_stage(
    stage: Stage,
    made: Mapping[str, StagePlan],
    runtime: Runtime,
    digests: Digests,
    locked: Mapping[str, LockedStage],
    store: Store,
    force: frozenset[str],
    writers: Mapping[str, str],
    renewed: set[str],
) -> StagePlan:
    """`renewed` collects stages whose stored result is made again under the same key, so that later ones follow."""

    def result(action: Action, reasons: list[str], key: str | None = None, identity: Identity | None = None) -> StagePlan:
        fresh = action == "run" and (
            stage.name in force or any(name in renewed for name in (*stage.inputs.values(), *stage.needs))
        )
        return StagePlan(stage.name, stage.kind.name, key, action, tuple(reasons), config, identity, fresh)

    config = stage.config
    if stage.when == "never" or (stage.when == "gpu" and runtime.platform != "cuda"):
        return result("off", [f"when: {stage.when}"])
    sources = dict.fromkeys([*stage.inputs.values(), *stage.needs])
    if off := [name for name in sources if made[name].action == "off"]:
        return result("off", [f"'{off[0]}' is off"])
    unknown = [name for name in stage.inputs.values() if made[name].key is None]
    if stage.unset or config is None:
        return result("run", [f"the environment variable {name} is not set" for name in stage.unset])
    config = stage.kind.resolve(config, runtime)
    if unknown:
        return result("run", [f"'{unknown[0]}' is not known yet"])
    identity = _identity(stage, config, made, digests, writers)
    key = key_of(identity)
    before = locked.get(stage.name)
    changes = differences(identity, before.identity) if before is not None else ["not run before"]
    again = [name for name in sources if name in renewed]
    if again or (stage.name in force and stage.kind.skippable):
        renewed.add(stage.name)
    if stage.name in force:
        return result("run", ["forced"], key, identity)
    if not stage.kind.skippable:
        return result("run", changes if before is None or changes else ["runs every time"], key, identity)
    if again:
        return result("run", [*changes, *([] if changes else [f"'{again[0]}' runs again"])], key, identity)
    if store.has(stage.kind.name, key):
        return result("reuse", ["unchanged"], key, identity)
    return result("run", changes or ["its result is not in the store"], key, identity)


def _identity(
    stage: Stage, config: StageSection, made: Mapping[str, StagePlan], digests: Digests, writers: Mapping[str, str]
) -> Identity:
    values = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():  # whole sections too: an empty one would be left of them
        if not counts(field):
            values.pop(name, None)
    try:
        files = dict(stage.kind.digest_files(config, digests))
        for path, field, value in walk_values(config):
            if not counts(field):
                _delete(values, path)
            elif isinstance(value, InputPath):
                name = dotted(path)
                _delete(values, path)
                if name in files:
                    continue
                if value in writers and made[writers[value]].key is not None:
                    files[name] = f"stage:{made[writers[value]].key}"
                elif os.path.exists(value):
                    files[name] = digests.path(Path(value))
    except LlmjaxError as error:
        raise ConfigErrors.of([Problem(stage.node.origin, ("stages", stage.name), str(error))]) from None
    for name in (*_COMMON, *(wanted.field for wanted in stage.kind.inputs)):
        _delete(values, tuple(name.split(".")))
    inputs = {field: str(made[name].key) for field, name in stage.inputs.items()}
    return Identity(stage.kind.name, stage.kind.version, dict(_flatten(values)), files, inputs)


def key_of(identity: Identity) -> str:
    """The stage key: 32 hexadecimal digits of a SHA-256 over `identity` as canonical JSON."""
    text = json.dumps(identity.as_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _delete(values: Any, path: tuple[str | int, ...]) -> None:
    for step in path[:-1]:
        if isinstance(values, dict) and step not in values:
            return
        values = values[step]
    if isinstance(values, dict):
        values.pop(path[-1], None)
    elif isinstance(values, list) and isinstance(path[-1], int):
        values[path[-1]] = None  # the places of the others must not move


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    items: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            items += _flatten(value, f"{prefix}{name}.")
        else:
            items.append((prefix + name, value))
    return items


def _drop_unused(
    pipeline: Pipeline, made: dict[str, StagePlan], until: str | None, force: frozenset[str]
) -> tuple[StagePlan, ...]:
    """Objects in memory are made only for stages that run; one that no stage of the file uses is made for its own sake."""
    users: dict[str, list[str]] = {stage.name: [] for stage in pipeline.stages}
    for stage in pipeline.stages:
        for name in dict.fromkeys([*stage.inputs.values(), *stage.needs]):
            users[name].append(stage.name)
    for stage in reversed(pipeline.stages):
        own = made[stage.name]
        if own.action != "run" or not stage.kind.live or stage.name == until or stage.name in force or not users[stage.name]:
            continue
        if all(made[user].action != "run" for user in users[stage.name]):
            made[stage.name] = dataclasses.replace(own, action="unused", reasons=("no stage that runs needs it",))
    return tuple(made[stage.name] for stage in pipeline.stages)
