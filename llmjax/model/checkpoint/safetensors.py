"""A Hugging Face directory: config.json and safetensors, single or sharded. Host only until weights are loaded.

The index is obeyed per tensor: a tensor is taken from the shard the index names, and nowhere else. Every header is checked
before a weight is read. Pickled weights are never opened.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.errors import ModelError, UnsupportedModelError
from llmjax.model.checkpoint.compressed_tensors import find_quantization, read_own, read_scheme
from llmjax.model.checkpoint.eos import collect_eos_ids
from llmjax.model.checkpoint.json_file import read_json_object
from llmjax.model.checkpoint.leaves import Checkpoint, Naming, check_tensors, plan_leaves
from llmjax.model.checkpoint.safetensors_file import SafetensorsEntry, SafetensorsFile
from llmjax.model.hf_config import parse_hf_config

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_LAYER = "model.layers.{layer}."


def _attention(*projections: str, kind: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}self_attn.{name}_proj.{kind}" for name in projections)


def _mlp(*projections: str, kind: str) -> tuple[str, ...]:
    return tuple(f"{_LAYER}mlp.{name}_proj.{kind}" for name in projections)


HF_NAMING = Naming(
    names={
        "embed.weight": ("model.embed_tokens.weight",),
        "final_norm.weight": ("model.norm.weight",),
        "lm_head.weight": ("lm_head.weight",),
        "attention_norm.weight": (f"{_LAYER}input_layernorm.weight",),
        "mlp_norm.weight": (f"{_LAYER}post_attention_layernorm.weight",),
        "attention.q_norm.weight": (f"{_LAYER}self_attn.q_norm.weight",),
        "attention.k_norm.weight": (f"{_LAYER}self_attn.k_norm.weight",),
        **{f"attention.qkv.{kind}": _attention("q", "k", "v", kind=kind) for kind in ("weight", "bias")},
        **{f"attention.out.{kind}": _attention("o", kind=kind) for kind in ("weight", "bias")},
        **{f"mlp.gate_up.{kind}": _mlp("gate", "up", kind=kind) for kind in ("weight", "bias")},
        **{f"mlp.down.{kind}": _mlp("down", kind=kind) for kind in ("weight", "bias")},
    },
    layer_prefix=_LAYER,
)


class SafetensorsDirectory:
    """All shards of a directory as one table of tensors.

    Attributes:
        path: the directory.
        tensors: name -> entry, from the shard the index names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, SafetensorsEntry] = {}
        try:
            if (path / SINGLE_FILE).exists():
                file = self._open(SINGLE_FILE)
                self._take(dict.fromkeys(file.tensors, file))
            elif (path / INDEX_FILE).exists():
                self._open_shards(path / INDEX_FILE)
            else:
                raise ModelError(_no_weights(path))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap all shards."""
        for file in self._files.values():
            file.close()

    def read_into(self, name: str, out: np.ndarray[Any, Any]) -> None:
        """Copy tensor `name` into `out`, cast to its dtype."""
        self._file_of[name].read_into(name, out)

    def _open(self, name: str) -> SafetensorsFile:
        self._files[name] = SafetensorsFile(self.path / name)
        return self._files[name]

    def _take(self, files: dict[str, SafetensorsFile]) -> None:
        self._file_of = files
        self.tensors = {name: file.tensors[name] for name, file in files.items()}

    def _open_shards(self, index_path: Path) -> None:
        index = read_json_object(index_path)
        shard_of = index.get("weight_map")
        if not isinstance(shard_of, dict) or not shard_of:
            raise ModelError(f"{index_path}: weight_map is missing")
        for shard in shard_of.values():
            if not isinstance(shard, str) or not shard or Path(shard).name != shard or "\0" in shard:
                raise ModelError(f"{index_path}: {shard!r} is not the name of a file in the same directory")
        counts = Counter(shard_of.values())
        missing = [f"{shard} ({counts[shard]} tensors)" for shard in sorted(counts) if not (self.path / shard).is_file()]
        if missing:
            metadata = index.get("metadata")
            total = metadata.get("total_size") if isinstance(metadata, dict) else None
            there = sum((self.path / shard).stat().st_size for shard in counts if (self.path / shard).is_file())
            raise ModelError(
                f"{self.path}: {len(missing)} of {len(counts)} shards are missing: {', '.join(missing)}; "
                f"{there} bytes are there{f' of {total}' if isinstance(total, int) else ''}; download them"
            )
        for shard in sorted(counts):
            self._open(shard)
        lost = [f"{name} (in {shard})" for name, shard in shard_of.items() if name not in self._files[shard].tensors]
        if lost:
            raise ModelError(
                f"{self.path}: {len(lost)} tensors are not in the shard the index names: {', '.join(lost[:20])}"
                f"{f' and {len(lost) - 20} more' if len(lost) > 20 else ''}; download these shards again"
            )
        self._take({name: self._files[shard] for name, shard in shard_of.items()})


def open_safetensors(path: Path, dtype: str | None = None) -> Checkpoint:
    """Read the config, open the weights and check that everything is there; no weight is read.

    Args:
        path: directory with config.json.
        dtype: name of the dtype to load as; None keeps the config's.

    Raises:
        UnsupportedModelError: the config names something that is not implemented; no weight file was opened.
        ModelError: files or tensors missing, truncated or of the wrong shape.
    """
    config_json = read_config(path)
    try:
        scheme = read_scheme(config_json)
        num_tokens, kept = read_own(config_json)
        left_out = () if scheme is None else ("quantization_config", "compression_config")
        config = parse_hf_config({key: value for key, value in config_json.items() if key not in left_out})
        num_tokens = _num_tokens(path, config.vocab_size) if num_tokens is None else num_tokens
        config = config.replace(num_tokens=num_tokens, dtype=dtype or config.dtype)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None
    reader = SafetensorsDirectory(path)
    try:
        leaves = plan_leaves(config, HF_NAMING)
        if scheme is not None:
            named = [(leaf.path, tuple(piece.name for piece in leaf.pieces)) for leaf in leaves if leaf.path[-1] == "weight"]
            try:
                config = config.replace(quantization=find_quantization(scheme, named, reader.tensors, kept))
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"{path}: {error}") from None
            leaves = plan_leaves(config, HF_NAMING)
        check_tensors(leaves, reader, HF_NAMING, config.num_layers)
    except BaseException:
        reader.close()
        raise
    return Checkpoint("safetensors", path, config, _eos_ids(path, config_json, config.vocab_size), leaves, reader)


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory; ModelError if there is none."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no config.json in this directory; give the folder of a Hugging Face model, or a .gguf file")
    return read_json_object(path / "config.json")


def _eos_ids(path: Path, config_json: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    generation_path = path / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    values = [
        (str(generation_path), generation.get("eos_token_id")),
        (str(path / "config.json"), config_json.get("eos_token_id")),
    ]
    return collect_eos_ids(values, vocab_size)


def _num_tokens(path: Path, vocab_size: int) -> int:
    """Ids the tokenizer knows, so that padding rows of the vocabulary are never sampled; all rows without a tokenizer.json."""
    tokenizer_path = path / "tokenizer.json"
    if not tokenizer_path.is_file():
        return vocab_size
    tokenizer = read_json_object(tokenizer_path)
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary or ())))
    ids += [token.get("id") for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)]
    known = max((token for token in ids if isinstance(token, int)), default=-1) + 1
    return min(known, vocab_size) or vocab_size


def _no_weights(path: Path) -> str:
    pickled = sorted(file.name for file in path.glob("*.bin")) + sorted(file.name for file in path.glob("*.pt*"))
    if pickled:
        return (
            f"{path}: only pickled weights ({', '.join(pickled[:3])}), which can run code and are never opened; "
            f"save the model as safetensors"
        )
    others = sorted(file.name for file in path.glob("*.safetensors"))
    found = f"; it holds {', '.join(others[:5])}, which no index names" if others else ""
    return f"{path}: no {SINGLE_FILE} and no {INDEX_FILE} in this directory{found}"
