"""The `tune` stage: which temperature of the draft, and how many tokens. The work is in `pipeline/tune_runner.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from llmjax.pipeline.schema import InputPath, OneOrMore, StageSection, located
from llmjax.pipeline.stages import StageContext, StageInput, StageKind
from llmjax.pipeline.stages.batch import SamplingSection


class TuneSection(StageSection):
    """Measure on prompts of your own what speculative decoding gives, and find its best settings; docs/speculative.md."""

    engine: str | None = Field(None, description="Engine stage, with speculative decoding; by default the only earlier one.")
    prompts: InputPath = Field(description="JSONL file as of a batch's input.")
    limit: int = Field(16, ge=1, description="Prompts that are asked: the first so many.")
    output_tokens: int = Field(128, ge=2, description="Tokens of an answer, at most.")
    temperatures: Annotated[list[float], OneOrMore] = Field(
        default_factory=lambda: [0.4, 0.6, 0.8, 1.0, 1.2],
        description="Temperatures of the draft to try, relative to the requests'; of no effect on n-grams and greedy requests.",
    )
    defaults: SamplingSection = Field(
        default_factory=lambda: SamplingSection.model_validate({}),
        description="Sampling settings for prompts that leave them out.",
    )

    @model_validator(mode="after")
    def _check(self) -> TuneSection:
        if not self.temperatures:
            raise located("give at least one temperature", "temperatures")
        for index, temperature in enumerate(self.temperatures):
            if temperature <= 0:
                raise located(f"must be above 0, got {temperature:g}", "temperatures", index)
        return self


class TuneKind(StageKind[TuneSection]):
    """Answers the same prompts with every candidate, one after the other, in the engine that there is: nothing is compiled."""

    name = "tune"
    section = TuneSection
    gives = "report"
    inputs = (StageInput("engine", "engine"),)

    def run(self, context: StageContext[TuneSection]) -> Any:
        """A `Tuning`. Raises `ConfigError` for an engine that does not draft, or prompts of which none can be asked."""
        from llmjax.pipeline.tune_runner import run_tune

        return run_tune(context)

    def summary(self, value: Any) -> Mapping[str, Any]:
        """Tables of what was measured and expected, and the line to write."""
        return dict(value.summary())


KIND = TuneKind()
