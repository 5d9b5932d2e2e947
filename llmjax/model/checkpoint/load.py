"""Load a model: the one function that turns a path, a package or a preset into arrays on the device. Imports JAX."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax

from llmjax.errors import UnsupportedModelError
from llmjax.model.checkpoint.describe import open_checkpoint
from llmjax.model.checkpoint.orbax import load_orbax_params, read_orbax_config
from llmjax.model.checkpoint.random import DEFAULT_SCALE, random_params
from llmjax.model.checkpoint.source import Kind, locate
from llmjax.model.checkpoint.stream import Progress, load_leaves
from llmjax.model.config import DTYPES, ModelConfig


@dataclasses.dataclass
class LoadedModel:
    """A model in device memory.

    Attributes:
        config: its shape; `dtype` is what the weights were loaded as.
        params: nested dict of `jax.Array` as `param_shapes(config)` describes, on JAX's default device. The caller owns it.
        path: where it came from; None for random weights.
        kind: format of the source.
        eos_token_ids: ids that end a sequence, as far as the model's files say.
    """

    config: ModelConfig
    params: dict[str, Any]
    path: Path | None
    kind: Kind
    eos_token_ids: tuple[int, ...] = ()


def load_model(
    *,
    path: str | os.PathLike[str] | None = None,
    package: str | None = None,
    random: str | ModelConfig | None = None,
    dtype: str | None = None,
    seed: int = 0,
    scale: float = DEFAULT_SCALE,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model that exactly one of `path`, `package`, `random` names (see `locate`).

    Args:
        path: a Hugging Face directory (safetensors), a directory `save_model` wrote, or a .gguf file.
        package: an installed distribution with one .gguf file in it.
        random: a preset ("llama-8b", "qwen2.5-1.5b") or a `ModelConfig`; weights are generated on the device.
        dtype: "float32", "bfloat16" or "float16"; None takes bfloat16 on an accelerator and float32 on CPU. Norms stay float32.
        seed, scale: of random weights only.
        progress: called with (bytes read, bytes in total) while files are read.

    Raises:
        ConfigError: none or several sources.
        UnsupportedModelError: something the model needs is not implemented; no weight was read.
        ModelError: files missing, truncated or damaged.
    """
    dtype = default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
    source = locate(path=path, package=package, random=random)
    if source.kind == "random":
        assert source.config is not None
        config = source.config.replace(dtype=dtype)
        return LoadedModel(config, random_params(config, seed=seed, scale=scale), None, source.kind)
    if source.kind == "orbax":
        assert source.path is not None
        config, eos = read_orbax_config(source.path)
        config = config.replace(dtype=dtype)
        return LoadedModel(config, load_orbax_params(source.path, config), source.path, source.kind, eos)
    checkpoint = open_checkpoint(source, dtype)
    try:
        params = load_leaves(checkpoint, progress)
    finally:
        checkpoint.reader.close()
    return LoadedModel(checkpoint.config, params, checkpoint.path, source.kind, checkpoint.eos_token_ids)


def default_dtype() -> str:
    """Name of the dtype weights are loaded as unless told otherwise: bfloat16, on CPU float32."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
