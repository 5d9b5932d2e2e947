"""Load a model: the one function that turns a path, a package or a preset into arrays on the device. Imports JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from llmjax.errors import ConfigError, ModelError, UnsupportedModelError
from llmjax.model.checkpoint.describe import open_checkpoint
from llmjax.model.checkpoint.int8 import weight_struct
from llmjax.model.checkpoint.leaves import Checkpoint
from llmjax.model.checkpoint.orbax import load_orbax_params, read_orbax_config
from llmjax.model.checkpoint.random import DEFAULT_SCALE, random_params
from llmjax.model.checkpoint.source import Kind, locate
from llmjax.model.checkpoint.stream import Progress, load_leaves
from llmjax.model.config import DTYPES, ModelConfig
from llmjax.model.param_spec import iter_params, unknown_weights
from llmjax.model.quantization import Quantization


class PendingParams:
    """Parameters that another thread is loading: their shapes are known, the arrays come later.

    Attributes:
        shapes: the tree with a `jax.ShapeDtypeStruct` at each leaf.
        bytes_in_use: bytes on the device when loading began; 0 where it does not tell.
        begun, ended: when loading began and ended, by `time.perf_counter`; `ended` is 0.0 before.
    """

    def __init__(self, config: ModelConfig, load: Callable[[], dict[str, Any]], given_up: threading.Event | None = None) -> None:
        """`load` looks at `given_up` now and then, and raises when it is set."""
        self._given_up = given_up or threading.Event()
        self.shapes = param_structs(config)
        self.bytes_in_use = int((jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0))
        self.begun, self.ended = time.perf_counter(), 0.0
        device = jax.config.jax_default_device  # may be set for the calling thread alone
        thread = ThreadPoolExecutor(1, thread_name_prefix="load-model")

        def run() -> dict[str, Any]:
            with contextlib.nullcontext() if device is None else jax.default_device(device):
                params = jax.block_until_ready(load())
            self.ended = time.perf_counter()
            return params

        self._future = thread.submit(run)
        thread.shutdown(wait=False)

    def result(self) -> dict[str, Any]:
        """The parameters, when they are there. Raises what loading raised."""
        return self._future.result()

    def give_up(self) -> None:
        """Nobody wants them any more: files are not read on, so that the process can end."""
        self._given_up.set()


def param_structs(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree of `config` with a `jax.ShapeDtypeStruct` at each leaf; an int8 weight is a `QuantizedTensor` of two."""
    tree: dict[Any, Any] = {}
    for path, shape, dtype in iter_params(config):
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = weight_struct(shape, dtype)
    return tree


@dataclasses.dataclass
class LoadedModel:
    """A model in device memory.

    Attributes:
        config: its shape; `dtype` is what the weights were loaded as.
        params: nested dict of `jax.Array` as `param_shapes(config)` describes, on JAX's default device. The caller owns it.
            With `load_model(wait=False)` a `PendingParams`, which the engine takes as well.
        path: where it came from; None for random weights.
        kind: format of the source.
        eos_token_ids: ids that end a sequence, as far as the model's files say.
    """

    config: ModelConfig
    params: Any
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
    quantization: Quantization | None = None,
    progress: Progress | None = None,
    wait: bool = True,
) -> LoadedModel:
    """Load the model that exactly one of `path`, `package`, `random` names (see `locate`).

    Args:
        path: a Hugging Face directory (safetensors), a directory `save_model` wrote, or a .gguf file.
        package: an installed distribution with one .gguf file in it.
        random: a preset ("llama-8b", "qwen2.5-1.5b") or a `ModelConfig`; weights are generated on the device.
        dtype: "float32", "bfloat16" or "float16"; None takes bfloat16 on an accelerator and float32 on CPU. Norms stay float32.
        seed, scale: of random weights only.
        quantization: of random weights only: which are made as what; an int8 weight is made as int8.
        progress: called with (bytes read, bytes in total) while files are read.
        wait: False returns as soon as the model's config is known and its files were found whole; another thread reads the
            weights, and what it raises comes from `PendingParams.result`.

    Raises:
        ConfigError: none or several sources, a quantization for files, which have their own, or one of another model.
        UnsupportedModelError: something the model needs is not implemented; no weight was read.
        ModelError: files missing, truncated or damaged.
    """
    dtype = default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise UnsupportedModelError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
    source = locate(path=path, package=package, random=random)
    if source.kind == "random":
        assert source.config is not None
        config = source.config.replace(dtype=dtype, quantization=quantization or source.config.quantization)
        unknown = unknown_weights(config)
        if unknown:
            raise ConfigError(f"quantization: the model has no {', '.join(unknown[:5])}; plan it for the config that is loaded")
        load: Callable[[], dict[str, Any]] = functools.partial(random_params, config, seed=seed, scale=scale)
        return LoadedModel(config, load() if wait else PendingParams(config, load), None, source.kind)
    if quantization is not None:
        raise ConfigError("quantization is for random weights; files are loaded first, and then quantised (quantize_params)")
    if source.kind == "orbax":
        assert source.path is not None
        config, eos = read_orbax_config(source.path)
        config = config.replace(dtype=dtype)
        load = functools.partial(load_orbax_params, source.path, config)
        return LoadedModel(config, load() if wait else PendingParams(config, load), source.path, source.kind, eos)
    checkpoint = open_checkpoint(source, dtype)
    given_up = threading.Event()
    load = functools.partial(_read_and_close, checkpoint, progress, given_up)
    params = load() if wait else PendingParams(checkpoint.config, load, given_up)
    return LoadedModel(checkpoint.config, params, checkpoint.path, source.kind, checkpoint.eos_token_ids)


def _read_and_close(checkpoint: Checkpoint, progress: Progress | None, given_up: threading.Event) -> dict[str, Any]:
    def after_each(done: int, total: int) -> None:
        if given_up.is_set():
            raise ModelError("the weights were not wanted any more")
        if progress is not None:
            progress(done, total)

    try:
        return load_leaves(checkpoint, after_each)
    finally:
        checkpoint.reader.close()


def default_dtype() -> str:
    """Name of the dtype weights are loaded as unless told otherwise: bfloat16, on CPU float32."""
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"
