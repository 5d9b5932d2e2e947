"""Quantise the weights of a loaded model: which of them by pattern, each by rounding to nearest. Imports JAX.

Owns the walk over the parameters (`patterns.py` has the language). Must not know calibration, gates, stages or the engine.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from llmjax.errors import ConfigError, ModelError
from llmjax.model.checkpoint.int8 import in_kernel_order
from llmjax.model.config import ModelConfig
from llmjax.model.param_spec import Path, is_norm, iter_params, leaf_name, stacked_rows, unknown_weights
from llmjax.model.quantization import SCHEMES, STORED_DTYPES, Quantization, Scheme
from llmjax.quantization.patterns import GROUPS, matches
from pallas_kernels.quantized import QuantizedTensor, check_finite, rounded, scale_of

Granularity = Literal["channel", "tensor"]

LINEARS_IN_INT8: Mapping[str, str] = {"linear": "int8"}


def plan_quantization(
    config: ModelConfig,
    scheme: Scheme,
    *,
    dtypes: Mapping[str, str] = LINEARS_IN_INT8,
    keep: Mapping[str, str] | None = None,
) -> Quantization:
    """Which weights of a model are stored as what.

    Args:
        config: of the model; a quantization in it is replaced.
        scheme: "w8a16" or "w8a8"; see `Quantization`.
        dtypes: pattern -> dtype, such as {"linear": "int8", "attention": "bfloat16", "embeddings": "float32"}. A later pattern
            has the word over an earlier one. What none matches is in the config's dtype; what is named has its own, be it the
            same one, and keeps it when the model is loaded in another.
        keep: pattern -> dtype as well, with the word over all of `dtypes`.

    What patterns may be: see `patterns.py`.

    Raises ConfigError for another scheme or dtype, for a pattern that matches nothing, for a norm in another dtype than float32,
    and when no weight is int8.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"quantize: scheme {scheme!r}; choose one of {', '.join(SCHEMES)}")
    rules = [*dtypes.items(), *(keep or {}).items()]
    stored: dict[str, str] = {}
    for pattern, dtype in rules:
        if dtype not in STORED_DTYPES:
            raise ConfigError(f"quantize: {pattern}: dtype {dtype!r}; choose one of {', '.join(STORED_DTYPES)}")
        matched = [path for path, _, _ in iter_params(config) if path[-1] == "weight" and matches(pattern, path)]
        if not matched and not _may_be_absent(pattern, config):
            raise ConfigError(f"quantize: pattern {pattern!r} matches no weight; groups are {', '.join(GROUPS)}, a name is like "
                              f"layers.0.mlp.down.weight")  # fmt: skip
        norms = [path for path in matched if is_norm(path)]
        if dtype != "float32" and norms and len(norms) == len(matched):
            raise ConfigError(f"quantize: {pattern}: norms are float32, not {dtype}")
        stored |= {leaf_name(path): dtype for path in matched if not is_norm(path)}
    if "int8" not in stored.values():
        raise ConfigError("quantize: no weight would be int8; name some, such as linear: int8")
    return Quantization(scheme, tuple(stored.items()))


def quantize_params(
    params: dict[str, Any],
    config: ModelConfig,
    quantization: Quantization,
    *,
    granularity: Granularity = "channel",
    take_apart: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], ModelConfig]:
    """Round to nearest, weight by weight: (parameters, config) of the quantised model.

    Args:
        params: of `config`, which has no quantization. Weights that stay as they are are shared with the result.
        quantization: what each weight becomes; see `plan_quantization`.
        granularity: what shares a scale: "channel", an output channel; "tensor", all of a matrix, where q, k and v, and gate and
            up are matrices each. Either way a scale is stored for each channel.
        take_apart: removes each weight from `params` when it has been quantised, so that its memory is free for the next ones
            if nobody else holds it: at most one weight is there twice. If an error is raised then, `params` is incomplete.
        progress: called after each weight with (weights done, weights in total).

    A channel of zeros gets scale 1 and stays zero. Halves round to even, arithmetic is float32.
    Raises ModelError that names the weight for NaN and infinity in what is converted or comes of it, and for parameters that do
    not belong to the config; ConfigError for another granularity, a config that is quantised already, and a quantization of
    weights that the config has not.
    """
    if granularity not in get_args(Granularity):
        raise ConfigError(f"quantize: granularity {granularity!r}; choose one of {', '.join(get_args(Granularity))}")
    if config.quantization is not None:
        raise ConfigError("quantize: the model is quantised already; quantise the original")
    target = config.replace(quantization=quantization)
    unknown = unknown_weights(target)
    if unknown:
        raise ConfigError(f"quantize: the model has no {', '.join(unknown[:5])}; it has {config.num_layers} layers")
    leaves, result = list(iter_params(target)), {}
    for done, (path, shape, dtype) in enumerate(leaves, 1):
        node = functools.reduce(lambda tree, part: tree.get(part, {}), path[:-1], params)
        weight = node.get(path[-1])
        if getattr(weight, "shape", None) != shape or isinstance(weight, QuantizedTensor):
            raise ModelError(f"quantize: {leaf_name(path)} should be an array {list(shape)}; these parameters are not the "
                             f"config's")  # fmt: skip
        value = _converted(weight, path, dtype, stacked_rows(config, path, shape), granularity)
        if take_apart and value is not weight:
            jax.block_until_ready(value)
            del node[path[-1]]
        del weight
        _parent(result, path)[path[-1]] = value
        if progress is not None:
            progress(done, len(leaves))
    return result, target


def quantize_weight(weight: jax.Array, rows: tuple[int, ...], granularity: Granularity = "channel") -> QuantizedTensor:
    """One weight [out, in] by rounding to nearest, in the order its device wants. Must be finite.

    `rows` are those of the matrices that it is stacked from.
    """
    return in_kernel_order(_quantize(weight, rows=rows, granularity=granularity))


def _converted(weight: Any, path: Path, dtype: str, rows: tuple[int, ...], granularity: Granularity) -> Any:
    if dtype != "int8":
        if weight.dtype == dtype:
            return weight
        converted = jnp.asarray(weight, dtype)
        _check_finite(f"{leaf_name(path)} in {dtype}", converted)
        return converted
    _check_finite(leaf_name(path), weight)
    return quantize_weight(jnp.asarray(weight), rows, granularity)


def _check_finite(name: str, weight: jax.Array) -> None:
    if not bool(_all_finite(weight)):
        try:
            check_finite(name, weight)
        except ValueError as error:
            raise ModelError(f"quantize: {error}") from None


@jax.jit
def _all_finite(weight: jax.Array) -> jax.Array:
    return jnp.isfinite(weight).all()


@functools.partial(jax.jit, static_argnames=("rows", "granularity"))
def _quantize(weight: jax.Array, *, rows: tuple[int, ...], granularity: Granularity) -> QuantizedTensor:
    wide = weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    if granularity == "tensor":
        firsts = [sum(rows[:index]) for index in range(len(rows))]
        largest = jnp.concatenate([jnp.full(n, largest[first : first + n].max()) for first, n in zip(firsts, rows, strict=True)])
    scale = scale_of(largest)
    return QuantizedTensor(rounded(wide, scale[:, None]), scale)


def _may_be_absent(pattern: str, config: ModelConfig) -> bool:
    """A head that is the embedding has no weight of its own to be named."""
    names = ("head", "lm_head", "lm_head.weight")
    return config.tie_embeddings and any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _parent(tree: dict[Any, Any], path: Path) -> dict[Any, Any]:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    return tree
