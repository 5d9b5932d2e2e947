"""The `calibrate` stage: a float model is run over samples, and what goes into its linears is kept in the store."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from llmjax.pipeline.model_source import open_model
from llmjax.pipeline.sample_data import DataSection, read_data
from llmjax.pipeline.schema import Duration, Section, StageSection, located
from llmjax.pipeline.stages import StageContext, StageInput, StageKind
from llmjax.pipeline.stored_calibration import StoredCalibration

CHECKPOINT_EVERY = 16
"""Samples between two checkpoints, about: at most so many are run again after an interruption."""


def partial_folder(artifacts: Path, key: str) -> Path:
    """Where a calibration that is not done has its checkpoint."""
    return artifacts / "partial" / f"calibrate-{key}"


class RecalibrateSection(Section):
    """When a server that this pipeline ends with calibrates anew, from its own traffic log. See docs/int8.md."""

    drift_above: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Calibrate anew when activations or lengths of the traffic differ by more than this from those calibrated "
        "with: 0 is alike, 1 apart altogether. By default drift is not measured.",
        json_schema_extra={"keyed": False},
    )
    every: Duration | None = Field(
        None,
        gt=0,
        description="Calibrate anew when the last time is so long ago. By default never for that reason.",
        json_schema_extra={"keyed": False},
    )
    check: Duration = Field(
        21600.0,
        gt=0,
        description="Time from one look at the traffic to the next; each costs a calibration where drift is measured.",
        json_schema_extra={"keyed": False},
    )

    @model_validator(mode="after")
    def _says_when(self) -> RecalibrateSection:
        if self.drift_above is None and self.every is None:
            raise located("say when: give drift_above, every or both")
        return self


class CalibrateSection(StageSection):
    """Run a float model over samples and keep the ranges of what goes into its linears."""

    model: str | None = Field(None, description="Stage that gives the float model; by default the only earlier one.")
    data: DataSection = Field(description="Texts like those the model will meet: a traffic log is best.")
    samples: int = Field(256, ge=1, description="Samples that are run, chosen by `seed`; all when there are fewer.")
    sequence_length: int = Field(1024, ge=1, description="Tokens of a sample that are run, at most.")
    observer: Literal["absmax", "percentile", "mse"] = Field(
        "absmax",
        description="How a range is taken from what was seen: its largest magnitude, the 99.9th percentile, or what loses least. "
        "It is for the report; the scales of activations are taken token by token as they come.",
    )
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Of which samples are run.")
    recalibrate: RecalibrateSection | None = Field(
        None,
        description="Calibrate, quantise and judge again from the traffic of the server at the end of the pipeline, beside it, "
        "and serve what passes the gate. Off by default.",
        json_schema_extra={"keyed": False},
    )


class CalibrateKind(StageKind[CalibrateSection]):
    """Statistics in the store. A run that was cut off goes on where it was."""

    name = "calibrate"
    section = CalibrateSection
    gives = "calibration"
    inputs = (StageInput("model", "model"),)
    skippable = True

    def run(self, context: StageContext[CalibrateSection]) -> StoredCalibration:
        """Reads the samples, then runs them. Its checkpoint is beside the store, by the stage's key, until it is done."""
        from llmjax.quantization.calibrate import CalibrateSettings, calibrate

        assert context.folder is not None
        config, source = context.config, context.inputs["model"]
        loaded = open_model(source, context)
        tokenizer = source.tokenizer_files(loaded).open()
        read = read_data(config.data, tokenizer, context.reporter, count=config.samples, seed=config.seed)
        partial = partial_folder(context.artifacts, context.key)
        if context.again:
            shutil.rmtree(partial, ignore_errors=True)
        statistics = calibrate(
            loaded.params,
            loaded.config,
            read.ids,
            CalibrateSettings(sequence_length=config.sequence_length, seed=config.seed, checkpoint_every=CHECKPOINT_EVERY),
            model_identity=context.key,
            directory=partial,
            progress=lambda done, total: context.reporter.progress(context.name, done, total),
        )
        figures = {"samples": statistics.samples, "tokens": statistics.tokens, "cut": statistics.cut, "of": read.seen}
        stored = StoredCalibration(context.folder, source.key, config.observer, config.sequence_length, figures)
        stored.write(statistics, [sample for sample in read.ids if sample])
        shutil.rmtree(partial, ignore_errors=True)
        return stored

    def load(self, context: StageContext[CalibrateSection]) -> StoredCalibration:
        """What it says beside the statistics; those are read when they are asked for."""
        assert context.folder is not None
        return StoredCalibration.open(context.folder)

    def summary(self, value: StoredCalibration) -> Mapping[str, Any]:
        """What was run."""
        return dict(value.figures)


KIND = CalibrateKind()
