"""The `quantize` stage: an INT8 model from a float one, in the store. The work is in `pipeline/quantize_runner.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, computed_field, field_validator

from llmjax.pipeline.model_source import StoredModel
from llmjax.pipeline.schema import DType, OutputPath, Section, StageSection, located
from llmjax.pipeline.stages import StageContext, StageInput, StageKind
from llmjax.pipeline.tree import KeyPath

Alpha = Annotated[float, Field(ge=0, le=1)]

_MEASURING = ("smoothing", "max_sensitivity", "max_perplexity_ratio")


class GranularitySection(Section):
    """What shares a scale."""

    weights: Literal["channel", "tensor"] = Field(
        "channel", description="channel: an output channel; tensor: a whole matrix, which loses much more."
    )
    activations: Literal["token", "tensor"] = Field(
        "token", description="token: each token has its own scale, so that no request changes another. tensor is not supported."
    )

    @field_validator("activations")
    @classmethod
    def _by_token(cls, value: str) -> str:
        if value != "token":
            raise located("a scale for the whole tensor would let requests change one another; only 'token' is supported")
        return value


class QuantizeSection(StageSection):
    """Make an INT8 model of a float one. It lies in the store, and loading it needs no calibration."""

    model: str | None = Field(None, description="Stage that gives the float model; by default the only earlier one.")
    calibration: str | None = Field(
        None, description="Stage that gives the calibration; by default the only earlier one, if there is any."
    )
    scheme: Literal["w8a16", "w8a8"] = Field(
        description="w8a16 rounds weights alone; w8a8 also what they multiply, which is faster for many tokens and less exact."
    )
    granularity: GranularitySection = Field(
        default_factory=lambda: GranularitySection.model_validate({}), description="What shares a scale."
    )
    dtypes: dict[str, Literal["int8"] | DType] = Field(
        {"linear": "int8"},
        description="Group (linear, attention, mlp, embeddings, head) or pattern to dtype; a later one has the word over an "
        "earlier one. What none matches stays as it is.",
    )
    keep: dict[str, DType] = Field(
        default_factory=dict,
        description='What stays in a float dtype, by pattern, as in {"layers.0": bfloat16, "mlp.down": bfloat16}; it has the '
        "word over `dtypes` and the measurement. Norms are float32 always.",
    )
    smoothing: Literal["fitted"] | Alpha | None = Field(
        None,
        description="Moves outliers of activations into the weights. fitted: so much of each channel's as is expected to cost "
        "least, searched for on samples of the calibration, which takes minutes; a number: SmoothQuant's alpha, 0.5 say. Needs a "
        "calibration. Off by default.",
    )
    max_sensitivity: float | None = Field(
        None,
        ge=0,
        description="Linears whose output, when they alone are quantised, is off by more than this (relative L2) stay as they "
        "are. Needs a calibration. By default nothing is measured.",
    )
    max_perplexity_ratio: float | None = Field(
        None,
        ge=1,
        description="The worst linears stay as they are until the model's perplexity is at most so many times the float one's "
        "(1.01 say), on samples of the calibration behind those of `sensitivity_samples`. Needs a calibration. Off by default.",
    )
    sensitivity_samples: int = Field(
        32, ge=1, description="Of the calibration's samples, those that sensitivity is measured with, if it is."
    )
    kl_samples: int = Field(
        1, ge=0, description="Of those, the ones that show what a linear does to the whole model: two passes of it a layer, each."
    )
    export: OutputPath | None = Field(
        None,
        description="Folder to write the model to as safetensors as well, in compressed-tensors' layout, when it is made. It "
        "must not exist.",
    )

    @field_validator("smoothing", mode="before")
    @classmethod
    def _fitted_or_alpha(cls, value: Any) -> Any:
        """One error, where the union would give one for each of its kinds."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value in (None, "fitted") or (number and 0 <= value <= 1):
            return value
        raise located(f"must be fitted, or a number from 0 to 1, got {value!r}")

    @property
    def measures(self) -> bool:
        """Whether what a calibration saw changes the model."""
        return any(getattr(self, name) is not None for name in _MEASURING)

    @computed_field  # type: ignore[prop-decorator]  # as pydantic's documentation has it
    @property
    def order(self) -> list[str]:
        """The patterns in their order, which is part of the key: a later one has the word."""
        return [*self.dtypes, *self.keep]


class QuantizeKind(StageKind[QuantizeSection]):
    """A model in the store, with a report."""

    name = "quantize"
    section = QuantizeSection
    gives = "model"
    inputs = (StageInput("model", "model"), StageInput("calibration", "calibration", optional=True))
    skippable = True

    def check_inputs(self, config: QuantizeSection, inputs: Mapping[str, str]) -> Sequence[tuple[KeyPath, str]]:
        """Smoothing and the measurement need a calibration."""
        needing = [name for name in _MEASURING if getattr(config, name) is not None]
        if "calibration" in inputs:
            return ()
        return [((name,), "needs a calibration, and no earlier stage gives one: add a calibrate stage") for name in needing]

    def run(self, context: StageContext[QuantizeSection]) -> StoredModel:
        """Writes the model and its report."""
        from llmjax.pipeline.quantize_runner import run_quantize

        return run_quantize(context)

    def load(self, context: StageContext[QuantizeSection]) -> StoredModel:
        """A reference: the weights are loaded by the engine that takes them."""
        assert context.folder is not None
        return StoredModel.open(context.folder, context.key)

    def summary(self, value: StoredModel) -> Mapping[str, Any]:
        """What became of how much."""
        return value.figures


KIND = QuantizeKind()
