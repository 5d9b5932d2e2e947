"""`ModelSource`: what a stage that gives a model hands on, and `StoredModel`: one that lies in the store.

Owns what a stored model needs beside its weights: its name, tokenizer and chat template. Must not know who quantised it, and why.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmjax.errors import ModelError, StoreError
from llmjax.pipeline.digest import Digests, write_whole

if TYPE_CHECKING:
    from llmjax.engine.tokenizer import Tokenizer
    from llmjax.model.checkpoint.load import LoadedModel
    from llmjax.pipeline.stages import StageContext

_ABOUT = "model.json"
_WEIGHTS = "model"
_TOKENIZER = "tokenizer.json"


class ModelSource(Protocol):
    """A model that is not loaded yet. Each call of `load` gives weights of its own."""

    @property
    def key(self) -> str:
        """The key of the stage that gives it."""

    @property
    def name(self) -> str | None:
        """What it is called; None for what an engine calls it."""

    def load(self, digests: Digests) -> LoadedModel:
        """The model; its weights may still be being read (`PendingParams`). Starts JAX. Raises `ModelError`."""

    def tokenizer_files(self, loaded: LoadedModel) -> TokenizerFiles:
        """Where the tokenizer of what `load` gave is. Raises `ModelError` for a template that cannot be read."""


@dataclasses.dataclass(frozen=True)
class TokenizerFiles:
    """Where a tokenizer is: a folder or a GGUF file, None for no tokenizer; and the text of a chat template that is used instead
    of its own, None for that one."""

    place: Path | None = None
    chat_template: str | None = None

    def open(self) -> Tokenizer | None:
        """The tokenizer; None where there is none. Raises `ModelError` for one that cannot be read."""
        from llmjax.engine.tokenizer import load_tokenizer

        if self.place is None:
            return None
        tokenizer = load_tokenizer(self.place)
        if self.chat_template is not None:
            tokenizer.use_chat_template(self.chat_template)
        return tokenizer


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """A model in the store, a `ModelSource`: the weights in orbax's format, and where its tokenizer is.

    Attributes:
        folder: of the stage's result.
        key: of the stage.
        name: what it is called.
        files: of its tokenizer. A folder's are copied into the store, a GGUF file stays where it is.
        figures: for people, of a model that was just made.
    """

    folder: Path
    key: str
    name: str
    files: TokenizerFiles
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, key: str) -> StoredModel:
        """What `write` left in a folder. Raises `StoreError` for one that is damaged."""
        path = folder / _ABOUT
        try:
            about: dict[str, Any] = json.loads(path.read_text("utf-8"))
            place = about["tokenizer"]
            files = TokenizerFiles(None if place is None else folder / place, about["chat_template"])
            return cls(folder, key, about["name"], files)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is damaged ({type(error).__name__}); delete {folder} to make it again") from None

    @property
    def weights(self) -> Path:
        """The orbax folder, which `load_model` reads as well."""
        return self.folder / _WEIGHTS

    def load(self, digests: Digests) -> LoadedModel:
        """See `ModelSource`: bit for bit what was written."""
        from llmjax.model.checkpoint.load import load_model
        from llmjax.model.checkpoint.orbax import read_orbax_config

        config, _ = read_orbax_config(self.weights)
        loaded = load_model(path=self.weights, dtype=config.dtype, wait=False)
        return loaded if self.files.place is not None else dataclasses.replace(loaded, path=None)  # nobody looks for a tokenizer

    def tokenizer_files(self, loaded: LoadedModel) -> TokenizerFiles:
        """See `ModelSource`."""
        place = self.files.place
        if place is not None and not place.exists():
            raise ModelError(f"{place} is gone, and {self.name} has its tokenizer there; make the model again")
        return self.files


def open_model(source: ModelSource, context: StageContext[Any]) -> LoadedModel:
    """The model in memory, all of it, in a process set up as the pipeline says. Starts JAX. Raises what `load` raises."""
    from llmjax.engine.backend import configure_backend, use_compile_cache

    runtime = context.runtime
    configure_backend(platform=runtime.requested, memory_fraction=runtime.memory_fraction)
    use_compile_cache(context.artifacts / "compile_cache")
    loaded = source.load(context.digests)
    pending = loaded.params
    return dataclasses.replace(loaded, params=pending if isinstance(pending, dict) else pending.result())


def write_model(folder: Path, loaded: LoadedModel, *, name: str, files: TokenizerFiles) -> None:
    """Write a model that is in memory into the folder of a stage, for `StoredModel.open`. Raises what `save_model` raises."""
    from llmjax.model.checkpoint.export import BESIDE
    from llmjax.model.checkpoint.orbax import save_model

    save_model(folder / _WEIGHTS, loaded.params, loaded.config, eos_token_ids=loaded.eos_token_ids)
    place = None if files.place is None else str(files.place.absolute())
    if files.place is not None and (files.place / _TOKENIZER).is_file():
        for file in BESIDE:
            if (files.place / file).is_file():
                shutil.copyfile(files.place / file, folder / _WEIGHTS / file)
        place = _WEIGHTS
    about = {"name": name, "tokenizer": place, "chat_template": files.chat_template}
    write_whole(folder / _ABOUT, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
