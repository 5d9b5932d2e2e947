"""Recalibration beside a service: when it is due, from which traffic, and what becomes of its result.

Owns the policy (`Recalibration`), the state that outlives the service (`State`) and which stages are concerned (`chain_of`). It
runs stages and replaces engines through what it is given, knows neither processes nor JAX, and takes the time from a clock that
may be a test's.

What is recalibrated is the pipeline itself, run to its gate with another file for `calibrate.data`: a sample of the traffic. So a
model that passed lies in the store under the keys that the same pipeline has when the engine is started again with that file.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmjax.errors import ConfigError, GateRejectedError, LlmjaxError
from llmjax.pipeline.digest import write_whole
from llmjax.pipeline.tree import Problem

if TYPE_CHECKING:
    from llmjax.pipeline.loading import Pipeline, Stage
    from llmjax.pipeline.stages.calibrate import RecalibrateSection
    from llmjax.quantization.drift import Drift

log = logging.getLogger(__name__)

_FOLDER = "recalibration"


@dataclasses.dataclass(frozen=True)
class Chain:
    """The stages that are run again, by name, and what the rule is.

    Attributes:
        calibrate, quantize, gate: each takes what the one before gives.
        samples: of traffic, each time.
        rule: when.
        traffic: path of the server's log.
    """

    calibrate: str
    quantize: str
    gate: str
    samples: int
    rule: RecalibrateSection
    traffic: str


def chain_of(stages: Sequence[Stage]) -> tuple[Chain | None, list[Problem]]:
    """What a pipeline recalibrates; None for nothing, as without a server, and where it says so, what it lacks for that."""
    if not any(stage.kind.name == "calibrate" for stage in stages):
        return None, []  # the kinds below need not be imported
    from llmjax.pipeline.stages.calibrate import CalibrateSection
    from llmjax.pipeline.stages.gate import GateSection
    from llmjax.pipeline.stages.quantize import QuantizeSection
    from llmjax.pipeline.stages.serve import ServeSection

    on = {stage.name: stage for stage in stages if stage.when != "never" and stage.config is not None}
    asking = [stage for stage in on.values() if isinstance(stage.config, CalibrateSection) and stage.config.recalibrate]
    if not asking:
        return None, []
    calibrate = asking[0]

    def lacking(text: str) -> tuple[None, list[Problem]]:
        node = calibrate.node.at(("recalibrate",))
        return None, [Problem(node.origin, ("stages", calibrate.name, "recalibrate"), text)]

    if len(asking) > 1:
        return lacking(f"only one calibration can be recalibrated, and '{asking[1].name}' is to be as well")
    server = list(on.values())[-1]
    if not isinstance(server.config, ServeSection):
        return None, []  # serve is switched off, or left out for a benchmark of the same file
    if server.config.traffic is None:
        return lacking("needs 'serve' with 'traffic': that is what is calibrated from")
    engine = on.get(server.inputs.get("engine", ""))
    gate = on.get(engine.inputs.get("model", "")) if engine is not None else None
    quantize = on.get(gate.inputs.get("candidate", "")) if gate is not None and isinstance(gate.config, GateSection) else None
    if quantize is None or not isinstance(quantize.config, QuantizeSection):
        return lacking("the engine that serves must take a gate over a quantised model: only what passes one is swapped in")
    assert gate is not None
    if quantize.inputs.get("calibration") != calibrate.name:
        return lacking(f"'{quantize.name}', which is served, does not take this calibration")
    if not quantize.config.measures:
        return lacking(f"'{quantize.name}' does not depend on it: give that smoothing, max_sensitivity or max_perplexity_ratio")
    assert isinstance(calibrate.config, CalibrateSection)
    assert calibrate.config.recalibrate is not None
    chain = Chain(
        calibrate.name,
        quantize.name,
        gate.name,
        calibrate.config.samples,
        calibrate.config.recalibrate,
        str(server.config.traffic.path),
    )
    return chain, []


def with_data(chain: Chain, values: Mapping[str, Any], data: str | None) -> dict[str, Any]:
    """The `values` of `load` with which the pipeline is calibrated from this file of traffic; None for its own data."""
    if data is None:
        return dict(values)
    # one value for the section: column and template of the file's own data are not the traffic's
    kept = {name: value for name, value in values.items() if not name.startswith(f"stages.{chain.calibrate}.data.")}
    fields = {"path": data, "column": None, "template": None, "limit": None}
    return kept | {f"stages.{chain.calibrate}.data.{name}": value for name, value in fields.items()}


@dataclasses.dataclass
class State:
    """What is known of recalibrations, in a file that `/metrics` reads too. Times are Unix times.

    Attributes:
        data: the sample of traffic that the served model is calibrated with; None for the pipeline's own data.
        attempted: when a candidate was last made, whatever became of it; 0 for never.
        looked: when traffic was last found not to have drifted; 0 for never. What came before it has been looked at.
        passed, refused, failed: candidates that were swapped in, that a gate refused, and that could not be made or started.
        drift: D of each linear and of "lengths", as of the last look.
        noise: what D exceeds by chance.
    """

    data: str | None = None
    attempted: float = 0.0
    passed: int = 0
    refused: int = 0
    failed: int = 0
    drift: dict[str, float] = dataclasses.field(default_factory=dict)
    noise: float = 0.0
    looked: float = 0.0

    @classmethod
    def read(cls, path: Path) -> State:
        """What `write` left; a new one where there is nothing, or nothing that can be read, or whose data is gone."""
        try:
            found = cls(**json.loads(path.read_text("utf-8")))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError) as error:
            log.warning("%s cannot be read (%s): the pipeline's own data is used", path, error)
            return cls()
        if found.data is not None and not Path(found.data).is_file():
            log.warning("%s is gone: the pipeline's own data is used", found.data)
            found.data = None
        return found

    def write(self, path: Path) -> None:
        """Replace the file. Raises `OSError`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def state_path(pipeline: Pipeline) -> Path:
    """Where the state of a pipeline is."""
    return pipeline.artifacts / _FOLDER / f"{pipeline.name}.json"


class Workshop(Protocol):
    """What a recalibration is done with."""

    def begun(self, data: str | None) -> float | None:
        """When the calibration from this data was made; None while it is not there."""

    def sample(self, since: float) -> str | None:
        """A new file of so many requests of the traffic that came after `since`; None when there were fewer."""

    def calibrate(self, data: str) -> None:
        """Run the pipeline to its calibration. Raises `LlmjaxError`."""

    def drift(self, served: str | None, live: str) -> Drift:
        """Between the calibrations from two files. Raises `LlmjaxError`."""

    def judge(self, data: str) -> None:
        """Run the pipeline to its gate. Raises `GateRejectedError`, or another `LlmjaxError`."""

    def swap(self, data: str) -> bool:
        """Serve the model from this data; False when it could not be started and the one before serves again."""

    def forget(self, data: str) -> None:
        """Remove the file and what was made from it, but for a verdict."""


class Recalibration:
    """The policy. `look` is called every `rule.check` seconds.

    Args:
        rule: when to calibrate anew.
        workshop: what does it.
        state: is changed; `save` is called with it after each look.
        clock: Unix time.
    """

    def __init__(
        self,
        rule: RecalibrateSection,
        workshop: Workshop,
        state: State,
        save: Callable[[State], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rule = rule
        self._workshop = workshop
        self.state = state
        self._save = save
        self._clock = clock

    def look(self) -> None:
        """Calibrate anew if that is due, and swap in what passes. What fails is told and counted, and the served model stays."""
        begun = self._workshop.begun(self.state.data)
        if begun is None:
            return  # the service is still making the model it begins with
        now, since = self._clock(), max(begun, self.state.attempted)
        old = self._rule.every is not None and now - since >= self._rule.every
        if not old and self._rule.drift_above is None:
            return
        data = self._workshop.sample(since if old else max(since, self.state.looked))
        if data is None:
            log.info("recalibration: the traffic log has too few requests yet")
            return
        before, served = self.state.data, False
        try:
            why = self._reason(data, old)
            if why:
                served = self._attempt(data, why)
            else:
                self.state.looked = now
        except LlmjaxError as error:
            self.state.failed += 1
            log.error("recalibration: failed, and the served model stays: %s", error)
        finally:
            if not served:
                self._workshop.forget(data)
            self._save(self.state)  # a service that is cut off behind this begins with the new model, one before it with the old
        if served and before is not None:
            self._workshop.forget(before)

    def _reason(self, data: str, old: bool) -> str:
        """Why to calibrate anew, "" for no reason. Drift is measured and kept even where time alone is reason enough."""
        if self._rule.drift_above is None:
            return "the last calibration is old"
        self._workshop.calibrate(data)
        found = self._workshop.drift(self.state.data, data)
        self.state.drift = {**found.linears, "lengths": found.lengths}
        self.state.noise = found.noise
        above = found.above(self._rule.drift_above)
        if above:
            return f"{len(above)} of {len(self.state.drift)} drifted above {self._rule.drift_above:g}, {above[0]} most"
        name, value = found.worst
        log.info("recalibration: drift is %.3f at most (%s)", value, name)
        return "the last calibration is old" if old else ""

    def _attempt(self, data: str, why: str) -> bool:
        """Whether the candidate serves now."""
        log.info("recalibration: %s; a candidate is made", why)
        self.state.attempted = self._clock()
        try:
            self._workshop.judge(data)
        except GateRejectedError as error:
            self.state.refused += 1
            log.warning("recalibration: the gate refused the candidate, and the served model stays: %s", error)
            return False
        if not self._workshop.swap(data):
            self.state.failed += 1
            log.error("recalibration: the new model could not be started, and the one before serves again")
            return False
        self.state.data = data
        self.state.passed += 1
        log.info("recalibration: the candidate passed and serves now")
        return True


def check_service(chain: Chain | None, *, frozen: bool) -> None:
    """Raises `ConfigError` for a run that must not change what it serves."""
    if chain is not None and frozen:
        raise ConfigError(
            f"--frozen serves what the lock names, and {chain.calibrate}.recalibrate changes it: leave out one of them"
        )
