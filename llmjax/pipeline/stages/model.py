"""The `model` stage: which weights, from where, in which dtype. Gives a reference; an engine loads it when it needs it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from llmjax.errors import LlmjaxError, ModelError
from llmjax.model.checkpoint.presets import PRESETS
from llmjax.model.config import ModelConfig, RopeScaling
from llmjax.pipeline.digest import Digests, distribution_file
from llmjax.pipeline.model_source import TokenizerFiles
from llmjax.pipeline.schema import DType, InputPath, Section, StageSection, attribute_docs, from_dataclass, located
from llmjax.pipeline.stages import Runtime, StageContext, StageKind

if TYPE_CHECKING:
    from llmjax.model.checkpoint.load import LoadedModel

_SHA256 = re.compile(r"[0-9a-f]{64}")

_Shape = from_dataclass(ModelConfig, "ShapeSection", attribute_docs(ModelConfig), ("dtype",))


class ShapeSection(_Shape):  # type: ignore[misc, valid-type]  # made from the dataclass, which stays the one truth
    """The shape of a decoder. Its dtype is the stage's own `dtype`."""

    refused: ClassVar[Mapping[str, str]] = {"dtype": "write the dtype beside 'source', not in the shape"}

    @model_validator(mode="after")
    def _check(self) -> ShapeSection:
        self.shape("float32")
        return self

    def shape(self, dtype: str) -> ModelConfig:
        """The shape as the model layer's own class."""
        values = {name: getattr(self, name) for name in sorted(self.model_fields_set)}
        required = [f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING]
        if missing := [name for name in required if name not in values]:
            raise located(f"missing {', '.join(missing)}")
        if isinstance(values.get("sliding_windows"), list):
            values["sliding_windows"] = tuple(values["sliding_windows"])
        scaling = values.get("rope_scaling")
        try:
            if isinstance(scaling, dict):
                values["rope_scaling"] = RopeScaling(**scaling)
            return ModelConfig(**values, dtype=dtype)
        except (LlmjaxError, TypeError) as error:
            raise located(str(error)) from None


class RandomSection(Section):
    """Random weights of a given shape, made on the device: no files needed. For measuring, not for reading the output."""

    preset: str | None = Field(None, description=f"A well-known shape: {', '.join(PRESETS)}. Either this or `config`.")
    config: ShapeSection | None = Field(None, description="A shape of your own. Either this or `preset`.")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="Seed of the weights.")
    scale: float | None = Field(
        None, gt=0, description="Size of the weights; by default small ones, as other engines' dummy loaders have."
    )
    tokenizer: InputPath | None = Field(
        None,
        description="A model folder or .gguf file whose tokenizer to use, so that texts can be asked for; by default there is "
        "none, and prompts are token ids.",
    )

    @model_validator(mode="after")
    def _one_shape(self) -> RandomSection:
        _exactly_one(self, ("preset", "config"))
        if self.preset is not None and self.preset not in PRESETS:
            raise located(f"expected one of {', '.join(PRESETS)}, got '{self.preset}'", "preset")
        return self


class SourceSection(Section):
    """Where the weights come from: exactly one of `path`, `package` and `random`."""

    refused: ClassVar[Mapping[str, str]] = {
        "hub": "downloads are not supported; give 'path', a folder or file on this machine",
        "revision": "a revision belongs to a hub, and downloads are not supported; give 'path', and 'sha256' to pin the file",
    }

    path: InputPath | None = Field(
        None, description="A Hugging Face folder (safetensors), a .gguf file or an orbax checkpoint on this machine."
    )
    package: str | None = Field(
        None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="An installed Python package that carries a .gguf file."
    )
    random: RandomSection | None = Field(None, description="Random weights, no files.")
    sha256: str | dict[str, str] | None = Field(
        None,
        description="Digest that the weights must have: of the file that `path` or `package` means, "
        "or {file name: digest} for files of a folder. Reads the whole file once.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> SourceSection:
        _exactly_one(self, ("path", "package", "random"))
        if self.sha256 is not None and self.random is not None:
            raise located("random weights have no file to check", "sha256")
        for name, digest in self.expected_digests().items():
            if _SHA256.fullmatch(digest) is None:
                at = ("sha256", name) if isinstance(self.sha256, dict) else ("sha256",)
                raise located("expected 64 lower case hexadecimal digits", *at)
        return self

    def expected_digests(self) -> dict[str, str]:
        """File name (below the folder; "" for the one file itself) to the digest it must have."""
        if self.sha256 is None:
            return {}
        return {"": self.sha256} if isinstance(self.sha256, str) else dict(self.sha256)


class ModelSection(StageSection):
    """A model's weights and tokenizer."""

    source: SourceSection = Field(description="Where the weights come from.")
    dtype: DType | None = Field(
        None, description="Dtype of weights, activations and cache; by default bfloat16 on a GPU, float32 on a CPU."
    )
    chat_template: InputPath | None = Field(None, description="A Jinja file to use instead of the model's own chat template.")

    @model_validator(mode="after")
    def _template_needs_a_tokenizer(self) -> ModelSection:
        random = self.source.random
        if self.chat_template is not None and random is not None and random.tokenizer is None:
            raise located("random weights have no tokenizer, so that a chat template means nothing", "chat_template")
        return self


@dataclasses.dataclass(frozen=True)
class ModelReference:
    """A model that is not loaded yet, a `ModelSource`. Each call of `load` gives weights of its own.

    Attributes:
        section: the stage's configuration, with its dtype decided.
        key: the stage's key.
        name: None for what `LLM` calls a model of that source.
    """

    section: ModelSection
    key: str = ""
    name: str | None = None

    def load(self, digests: Digests) -> LoadedModel:
        """The model; its weights are still being read when this returns (`PendingParams`). Starts JAX.

        Raises `ModelError` for files that are missing or not those `sha256` names.
        """
        from llmjax.model.checkpoint.load import load_model

        source = self.section.source
        self._verify(digests)
        if source.random is None:
            return load_model(path=source.path, package=source.package, dtype=self.section.dtype, wait=False)
        shape: str | ModelConfig | None = source.random.preset
        if source.random.config is not None:
            shape = source.random.config.shape(self.section.dtype or "float32")
        options: dict[str, Any] = {} if source.random.scale is None else {"scale": source.random.scale}
        return load_model(random=shape, dtype=self.section.dtype, seed=source.random.seed, wait=False, **options)

    def tokenizer_files(self, loaded: LoadedModel) -> TokenizerFiles:
        """Beside the weights, with the stage's own chat template; random weights may borrow a tokenizer.

        Raises `ModelError` for a template that cannot be read.
        """
        random, template = self.section.source.random, self.section.chat_template
        place = loaded.path if random is None else random.tokenizer
        return TokenizerFiles(None if place is None else Path(place), None if template is None else read_template(template))

    def _verify(self, digests: Digests) -> None:
        source = self.section.source
        for name, expected in source.expected_digests().items():
            root = Path(source.path) if source.path is not None else distribution_file(str(source.package), ".gguf")[0]
            path = root / name if name else root
            if not path.is_file():
                raise ModelError(f"sha256: {path} is not a file; name files of a folder as {{file name: digest}}")
            found = digests.content(path)
            if found != expected:
                raise ModelError(f"{path} has sha256 {found}, the pipeline expects {expected}: it is not the same file")


class ModelKind(StageKind[ModelSection]):
    """A reference in memory; the weights themselves are loaded by the engine that takes them."""

    name = "model"
    section = ModelSection
    gives = "model"
    live = True

    def resolve(self, config: ModelSection, runtime: Runtime) -> ModelSection:
        """The dtype of this machine, when the file leaves it open."""
        if config.dtype is not None:
            return config
        return config.model_copy(update={"dtype": "bfloat16" if runtime.platform == "cuda" else "float32"})

    def digest_files(self, config: ModelSection, digests: Digests) -> Mapping[str, str]:
        """A `sha256` in the file stands for the file it names; a package's file is known by what its installer recorded."""
        source = config.source
        if isinstance(source.sha256, str):
            return {"source.path" if source.path is not None else "source.package": f"sha256:{source.sha256}"}
        if source.package is not None:
            return {"source.package": distribution_file(source.package, ".gguf")[1]}
        if source.path is not None and source.sha256 is not None:
            return {"source.path": digests.path(Path(source.path), source.sha256)}
        return {}

    def run(self, context: StageContext[ModelSection]) -> ModelReference:
        """Checks that the files are there. Loading is left to the engine."""
        source = context.config.source
        if source.path is not None and not Path(source.path).exists():
            raise ModelError(f"{source.path}: no such file or folder")
        if source.package is not None:
            distribution_file(source.package, ".gguf")
        return ModelReference(context.config, context.key)


def read_template(path: str) -> str:
    """The text of a Jinja file. Raises `ModelError` for one that cannot be read."""
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {path} cannot be read: {error}") from None


def _exactly_one(section: Section, names: tuple[str, ...]) -> None:
    present = [name for name in names if getattr(section, name) is not None]
    if not present:
        raise located(f"give exactly one of {', '.join(names)}")
    if len(present) > 1:
        raise located(f"give exactly one of {', '.join(names)}, not {' and '.join(present)}; null deletes one", present[-1])


KIND = ModelKind()
