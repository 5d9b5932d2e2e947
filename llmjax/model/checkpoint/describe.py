"""What a model is, without loading it: config, tensors, bytes. Host only; headers are read, weights are not."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from llmjax.model.checkpoint.gguf import open_gguf
from llmjax.model.checkpoint.leaves import Checkpoint
from llmjax.model.checkpoint.orbax import read_orbax_config
from llmjax.model.checkpoint.safetensors import open_safetensors
from llmjax.model.checkpoint.source import ModelSource, locate
from llmjax.model.config import ModelConfig
from llmjax.model.param_spec import iter_params, num_params, param_bytes


def describe(
    *,
    path: str | os.PathLike[str] | None = None,
    package: str | None = None,
    random: str | ModelConfig | None = None,
) -> dict[str, Any]:
    """Facts about the model that exactly one of the arguments names (see `locate`).

    Returns:
        kind, path (or None), config (`ModelConfig`), eos_token_ids, num_params, num_tensors and file_bytes (of the tensors in the
        files; for random weights, those that would be made), tensor_types (name -> how many).

    Raises `ModelError` for everything that would keep the model from being loaded, but for damage inside the tensors' bytes.
    """
    source = locate(path=path, package=package, random=random)
    if source.kind in ("safetensors", "gguf"):
        checkpoint = open_checkpoint(source)
        try:
            tensors = list(checkpoint.reader.tensors.values())
        finally:
            checkpoint.reader.close()
        config, eos = checkpoint.config, checkpoint.eos_token_ids
        types = Counter(tensor.type_name for tensor in tensors)
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
    else:
        if source.kind == "orbax":
            assert source.path is not None
            config, eos = read_orbax_config(source.path)
        else:
            assert source.config is not None
            config, eos = source.config, ()
        types = Counter(dtype for _, _, dtype in iter_params(config))
        num_bytes = param_bytes(config)
    return {
        "kind": source.kind,
        "path": source.path,
        "config": config,
        "eos_token_ids": eos,
        "num_params": num_params(config),
        "num_tensors": sum(types.values()),
        "file_bytes": num_bytes,
        "tensor_types": dict(types.most_common()),
    }


def open_checkpoint(source: ModelSource, dtype: str | None = None) -> Checkpoint:
    """Open a safetensors or gguf source; the caller closes its reader."""
    assert source.path is not None
    return open_gguf(source.path, dtype) if source.kind == "gguf" else open_safetensors(source.path, dtype)
