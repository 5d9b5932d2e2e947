"""Stage kinds: what a kind must provide, and how one is found by name.

Adding a kind is adding one file to this folder: `stages/<kind>.py` with `KIND = <a StageKind>()`, the file named like the kind.
A kind's module is imported when a pipeline (or `explain`, `schema`) first names it; heavy imports belong inside `run`.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from llmjax.pipeline.schema import StageSection
from llmjax.pipeline.tree import KeyPath

if TYPE_CHECKING:
    from llmjax.engine.async_engine import AsyncEngine
    from llmjax.pipeline.digest import Digests
    from llmjax.pipeline.report import Reporter
    from llmjax.telemetry.trace import TraceWriter


@dataclasses.dataclass(frozen=True)
class StageInput:
    """An object that a stage takes from an earlier one.

    Attributes:
        field: key of the stage that names the earlier stage, dotted when it is in a section (``speculative.draft``).
        gives: what the earlier stage has to give.
        implicit: without the key, the only earlier stage that gives it is taken; otherwise the input is left out.
        also: what else a stage that is named may give.
        urls: the key may hold an http or https URL instead of a stage's name; then the input is left out.
        optional: with `implicit`, the input is left out too where no earlier stage gives it.
    """

    field: str
    gives: str
    implicit: bool = True
    also: tuple[str, ...] = ()
    urls: bool = False
    optional: bool = False

    def leaves(self, name: str) -> bool:
        """Whether what the key says is no stage."""
        return self.urls and name.startswith(("http://", "https://"))


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The `runtime` section, with `auto` decided.

    `platform` is what the stages are planned for, `requested` what the file says. `seed` is None for a fresh one,
    `memory_fraction` None for JAX's own setting.
    """

    platform: Literal["cpu", "cuda"]
    requested: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int | None = None
    memory_fraction: float | None = None


class Front(Protocol):
    """The HTTP side of a service, when that is other processes."""

    def serve(self, engine: AsyncEngine, *, name: str, drain: float) -> Any:
        """Answer with this engine. Returns an object with `url`, `wait` and `close`, when requests would be answered."""


@dataclasses.dataclass(frozen=True)
class StageContext[C: StageSection]:
    """What a stage gets to run.

    Attributes:
        name: the stage's name in the file.
        config: its checked section, resolved for this machine.
        inputs: objects of earlier stages, by `StageInput.field`; empty in `load`.
        runtime: the process.
        reporter: for progress and messages.
        artifacts: the artifacts folder, absolute; it may not exist yet.
        digests: digests of files, cached.
        key: the stage's key.
        again: what the stage itself keeps under its key does not count: it is forced, or an input is made again.
        trace: the trace file of the run, if it has one.
        folder: for skippable kinds, the folder to write to (or, in `load`, to read from); None for others.
        front: what a last `serve` stage answers through; None for a server in this process.
    """

    name: str
    config: C
    inputs: Mapping[str, Any]
    runtime: Runtime
    reporter: Reporter
    artifacts: Path
    digests: Digests
    key: str
    again: bool = False
    trace: TraceWriter | None = None
    folder: Path | None = None
    front: Front | None = None


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Returned by a gate that refused its candidate and lets `value` (the baseline) through instead."""

    value: Any
    reason: str


@dataclasses.dataclass(frozen=True)
class Missed:
    """Returned by a stage that did its work and found that what it measured misses its service levels: `value` is shown."""

    value: Any
    reason: str


class StageKind[C: StageSection](abc.ABC):
    """One kind of stage.

    Attributes:
        name: what `uses` says.
        version: to be raised when the same configuration starts to give another result; part of every key.
        section: the keys the stage may have.
        gives: what later stages can take from it.
        inputs: what it takes.
        skippable: the result is files in the store, and a stage with an unchanged key is not run again.
        live: the result is an object in memory, made only when a stage that runs needs it (or when none could).
        stays: without a later stage that uses it, it stays until it is told to stop, so that it must be the last one.
        guards: inputs that this kind may reject (`Rejection`, `GateRejectedError`); a later stage that names such an
            input's stage itself is then blocked.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    section: type[C]
    gives: ClassVar[str]
    inputs: ClassVar[tuple[StageInput, ...]] = ()
    skippable: ClassVar[bool] = False
    live: ClassVar[bool] = False
    stays: ClassVar[bool] = False
    guards: ClassVar[tuple[str, ...]] = ()

    def resolve(self, config: C, runtime: Runtime) -> C:
        """`config` with the defaults that depend on the machine; the key is made of the result."""
        return config

    def digest_files(self, config: C, digests: Digests) -> Mapping[str, str]:
        """Digests of files that `config` names by something else than an `InputPath` field, by field."""
        return {}

    def check_together(self, stages: Sequence[tuple[str, C]]) -> Sequence[tuple[str, KeyPath, str]]:
        """Mistakes that show only when all stages of this kind are seen: stage, key and message."""
        return ()

    def check_inputs(self, config: C, inputs: Mapping[str, str]) -> Sequence[tuple[KeyPath, str]]:
        """Mistakes that show only when it is known which inputs there are (field to stage): key and message."""
        return ()

    @abc.abstractmethod
    def run(self, context: StageContext[C]) -> Any:
        """Does the work and returns the stage's object. Raises `LlmjaxError` for what the user can mend."""

    def load(self, context: StageContext[C]) -> Any:
        """The object of a stored result, from `context.folder`. For skippable kinds."""
        raise NotImplementedError(self.name)

    def summary(self, value: Any) -> Mapping[str, Any]:
        """A few figures for people; numbers and short texts."""
        return {}

    def wait(self, value: Any) -> None:
        """Called when the stage has run and no later stage uses it: a server stays here until it is told to stop."""
        return None

    def close(self, value: Any) -> None:
        """Frees what `value` holds. Called once, after the last stage that uses it."""
        close = getattr(value, "close", None)
        if callable(close):
            close()


_registered: dict[str, StageKind[Any]] = {}


def register(kind: StageKind[Any]) -> None:
    """Adds a kind that is not in this folder (one of an application's own). Raises `ValueError` for a name that is taken."""
    if kind.name in kind_names():
        raise ValueError(f"there is a stage kind '{kind.name}' already")
    _registered[kind.name] = kind


def kind_names() -> list[str]:
    """All kinds, sorted, without importing them."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} | set(_registered))


def get_kind(name: str) -> StageKind[Any] | None:
    """The kind of that name, or None."""
    if name in _registered:
        return _registered[name]
    if name not in kind_names():
        return None
    kind = importlib.import_module(f"{__name__}.{name}").KIND
    assert isinstance(kind, StageKind)
    assert kind.name == name
    return kind
