"""Which tensors of a file make up which leaf of the parameter tree, and the check that all of them are there. Host only.

A format contributes a table of names (`Naming`); the shapes come from the config. Nothing here reads weights.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from llmjax.errors import ModelError
from llmjax.model.config import ModelConfig
from llmjax.model.param_spec import Path as ParamPath
from llmjax.model.param_spec import Shape, iter_params, stacked_rows

_NAMES_IN_MESSAGE = 20


class StoredTensor(Protocol):
    """One entry of a file's tensor table."""

    @property
    def shape(self) -> Shape: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def type_name(self) -> str: ...


class TensorReader(Protocol):
    """An opened checkpoint: a checked table of tensors whose bytes are still in the file. Reading is thread-safe."""

    @property
    def path(self) -> Path: ...
    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    def read_into(self, name: str, out: np.ndarray[Any, Any]) -> None: ...
    def close(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Naming:
    """A format's tensor names.

    Attributes:
        names: leaf, as dotted path without the layer's number, -> tensors that are stacked along the first axis.
            "{layer}" stands for the layer's number.
        layer_prefix: what every tensor of a layer begins with, e.g. "blk.{layer}.".
        interleaved: prefixes (after `layer_prefix`) of tensors that store the two halves of each head's rows interleaved.
    """

    names: Mapping[str, tuple[str, ...]]
    layer_prefix: str
    interleaved: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor that is one stretch of a leaf's rows; with `interleaved_heads` > 0 the interleaving of so many heads is undone."""

    name: str
    shape: Shape
    interleaved_heads: int = 0


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the parameter tree: where it goes, what it is, and the pieces it is stacked from.

    `scales` are those of an int8 weight's pieces: a number for each row, or one for all.
    """

    path: ParamPath
    shape: Shape
    dtype: str
    pieces: tuple[Piece, ...]
    scales: tuple[Piece, ...] = ()


@dataclasses.dataclass
class Checkpoint:
    """An opened and checked checkpoint. Whoever opened it closes `reader`."""

    kind: str
    path: Path
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    leaves: list[Leaf]
    reader: TensorReader


def plan_leaves(config: ModelConfig, naming: Naming) -> list[Leaf]:
    """The leaves of `config` with the tensors they are made of, in tree order."""
    heads = {0: config.num_heads, 1: config.num_kv_heads}
    leaves = []
    for path, shape, dtype in iter_params(config):
        layer = path[1] if path[0] == "layers" else None
        key = ".".join(str(part) for part in (path if layer is None else path[2:]))
        prefix = naming.layer_prefix.format(layer=layer)
        pieces = []
        for index, (template, rows) in enumerate(zip(naming.names[key], stacked_rows(config, path, shape), strict=True)):
            name = template.format(layer=layer)
            interleaved = layer is not None and name.removeprefix(prefix).startswith(naming.interleaved or ("\0",))
            pieces.append(Piece(name, (rows, *shape[1:]), heads[index] if interleaved else 0))
        scales = tuple(Piece(f"{piece.name}_scale", piece.shape[:1]) for piece in pieces) if dtype == "int8" else ()
        leaves.append(Leaf(path, shape, dtype, tuple(pieces), scales))
    return leaves


def check_tensors(leaves: Sequence[Leaf], reader: TensorReader, naming: Naming, num_layers: int) -> None:
    """Compare the plan with the file's table.

    Raises `ModelError` that lists every tensor that is missing, or has another shape than the config says, or belongs to one of
    the layers and is not part of the model (ignoring it would change results). Buffers such as `rotary_emb.inv_freq` are fine.
    """
    pieces = [piece for leaf in leaves for piece in leaf.pieces]
    scales = [piece for leaf in leaves for piece in leaf.scales]
    missing = [piece.name for piece in (*pieces, *scales) if piece.name not in reader.tensors]
    if missing:
        raise ModelError(f"{reader.path}: {len(missing)} of {len(pieces) + len(scales)} tensors are missing: {_listed(missing)}")
    wrong = [
        f"{piece.name} is {list(reader.tensors[piece.name].shape)}, the config says {list(piece.shape)}"
        for piece in pieces
        if tuple(reader.tensors[piece.name].shape) != piece.shape
    ]
    wrong += [
        f"{piece.name} is {list(reader.tensors[piece.name].shape)}, a scale for each of {piece.shape[0]} rows or one for all fits"
        for piece in scales
        if tuple(reader.tensors[piece.name].shape) not in ((), (1,), (1, 1), piece.shape, (*piece.shape, 1))
    ]
    if wrong:
        raise ModelError(f"{reader.path}: {len(wrong)} tensors have the wrong shape: {_listed(wrong)}")
    pattern = re.compile(re.escape(naming.layer_prefix).replace(re.escape("{layer}"), r"(\d+)") + r".*\.(weight|bias)")
    used = {piece.name for piece in pieces}
    unused = [
        name for name in reader.tensors if name not in used and (match := pattern.fullmatch(name)) and int(match[1]) < num_layers
    ]
    if unused:
        raise ModelError(
            f"{reader.path}: {len(unused)} tensors of its layers have no place in this model, and leaving them out would change "
            f"results: {_listed(unused)}"
        )


def undo_interleaving(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows [heads * H, ...] stored as pairs (0, H/2, 1, H/2 + 1, ...) of each head, back to the order of "rotate half"."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMES_IN_MESSAGE
    return ", ".join(names[:_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
