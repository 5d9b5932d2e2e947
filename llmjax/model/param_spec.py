"""Shapes and dtypes of the parameter tree, as plain data. Host only.

The one description that random weights, checkpoints and their checks share. Matrices are stored [out, in]; `qkv` is the rows
of q, then k, then v, `gate_up` the rows of gate, then up. Norm weights are float32, everything else is in the config's dtype,
unless its `quantization` says otherwise: a weight in "int8" is a `QuantizedTensor`, with a float32 scale for each of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from llmjax.model.config import ModelConfig

Path = tuple[str | int, ...]
Shape = tuple[int, ...]

SCALE_BYTES = 4  # a float32 for each row of an int8 weight


def param_shapes(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree of `config` with a shape tuple at each leaf; layers have int keys."""
    hidden = config.hidden_size
    tree: dict[str, Any] = {
        "embed": {"weight": (config.vocab_size, hidden)},
        "layers": {index: _layer_shapes(config) for index in range(config.num_layers)},
        "final_norm": {"weight": (hidden,)},
    }
    if not config.tie_embeddings:
        tree["lm_head"] = {"weight": (config.vocab_size, hidden)}
    return tree


def iter_params(config: ModelConfig) -> Iterator[tuple[Path, Shape, str]]:
    """(path, shape, dtype name) of each leaf, in tree order."""
    for path, shape in _walk((), param_shapes(config)):
        yield path, shape, param_dtype(path, config)


def param_dtype(path: Path, config: ModelConfig) -> str:
    """Dtype name of one leaf: float32 for norm weights, else what the quantization says, else `config.dtype`."""
    if is_norm(path):
        return "float32"
    stored = None if config.quantization is None else config.quantization.dtype_of(leaf_name(path))
    return stored or config.dtype


def leaf_name(path: Path) -> str:
    """A leaf's name: its path with dots, such as "layers.3.mlp.down.weight"."""
    return ".".join(str(part) for part in path)


def is_norm(path: Path) -> bool:
    """Whether a leaf is the weight of a normalisation."""
    return len(path) > 1 and str(path[-2]).endswith("norm")


def unknown_weights(config: ModelConfig) -> list[str]:
    """Names in the config's quantization that its model has not."""
    named = {name for name, _ in config.quantization.weights} if config.quantization is not None else set()
    return sorted(named - {leaf_name(path) for path, _, _ in iter_params(config)})


def num_params(config: ModelConfig) -> int:
    """Scalars in the tree."""
    return sum(math.prod(shape) for _, shape, _ in iter_params(config))


def param_bytes(config: ModelConfig) -> int:
    """Bytes of the parameter tree once loaded, scales of int8 weights included."""
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
    return sum(
        math.prod(shape) * sizes[dtype] + (SCALE_BYTES * shape[0] if dtype == "int8" else 0)
        for _, shape, dtype in iter_params(config)
    )


def stacked_rows(config: ModelConfig, path: Path, shape: Shape) -> tuple[int, ...]:
    """Rows of the matrices that a leaf is stacked from: q, k, v; gate, up; else its own."""
    if "qkv" in path:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return (q_size, kv_size, kv_size)
    if "gate_up" in path:
        return (config.mlp_size, config.mlp_size)
    return (shape[0],)


def _layer_shapes(config: ModelConfig) -> dict[str, Any]:
    hidden, mlp, head = config.hidden_size, config.mlp_size, config.head_dim
    q_size, kv_size = config.num_heads * head, config.num_kv_heads * head
    attention = {
        "qkv": _linear(q_size + 2 * kv_size, hidden, config.qkv_bias),
        "out": _linear(hidden, q_size, config.output_bias),
    }
    if config.qk_norm:
        attention |= {"q_norm": {"weight": (head,)}, "k_norm": {"weight": (head,)}}
    return {
        "attention_norm": {"weight": (hidden,)},
        "attention": attention,
        "mlp_norm": {"weight": (hidden,)},
        "mlp": {"gate_up": _linear(2 * mlp, hidden, config.mlp_bias), "down": _linear(hidden, mlp, config.mlp_bias)},
    }


def _linear(out_size: int, in_size: int, bias: bool) -> dict[str, Shape]:
    return {"weight": (out_size, in_size), "bias": (out_size,)} if bias else {"weight": (out_size, in_size)}


def _walk(prefix: Path, tree: dict[Any, Any]) -> Iterator[tuple[Path, Shape]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _walk((*prefix, key), value)
        else:
            yield (*prefix, key), value
