"""What a recalibration works with: runs of the pipeline in processes of their own, and what these leave in the store.

The serving `Workshop`. Runs are on the CPU, whatever serves, so that no device memory and no device time is taken from it; the
dtypes are those of the machine that serves, and so the stages' keys are the same. Host only, and imports no JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax.errors import GateRejectedError, LlmjaxError
from llmjax.pipeline.planning import Plan, plan
from llmjax.pipeline.recalibration import Chain, state_path, with_data
from llmjax.pipeline.store import MANIFEST, Store
from llmjax.pipeline.stored_calibration import StoredCalibration
from llmjax.pipeline.traffic_sample import write_sample

if TYPE_CHECKING:
    from llmjax.pipeline.loading import Pipeline
    from llmjax.quantization.drift import Drift

log = logging.getLogger(__name__)

Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Runs:
    """See `Workshop`.

    Attributes:
        chain: the stages.
        values: of `load`, as the service was started.
        load: the pipeline with such values.
        run: runs the pipeline with such values to a stage, waits, and gives the exit code.
        swap_to: serve the pipeline with such values; False when that could not be started.
    """

    chain: Chain
    values: Values
    load: Callable[[Values], Pipeline]
    run: Callable[[Values, str], int]
    swap_to: Callable[[Values], bool]

    def begun(self, data: str | None) -> float | None:
        """See `Workshop`."""
        planned = self._planned(data)
        try:
            return (self._folder(planned, self.chain.calibrate) / MANIFEST).stat().st_mtime
        except FileNotFoundError:
            return None

    def sample(self, since: float) -> str | None:
        """See `Workshop`."""
        pipeline = self.load(self.values)
        target = state_path(pipeline).with_name(f"{pipeline.name}-{time.time_ns()}.jsonl")
        found = write_sample(Path(self.chain.traffic), target, count=self.chain.samples, since=since)
        return str(target) if found else None

    def calibrate(self, data: str) -> None:
        """See `Workshop`."""
        self._run(data, self.chain.calibrate)

    def drift(self, served: str | None, live: str) -> Drift:
        """See `Workshop`."""
        from llmjax.quantization.drift import drift

        one, other = (
            StoredCalibration.open(self._folder(self._planned(data), self.chain.calibrate)).statistics()
            for data in (served, live)
        )
        return drift(one, other)

    def judge(self, data: str) -> None:
        """See `Workshop`."""
        self._run(data, self.chain.gate)
        folder = self._folder(self._planned(data), self.chain.gate)
        if not (folder / MANIFEST).is_file():
            raise LlmjaxError(f"the run left no verdict in {folder}")

    def swap(self, data: str) -> bool:
        """See `Workshop`."""
        return self.swap_to(with_data(self.chain, self.values, data))

    def forget(self, data: str) -> None:
        """See `Workshop`. What cannot be removed is told."""
        from llmjax.pipeline.stages.calibrate import partial_folder

        try:
            planned = self._planned(data)
            store, keys = _store(planned), {stage.name: str(stage.key) for stage in planned.stages}
            store.remove("calibrate", keys[self.chain.calibrate])
            store.remove("quantize", keys[self.chain.quantize])
            shutil.rmtree(partial_folder(planned.pipeline.artifacts, keys[self.chain.calibrate]), ignore_errors=True)
        except LlmjaxError as error:
            log.warning("recalibration: what was made from %s could not be removed: %s", data, error)
        try:
            Path(data).unlink()
        except OSError as error:
            log.warning("recalibration: %s could not be removed: %s", data, error)

    def forget_all_but(self, served: str | None) -> None:
        """`forget` the samples of looks that were cut off: nobody else would ever remove these copies of traffic."""
        pipeline = self.load(self.values)
        ours = re.compile(rf"{re.escape(pipeline.name)}-\d+\.jsonl")
        for path in sorted(state_path(pipeline).parent.glob("*.jsonl")):
            if ours.fullmatch(path.name) and str(path) != served:
                self.forget(str(path))

    def _run(self, data: str, until: str) -> None:
        planned = self._planned(data)
        values = with_data(self.chain, self.values, data) | {
            "name": f"{planned.pipeline.name}-recalibration",  # so that it has a lock file of its own
            "runtime.platform": "cpu",
            "runtime.memory_fraction": None,
        }
        wanted = self._wanted(planned.pipeline)
        for stage in itertools.takewhile(lambda stage: stage.name != self.chain.gate, planned.stages):
            dtype = getattr(stage.config, "dtype", None)
            if stage.name not in wanted:  # a batch, say
                values[f"stages.{stage.name}.when"] = "never"
            elif stage.kind == "model" and dtype is not None:
                values[f"stages.{stage.name}.dtype"] = dtype
        code = self.run(values, until)
        if code == GateRejectedError.exit_code:
            raise GateRejectedError(f"its verdict and report are in {self._folder(planned, self.chain.gate)}")
        if code:
            raise LlmjaxError(f"the run to '{until}' ended with code {code}: see the log")

    def _wanted(self, pipeline: Pipeline) -> set[str]:
        """The gate, and every stage that it depends on."""
        found: set[str] = set()
        todo = [self.chain.gate]
        while todo:
            stage = pipeline.stage(todo.pop())
            found.add(stage.name)
            todo += [name for name in (*stage.inputs.values(), *stage.needs) if name not in found]
        return found

    def _planned(self, data: str | None) -> Plan:
        return plan(self.load(with_data(self.chain, self.values, data)))

    @staticmethod
    def _folder(planned: Plan, name: str) -> Path:
        stage = next(stage for stage in planned.stages if stage.name == name)
        return _store(planned).folder(stage.kind, str(stage.key))


def _store(planned: Plan) -> Store:
    return Store(planned.pipeline.artifacts / "store")
