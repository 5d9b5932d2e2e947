"""Save and load llmjax's own checkpoints: a config.json and the parameter tree in orbax's format.

A directory is complete or absent: it is written aside and renamed. Orbax (over a second of import) is loaded on first use.
Reading the config needs neither orbax nor JAX.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmjax.errors import ModelError
from llmjax.model.checkpoint.eos import collect_eos_ids
from llmjax.model.checkpoint.json_file import read_json_object
from llmjax.model.checkpoint.new_directory import new_directory
from llmjax.model.config import ModelConfig, RopeScaling
from llmjax.model.param_spec import Path as ParamPath
from llmjax.model.param_spec import Shape, iter_params
from llmjax.model.quantization import Quantization

FORMAT = "llmjax-orbax"
_VERSION = 1
_PARAMS = "params"
_QVALUE, _SCALE = "qvalue", "scale"


def is_orbax(path: Path) -> bool:
    """Whether a directory was written by `save_model`."""
    config = path / "config.json"
    return config.is_file() and (path / _PARAMS).is_dir() and read_json_object(config).get("format") == FORMAT


def save_model(
    path: str | os.PathLike[str], params: dict[str, Any], config: ModelConfig, *, eos_token_ids: tuple[int, ...] = ()
) -> None:
    """Write `params` and `config` to the new directory `path`.

    Args:
        path: must not exist; its parent must.
        params: the tree `iter_params(config)` describes; only read. An int8 weight is stored as the two arrays it is made of.
        config: stored beside, its dtype and quantization included: loading needs nothing else.
        eos_token_ids: stored with the config.

    Raises:
        ModelError: the tree does not belong to the config.
        StoreError: `path` exists or cannot be written; nothing is left behind.
    """
    import orbax.checkpoint as ocp

    target = Path(path).absolute()
    stored = _as_stored(params)
    _check_tree({leaf: tuple(value.shape) for leaf, value in _flatten(stored).items()}, config, "params")
    with new_directory(target) as aside:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(aside / _PARAMS, stored)
        content = {
            "format": FORMAT,
            "version": _VERSION,
            "config": dataclasses.asdict(config),
            "eos_token_ids": list(eos_token_ids),
        }
        (aside / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_orbax_config(path: Path) -> tuple[ModelConfig, tuple[int, ...]]:
    """(config, eos ids) of a directory that `save_model` wrote; ModelError if it is of another version or damaged."""
    source = path / "config.json"
    content = read_json_object(source)
    if content.get("version") != _VERSION:
        raise ModelError(f"{source}: version {content.get('version')!r} is not supported; version {_VERSION} is")
    fields = content.get("config")
    try:
        if not isinstance(fields, dict):
            raise TypeError("config is missing")
        scaling = fields.get("rope_scaling")
        if scaling is not None:
            scaling = RopeScaling(**{**scaling, "frequency_factors": tuple(scaling.get("frequency_factors", ()))})
        windows = tuple(fields.get("sliding_windows", ()))
        quantization = fields.get("quantization")
        if quantization is not None:
            weights = tuple((str(name), str(dtype)) for name, dtype in quantization["weights"])
            quantization = Quantization(quantization["scheme"], weights)
        config = ModelConfig(**{**fields, "rope_scaling": scaling, "sliding_windows": windows, "quantization": quantization})
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{source}: damaged: {error}") from None
    return config, collect_eos_ids([(str(source), content.get("eos_token_ids"))], config.vocab_size)


def load_orbax_params(path: Path, config: ModelConfig) -> dict[str, Any]:
    """The parameter tree on JAX's default device, cast to `config.dtype` while it is read.

    Raises `ModelError` naming missing leaves, wrong shapes, or the directory when its data are damaged.
    """
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    (device,) = jnp.zeros(()).devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    wanted: dict[str, Any] = {}
    for leaf, shape, dtype in _stored_leaves(config):
        node = wanted
        for part in leaf[:-1]:
            node = node.setdefault(part, {})
        node[leaf[-1]] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)
    source = (path / _PARAMS).absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(source).item_metadata.tree
        except Exception as error:
            raise ModelError(f"{source}: damaged orbax checkpoint: {_first_line(error)}") from error
        _check_tree({leaf: tuple(value.shape) for leaf, value in _flatten(stored).items()}, config, str(source))
        try:
            params: dict[str, Any] = checkpointer.restore(source, wanted)
        except Exception as error:
            raise ModelError(f"{source}: damaged orbax checkpoint: {_first_line(error)}") from error
    return _as_loaded(params)


def _stored_leaves(config: ModelConfig) -> Iterator[tuple[ParamPath, Shape, str]]:
    """The arrays of a checkpoint: (path, shape, dtype name)."""
    for path, shape, dtype in iter_params(config):
        if dtype == "int8":
            yield (*path, _QVALUE), shape, dtype
            yield (*path, _SCALE), shape[:1], "float32"
        else:
            yield path, shape, dtype


def _as_stored(tree: Any) -> Any:
    """int8 weights as dicts of two arrays, their columns in their own order: reordered on the host, where there is room."""
    import jax
    import numpy as np

    from pallas_kernels.quantized import QuantizedTensor, unpack

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, QuantizedTensor):
            return leaf
        own = unpack(dataclasses.replace(leaf, qvalue=np.asarray(leaf.qvalue))) if leaf.packed else leaf
        return {_QVALUE: own.qvalue, _SCALE: own.scale}

    return jax.tree.map(convert, tree, is_leaf=lambda leaf: isinstance(leaf, QuantizedTensor))


def _as_loaded(tree: dict[Any, Any]) -> Any:
    """What `_as_stored` did, undone, in the order of the device; a weight is given up when the next is made."""
    from llmjax.model.checkpoint.int8 import in_kernel_order
    from pallas_kernels.quantized import QuantizedTensor

    if tree.keys() == {_QVALUE, _SCALE}:
        return in_kernel_order(QuantizedTensor(tree.pop(_QVALUE), tree.pop(_SCALE)))
    for key, child in tree.items():
        if isinstance(child, dict):
            tree[key] = _as_loaded(child)
    return tree


def _check_tree(shapes: dict[tuple[str, ...], tuple[int, ...]], config: ModelConfig, where: str) -> None:
    wanted = {_as_text(leaf): shape for leaf, shape, _ in _stored_leaves(config)}
    for problem, leaves in (
        ("are missing", sorted(wanted.keys() - shapes.keys())),
        ("do not belong to the config", sorted(shapes.keys() - wanted.keys())),
        ("have another shape than the config says", sorted(k for k in wanted.keys() & shapes.keys() if wanted[k] != shapes[k])),
    ):
        if leaves:
            names = ", ".join(".".join(leaf) for leaf in leaves[:20])
            raise ModelError(f"{where}: {len(leaves)} parameters {problem}: {names}")


def _flatten(tree: Any, prefix: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {leaf: value for key, child in tree.items() for leaf, value in _flatten(child, (*prefix, str(key))).items()}


def _as_text(path: ParamPath) -> tuple[str, ...]:
    return tuple(str(part) for part in path)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
