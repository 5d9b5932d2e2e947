"""Running a pipeline: stages in the order of the file, each with the objects of the stages it takes.

Owns outcomes and lifetimes: what runs, what is blocked, when an object in memory is closed, which exit code comes out. What a
stage does is the stage kind's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from llmjax.errors import GateRejectedError, LlmjaxError, ServiceLevelError
from llmjax.pipeline.digest import Digests
from llmjax.pipeline.loading import Pipeline, Stage
from llmjax.pipeline.lock import LockedStage, lock_path, read_lock, write_lock
from llmjax.pipeline.planning import Plan, StagePlan, frozen_problems, make_plan
from llmjax.pipeline.report import MaskingReporter, Reporter, SilentReporter, StageEvent
from llmjax.pipeline.stages import Front, Missed, Rejection, StageContext
from llmjax.pipeline.store import Store
from llmjax.pipeline.tree import ConfigErrors
from llmjax.telemetry.trace import TraceWriter

log = logging.getLogger(__name__)

INTERRUPTED = 130
_STAGE_FAILED = LlmjaxError.exit_code

Status = Literal["done", "reused", "off", "unused", "beyond", "blocked", "rejected", "failed", "interrupted"]


@dataclasses.dataclass
class StageResult:
    """What became of a stage.

    Attributes:
        name, kind: of the stage.
        status: "rejected" is a gate that refused its candidate; "blocked" a stage that needs one that did not succeed.
        seconds: that it ran.
        summary: figures for people.
        error: one line, for a stage that failed, was rejected or blocked.
    """

    name: str
    kind: str
    status: Status
    seconds: float = 0.0
    summary: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""


@dataclasses.dataclass
class RunResult:
    """The outcome of a run. `exit_code` is 0, or that of the first stage that did not succeed (130 when interrupted)."""

    pipeline: Pipeline
    stages: list[StageResult]
    exit_code: int = 0

    @property
    def ok(self) -> bool:
        """Everything that was to run did."""
        return self.exit_code == 0

    def stage(self, name: str) -> StageResult:
        """The result of the stage of that name. Raises `KeyError`."""
        return {stage.name: stage for stage in self.stages}[name]


def run(
    pipeline: Pipeline,
    *,
    until: str | None = None,
    force: Collection[str] = (),
    frozen: bool = False,
    reporter: Reporter | None = None,
    trace: TraceWriter | None = None,
    front: Front | None = None,
) -> RunResult:
    """Runs a pipeline.

    Args:
        pipeline: loaded with ``unset_env="error"``.
        until: the last stage to run.
        force: stages to run although the store has their result (and those that build on it).
        frozen: fail when a key differs from the lock's.
        reporter: told everything that happens.
        trace: written to by the stages; the caller closes it.
        front: what a last `serve` stage answers through; by default it serves from this process.

    Stages that fail do not raise: later ones that need them are blocked, the others go on, and the result has the exit code.
    Raises `ConfigErrors` before anything starts.
    """
    unset = dict.fromkeys(name for stage in pipeline.stages for name in stage.unset)
    if unset:
        raise ConfigErrors([f"{pipeline.path}: the environment variable {name} is not set" for name in unset])
    digests = Digests(pipeline.artifacts / "digests.json")
    plan = make_plan(pipeline, digests, force=force, until=until)
    if frozen and (problems := frozen_problems(plan)):
        raise ConfigErrors(problems)
    return _Run(plan, digests, MaskingReporter(reporter or SilentReporter(), pipeline.mask), trace, front).all()


class _Run:
    """The state of one run."""

    def __init__(self, plan: Plan, digests: Digests, reporter: Reporter, trace: TraceWriter | None, front: Front | None) -> None:
        self.plan = plan
        self.pipeline = plan.pipeline
        self.digests = digests
        self.reporter = reporter
        self.trace = trace
        self.front = front
        self._process = None if trace is None else trace.process(plan.pipeline.name)
        self.store = Store(self.pipeline.artifacts / "store")
        self.results: dict[str, StageResult] = {}
        self.values: dict[str, Any] = {}
        self.rejected: dict[str, str] = {}  # stage that a gate refused -> the gate
        self.exit_code = 0
        self.lock = read_lock(lock_path(self.pipeline.artifacts, self.pipeline.name))
        self.plans = {stage.name: stage for stage in plan.stages}
        self._last_use = self._last_uses()

    def all(self) -> RunResult:
        """Every stage of the plan; objects still alive are closed at the end, whatever happens."""
        try:
            for stage in self.pipeline.stages:
                began_ns = time.monotonic_ns()
                try:
                    self._one(stage, self.plans[stage.name])
                finally:
                    if self._process is not None:
                        self._process.span("stages", stage.name, began_ns, time.monotonic_ns(), kind=stage.kind.name)
                self._close_after(stage.name)
        except KeyboardInterrupt:
            self._interrupted()
        finally:
            for name in reversed(list(self.values)):
                self._close(name)
            self.digests.save()
            self.reporter.close()
        results = [self.results[s.name] for s in self.pipeline.stages if s.name in self.results]
        return RunResult(self.pipeline, results, self.exit_code)

    def _one(self, stage: Stage, planned: StagePlan) -> None:
        if planned.action in ("off", "unused", "beyond"):
            self.results[stage.name] = StageResult(stage.name, stage.kind.name, planned.action)
            if planned.action != "beyond":
                self.reporter.stage(stage.name, planned.action, "; ".join(planned.reasons))
            return
        if why := self._blocked_by(stage):
            self.results[stage.name] = StageResult(stage.name, stage.kind.name, "blocked", error=why)
            self.reporter.stage(stage.name, "blocked", why)
            return
        if planned.action == "reuse":
            self.results[stage.name] = StageResult(stage.name, stage.kind.name, "reused")
            self.reporter.stage(stage.name, "reuse", "; ".join(planned.reasons))
            return
        self._execute(stage, planned)

    def _execute(self, stage: Stage, planned: StagePlan) -> None:
        self.reporter.stage(stage.name, "start", "; ".join(planned.reasons), {"kind": stage.kind.name})
        started = time.monotonic()
        result = self.results[stage.name] = StageResult(stage.name, stage.kind.name, "done")
        try:
            with self._context(stage, planned) as context:
                value = stage.kind.run(context)
            if isinstance(value, Rejection):
                result.status, result.error = "rejected", self.pipeline.mask(value.reason)
                self._reject(stage, GateRejectedError.exit_code)
                value = value.value
            if isinstance(value, Missed):
                result.status, result.error = "failed", self.pipeline.mask(value.reason)
                self.exit_code = self.exit_code or ServiceLevelError.exit_code
                value = value.value
            if not stage.kind.skippable:  # a stored result is loaded from its final place, when it is asked for
                self.values[stage.name] = value
            result.summary = dict(stage.kind.summary(value)) if result.status != "rejected" else {}
            result.seconds = time.monotonic() - started
            self._remember(stage, planned)
            event = {"rejected": "rejected", "failed": "failed"}.get(result.status, "done")
            self.reporter.stage(stage.name, cast(StageEvent, event), result.error, {"seconds": result.seconds, **result.summary})
            if stage.name not in self._last_use:
                stage.kind.wait(value)
        except KeyboardInterrupt:
            result.status, result.seconds = "interrupted", time.monotonic() - started
            raise
        except GateRejectedError as error:
            self._fail(result, "rejected", error, started)
            self._reject(stage, error.exit_code)
        except LlmjaxError as error:
            self._fail(result, "failed", error, started)
            self.exit_code = self.exit_code or error.exit_code
        except Exception as error:
            trace = "".join(traceback.format_exception(error))  # a bug of ours: the traceback helps to report it
            log.error("stage '%s' failed\n%s", stage.name, self.pipeline.mask(trace))
            self._fail(result, "failed", error, started)
            self.exit_code = self.exit_code or _STAGE_FAILED

    @contextlib.contextmanager
    def _context(self, stage: Stage, planned: StagePlan) -> Iterator[StageContext[Any]]:
        """What the stage gets; for a skippable kind with a folder aside, which becomes its result when the block succeeds."""
        assert planned.config is not None
        assert planned.key is not None
        assert planned.identity is not None
        context = self._bare_context(stage, planned, {field: self._value(name) for field, name in stage.inputs.items()})
        if not stage.kind.skippable:
            yield context
            return
        with self.store.writing(stage.kind.name, planned.key, planned.identity.as_json()) as folder:
            yield dataclasses.replace(context, folder=folder)

    def _bare_context(
        self, stage: Stage, planned: StagePlan, inputs: Mapping[str, Any], folder: Path | None = None
    ) -> StageContext[Any]:
        return StageContext(
            name=stage.name,
            config=planned.config,
            inputs=inputs,
            runtime=self.plan.runtime,
            reporter=self.reporter,
            artifacts=self.pipeline.artifacts,
            digests=self.digests,
            key=str(planned.key),
            again=planned.again,
            trace=self.trace,
            folder=folder,
            front=self.front if stage.name not in self._last_use else None,
        )

    def _value(self, name: str) -> Any:
        """The object of an earlier stage; that of a stored result is loaded when it is first asked for."""
        if name not in self.values:
            stage, planned = self.pipeline.stage(name), self.plans[name]
            assert stage.kind.skippable, f"'{name}' was not run"
            folder = self.store.folder(stage.kind.name, str(planned.key))
            self.values[name] = stage.kind.load(self._bare_context(stage, planned, {}, folder))
        return self.values[name]

    def _blocked_by(self, stage: Stage) -> str:
        for name in dict.fromkeys([*stage.inputs.values(), *stage.needs]):
            if name in self.rejected:
                return f"'{self.rejected[name]}' rejected '{name}'"
            result = self.results.get(name)
            if result is None or result.status in ("failed", "blocked", "interrupted"):
                return f"'{name}' did not succeed"
            if result.status == "rejected" and name not in self.values:
                return f"'{name}' rejected its candidate"
        return ""

    def _reject(self, stage: Stage, exit_code: int) -> None:
        for field in stage.kind.guards:
            if field in stage.inputs:
                self.rejected[stage.inputs[field]] = stage.name
        self.exit_code = self.exit_code or exit_code

    def _fail(self, result: StageResult, status: Status, error: Exception, started: float) -> None:
        text = str(error) if isinstance(error, LlmjaxError) else f"{type(error).__name__}: {error}"
        result.status, result.error = status, self.pipeline.mask(text)
        result.seconds = time.monotonic() - started
        self.reporter.stage(
            result.name, "rejected" if status == "rejected" else "failed", result.error, {"seconds": result.seconds}
        )

    def _remember(self, stage: Stage, planned: StagePlan) -> None:
        """The lock is written stage by stage, so that an interrupted run is known as far as it came."""
        assert planned.key is not None
        assert planned.identity is not None
        self.lock[stage.name] = LockedStage(planned.key, planned.identity)
        names = {s.name for s in self.pipeline.stages}
        kept = {name: locked for name, locked in self.lock.items() if name in names}
        write_lock(lock_path(self.pipeline.artifacts, self.pipeline.name), self.pipeline.name, kept)

    def _last_uses(self) -> dict[str, str]:
        """For each stage, the last one that runs and needs its object alive.

        That goes through objects in memory: an engine that a server holds is needed as long as the server is. Files hold nothing.
        """
        place = {stage.name: index for index, stage in enumerate(self.pipeline.stages)}
        last: dict[str, str] = {}
        for stage in reversed(self.pipeline.stages):
            if self.plans[stage.name].action != "run":
                continue
            until = stage.name if stage.kind.skippable else last.get(stage.name, stage.name)
            for name in (*stage.inputs.values(), *stage.needs):
                last[name] = max(last.get(name, until), until, key=place.__getitem__)
        return last

    def _close_after(self, name: str) -> None:
        for used in [value for value in reversed(list(self.values)) if self._last_use.get(value, value) == name]:
            self._close(used)

    def _close(self, name: str) -> None:
        value = self.values.pop(name)
        if any(value is other for other in self.values.values()):
            return  # a gate passes on the object of another stage
        try:
            self.pipeline.stage(name).kind.close(value)
        except Exception as error:
            log.error("closing '%s' failed", name, exc_info=error)
            self.exit_code = self.exit_code or (error.exit_code if isinstance(error, LlmjaxError) else _STAGE_FAILED)

    def _interrupted(self) -> None:
        self.exit_code = INTERRUPTED
        for stage in self.pipeline.stages:
            result = self.results.get(stage.name)
            if result is None:
                self.results[stage.name] = StageResult(
                    stage.name, stage.kind.name, "blocked", error="interrupted before it began"
                )
            elif result.status == "interrupted":
                self.reporter.stage(stage.name, "interrupted", "what it had written is kept", {"seconds": result.seconds})
