"""The `gate` stage: an INT8 model is read and heard beside the float one, and passes or not. The work is in `gate_runner.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from llmjax.errors import ConfigError
from llmjax.pipeline.sample_data import DataSection
from llmjax.pipeline.schema import InputPath, Section, StageSection, located
from llmjax.pipeline.stages import StageContext, StageInput, StageKind

if TYPE_CHECKING:
    from llmjax.quantization.gate import Limits


class LimitSection(Section):
    """One limit. Metrics that are not listed keep the limit they have."""

    null_is_a_value: ClassVar[frozenset[str]] = frozenset({"max", "min"})

    metric: Literal[
        "perplexity_ratio",
        "top1_agreement",
        "kl",
        "kl_p99",
        "kl_token",
        "block_error",
        "loop_rate",
        "loop_rate_increase",
        "exact_match_ratio",
        "arithmetic_drop",
    ] = Field(description="What is limited; docs/quality_gate.md tells of each.")
    max: float | None = Field(None, description="The candidate may have as much; null for no limit.")
    min: float | None = Field(None, description="The candidate must have as much; null for no limit.")

    @model_validator(mode="after")
    def _check(self) -> LimitSection:
        from llmjax.quantization.gate import Limits

        try:
            Limits.of([self.as_mapping()])
        except ConfigError as error:
            raise located(str(error)) from None
        return self

    def as_mapping(self) -> dict[str, Any]:
        """As `Limits.of` takes it."""
        return {"metric": self.metric} | {name: getattr(self, name) for name in ("max", "min") if name in self.model_fields_set}


class GateSection(StageSection):
    """Compare a candidate model with its baseline on held-out text, and let through what is good enough."""

    baseline: str | None = Field(None, description="Stage that gives the model to compare with.")
    candidate: str | None = Field(None, description="Stage that gives the model that may take its place.")
    data: DataSection = Field(description="Texts that both read: held out, none of those calibrated with.")
    sequence_length: int = Field(512, ge=2, description="Tokens of a text that are read, at most.")
    outputs: int = Field(
        32, ge=0, description="Open outputs of each model, searched for loops; 0 with a loop_rate_increase of max: null."
    )
    prompts: DataSection | None = Field(
        None, description="What they answer; by default they go on from the beginnings of the texts."
    )
    output_tokens: int = Field(96, ge=1, description="Tokens of an open output: short ones hide loops.")
    tasks: InputPath | None = Field(
        None, description='JSONL file of tasks with known answers: {"prompt": …, "expected": …} or "messages" for "prompt".'
    )
    arithmetic: int = Field(0, ge=0, description="Sums that both are asked, made from `seed`.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Of the sums, and of which prompts are asked.")
    limits: list[LimitSection] = Field(
        default_factory=list, description="Limits other than the defaults; a metric that is listed must be measured."
    )
    min_tokens: int = Field(1000, ge=1, description="Tokens of text that must have been read.")
    min_outputs: int = Field(16, ge=1, description="Outputs of a kind that must have been written, where one of that kind is.")
    on_fail: Literal["stop", "fallback"] = Field(
        "stop",
        description="When the candidate is refused: stop blocks the stages that take the gate's model; fallback gives them the "
        "baseline. Either way the exit code is 3.",
    )

    @model_validator(mode="after")
    def _check(self) -> GateSection:
        seen: set[str] = set()
        for index, limit in enumerate(self.limits):
            if limit.metric in seen:
                raise located(f"the limit of {limit.metric} is given twice", "limits", index)
            seen.add(limit.metric)
        required = self.gate_limits().required
        loops = sorted(required & {"loop_rate", "loop_rate_increase"})
        for names, field, given in (
            (loops, "outputs", self.outputs > 0),
            (sorted(required & {"exact_match_ratio"}), "tasks", self.tasks is not None),
            (sorted(required & {"arithmetic_drop"}), "arithmetic", self.arithmetic > 0),
        ):
            if names and not given:
                raise located(
                    f"{names[0]} has a limit, which needs '{field}'; lift it with {{metric: {names[0]}, ...: null}}", field
                )
        return self

    def gate_limits(self) -> Limits:
        """The limits as the gate takes them."""
        from llmjax.quantization.gate import Limits

        return Limits.of([limit.as_mapping() for limit in self.limits], min_tokens=self.min_tokens, min_outputs=self.min_outputs)


class GateKind(StageKind[GateSection]):
    """Gives a model in memory's stead: the candidate's or the baseline's reference. The verdict is kept in the store, so that the
    same two models are not compared again on every run; judged they are, even where no later stage asks."""

    name = "gate"
    version = 2
    section = GateSection
    gives = "model"
    inputs = (StageInput("baseline", "model"), StageInput("candidate", "model"))
    guards = ("candidate",)

    def run(self, context: StageContext[GateSection]) -> Any:
        """The candidate, a `Rejection` with the baseline, or `GateRejectedError`."""
        from llmjax.pipeline.gate_runner import run_gate

        return run_gate(context)

    def summary(self, value: Any) -> Mapping[str, Any]:
        """Which model goes on."""
        return {} if value.name is None else {"model": value.name}


KIND = GateKind()
