"""The lock: what the last run computed, for `plan` to say what changed and `--frozen` to insist that nothing did.

Keys are never taken from it; they are always computed again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmjax.errors import StoreError
from llmjax.pipeline.digest import write_whole

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Identity:
    """What a stage's key is made of.

    Attributes:
        kind, version: the kind and its own version number.
        config: resolved settings by dotted key, without host, port, secrets and references to other stages.
        files: digests of input files, by the key that names them.
        inputs: keys of the stages that the inputs come from, by input field.
    """

    kind: str
    version: int
    config: Mapping[str, Any]
    files: Mapping[str, str]
    inputs: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain data, for the key and the lock."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class LockedStage:
    """A stage of the last run: its key and what it was made of."""

    key: str
    identity: Identity


def lock_path(artifacts: Path, pipeline: str) -> Path:
    """Where the lock of a pipeline is."""
    return artifacts / f"{pipeline}.lock.json"


def read_lock(path: Path) -> dict[str, LockedStage]:
    """The stages of a lock; empty when there is none, or one that cannot be read (it says nothing then)."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            return {}
        return {name: LockedStage(str(s["key"]), Identity(**s["identity"])) for name, s in data["stages"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def write_lock(path: Path, pipeline: str, stages: Mapping[str, LockedStage]) -> None:
    """Replaces the lock in one step. Raises `StoreError` when the folder cannot be written."""
    body = {name: {"key": stage.key, "identity": stage.identity.as_json()} for name, stage in stages.items()}
    text = json.dumps({"format": FORMAT, "pipeline": pipeline, "stages": body}, indent=1, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n")
    except OSError as error:
        raise StoreError(f"the lock {path} cannot be written: {error.strerror or error}") from None


def differences(now: Identity, before: Identity) -> list[str]:
    """What changed, one line each, as in ``samples: 256 -> 512``. Empty when nothing did."""
    lines: list[str] = []
    if now.kind != before.kind:
        return [f"kind: {before.kind} -> {now.kind}"]
    if now.version != before.version:
        lines.append(f"version of '{now.kind}': {before.version} -> {now.version}")
    for name in dict.fromkeys([*before.config, *now.config]):
        old, new = before.config.get(name), now.config.get(name)
        if old != new or type(old) is not type(new):
            lines.append(f"{name}: {_text(old)} -> {_text(new)}")
    for name in dict.fromkeys([*before.files, *now.files]):
        if before.files.get(name) != now.files.get(name):
            lines.append(f"{name}: the file changed" if name in before.files and name in now.files else f"{name}: another file")
    for name in dict.fromkeys([*before.inputs, *now.inputs]):
        if before.inputs.get(name) != now.inputs.get(name):
            lines.append(f"its input '{name}' changed")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "default" if value is None else json.dumps(value, ensure_ascii=False)
