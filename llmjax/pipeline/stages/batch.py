"""The `batch` stage: a file of requests in, a file of results out. The work is in `pipeline/batch_runner.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from llmjax.errors import RequestError
from llmjax.pipeline.schema import InputPath, OutputPath, StageSection, attribute_docs, from_dataclass, located
from llmjax.pipeline.stages import StageContext, StageInput, StageKind
from llmjax.sampling_params import SamplingParams

_Sampling = from_dataclass(SamplingParams, "SamplingSection", attribute_docs(SamplingParams))


class SamplingSection(_Sampling):  # type: ignore[misc, valid-type]  # made from the dataclass, which stays the one truth
    """Sampling settings for requests that do not say otherwise."""

    @field_validator("*")
    @classmethod
    def _check_one(cls, value: Any, info: ValidationInfo) -> Any:
        """Each setting alone, so that every wrong one is reported."""
        neutral: dict[str, Any] = {"max_tokens": None, "prompt_logprobs": 0}
        try:
            SamplingParams(**{**neutral, str(info.field_name): value})
        except RequestError as error:
            raise located(str(error)) from None
        return value

    @model_validator(mode="after")
    def _check_together(self) -> SamplingSection:
        try:
            SamplingParams(**self.as_mapping())
        except RequestError as error:
            raise located(str(error), *([error.param] if error.param else [])) from None
        return self

    def as_mapping(self) -> dict[str, Any]:
        """The settings that were given, by `SamplingParams` field."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


def _no_number(value: Any) -> Any:
    """1 equals True in Python, and would be taken for it."""
    if type(value) in (int, float):
        raise located(f"expected true, false or replace, got {value}")
    return value


class BatchConfig(StageSection):
    """Answer a file of requests. Running again never loses or doubles a result."""

    engine: str | None = Field(None, description="Engine stage that answers; by default the only earlier one.")
    input: InputPath = Field(
        description='JSONL file: OpenAI batch lines, or one prompt a line (a JSON string, {"prompt": …} or {"messages": […]}).'
    )
    output: OutputPath = Field(description="JSONL file of results, one a request, in the order they finish.")
    errors: OutputPath | None = Field(
        None, description="JSONL file for the records of lines that failed; by default they are in the output too."
    )
    format: Literal["openai", "prompts"] | None = Field(
        None, description="Form of the input; by default told from its first line."
    )
    resume: Annotated[Literal[True, False, "replace"], BeforeValidator(_no_number)] = Field(
        False,
        description="What to do with an output that exists: true does what is missing, replace starts over, false is an error.",
    )
    checkpoint_every: int = Field(
        16, ge=1, description="Results between two fsyncs of the output: at most so many are computed again after a power cut."
    )
    defaults: SamplingSection = Field(
        default_factory=lambda: SamplingSection.model_validate({}),
        description="Sampling settings for requests that leave them out.",
    )
    tool_parser: Literal["auto", "hermes", "llama", "none"] = Field(
        "auto",
        description="How the model writes calls of tools: hermes (Qwen and others), llama (3.1 to 3.3), auto for what its chat "
        "template teaches, none to hand its text on as it is.",
    )


class BatchKind(StageKind[BatchConfig]):
    """Runs on every `run`: what to do with an existing output is the file's own `resume`."""

    name = "batch"
    section = BatchConfig
    gives = "files"
    inputs = (StageInput("engine", "engine"),)

    def run(self, context: StageContext[BatchConfig]) -> Any:
        """Answers the input file. A bad line is a record in the output, not a failure of the stage."""
        return answer_file(context.inputs["engine"], context)

    def summary(self, value: Any) -> Mapping[str, Any]:
        """Counts and speed, as the runner tells them."""
        return dict(value.summary())


def answer_file(llm: Any, context: StageContext[BatchConfig]) -> Any:
    """The one call into the batch runner; imported here because it needs the engine."""
    from llmjax.pipeline.batch_runner import run_batch

    config = context.config

    def progress(done: int, total: int | None) -> None:
        context.reporter.progress(context.name, done, total)

    return run_batch(
        llm,
        input=config.input,
        output=config.output,
        errors=config.errors,
        format=config.format,
        resume=config.resume,
        checkpoint_every=config.checkpoint_every,
        defaults=config.defaults.as_mapping(),
        tool_parser=config.tool_parser,
        progress=progress,
    )


KIND = BatchKind()
