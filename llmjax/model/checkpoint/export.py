"""Write a model as a Hugging Face directory: config.json and one safetensors file, int8 weights as compressed-tensors has them.

A directory is complete or absent: it is written aside and renamed. One weight at a time is on the host. Imports JAX.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from llmjax.errors import ModelError, StoreError
from llmjax.model.checkpoint.compressed_tensors import own_section, quantization_section
from llmjax.model.checkpoint.hf_export import hf_config
from llmjax.model.checkpoint.leaves import Leaf, plan_leaves
from llmjax.model.checkpoint.new_directory import new_directory
from llmjax.model.checkpoint.safetensors import HF_NAMING, SINGLE_FILE
from llmjax.model.config import ModelConfig
from llmjax.model.param_spec import leaf_name
from pallas_kernels.quantized import QuantizedTensor, reorder

BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
"""Files of a model's directory that are neither its weights nor its config."""

_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}


def export_safetensors(
    path: str | os.PathLike[str],
    params: dict[str, Any],
    config: ModelConfig,
    *,
    eos_token_ids: tuple[int, ...] = (),
    files_from: Path | None = None,
) -> None:
    """Write the new directory `path`.

    Args:
        path: must not exist; its parent must.
        params: the tree `iter_params(config)` describes; only read.
        config: one that a config.json of its family can say.
        eos_token_ids: go into config.json.
        files_from: directory of the model it was made from; its tokenizer's files (`BESIDE`) are copied.

    Loading what was written gives the same bits. Other programs read it as W8A8 or W8A16 of compressed-tensors.

    Raises:
        ModelError: the tree does not belong to the config, or the format has no place for something of it.
        StoreError: `path` exists or cannot be written, or `files_from` is no directory; nothing is left behind.
    """
    target = Path(path).absolute()
    content = hf_config(config, eos_token_ids) | own_section(config)
    leaves = plan_leaves(config, HF_NAMING)
    if config.quantization is not None:
        if config.quantization.dtype_of("embed.weight") == "int8":
            raise ModelError("export: an embedding in int8 has no place in compressed-tensors; keep embeddings in a float dtype")
        linears = [leaf for leaf in leaves if leaf.path[-1] == "weight" and len(leaf.shape) == 2 and leaf.path[0] != "embed"]
        ignore = [piece.name.removesuffix(".weight") for leaf in linears if leaf.dtype != "int8" for piece in leaf.pieces]
        content |= quantization_section(config.quantization, ignore)
    _check(leaves, params)
    if files_from is not None and not files_from.is_dir():
        raise StoreError(f"{files_from}: is no directory; give that of the model whose tokenizer belongs to this one, or none")
    with new_directory(target) as aside:
        _write_weights(aside / SINGLE_FILE, leaves, params)
        (aside / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name in BESIDE if files_from is not None else ():
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(files_from / name, aside / name)  # type: ignore[operator]  # not None here


def _check(leaves: list[Leaf], params: dict[str, Any]) -> None:
    for leaf in leaves:
        value = _value(params, leaf)
        dtype = "int8" if isinstance(value, QuantizedTensor) else str(getattr(value, "dtype", None))
        if getattr(value, "shape", None) != leaf.shape or dtype != leaf.dtype:
            raise ModelError(f"export: {leaf_name(leaf.path)} should be {leaf.dtype}{list(leaf.shape)}; the parameters are not "
                             f"the config's")  # fmt: skip


def _write_weights(path: Path, leaves: list[Leaf], params: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for leaf in leaves:
        for name, shape, dtype in _tensors(leaf):
            begin, end = end, end + math.prod(shape) * jnp.dtype(dtype).itemsize
            header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for leaf in leaves:
            for array in _arrays(leaf, _value(params, leaf)):
                file.write(np.ascontiguousarray(array).view(np.uint8).data)


def _tensors(leaf: Leaf) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, shape, dtype) of what is written of a leaf, in the order of `_arrays`."""
    for piece in leaf.pieces:
        yield piece.name, piece.shape, leaf.dtype
    for scale in leaf.scales:
        yield scale.name, (*scale.shape, 1), "float32"


def _arrays(leaf: Leaf, value: Any) -> Iterator[np.ndarray[Any, Any]]:
    parts = [value]
    if isinstance(value, QuantizedTensor):
        qvalue = np.asarray(value.qvalue)
        parts = [reorder(qvalue) if value.packed else qvalue, value.channel_scale]  # type: ignore[arg-type]  # of the host
    for part in parts:
        host, first = np.asarray(part), 0
        for piece in leaf.pieces:
            yield host[first : first + piece.shape[0]]
            first += piece.shape[0]


def _value(params: Any, leaf: Leaf) -> Any:
    for part in leaf.path:
        params = params.get(part) if isinstance(params, dict) else None
    return params
