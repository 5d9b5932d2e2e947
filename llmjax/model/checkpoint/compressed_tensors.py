"""What a config.json says about int8 weights: compressed-tensors' "int-quantized" layout, read and written. Host only.

The layout (https://github.com/vllm-project/compressed-tensors): a quantised linear is `weight`, int8 [out, in], and
`weight_scale`, a float for each row [out, 1] or for the tensor; `quantization_config` says how it is multiplied. Read is what is
computed here too: symmetric 8-bit integers, a scale a channel or tensor, activations as they are or quantised token by token as
they come. Everything else is refused by name. Beside it our own key keeps what that layout cannot say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from llmjax.errors import UnsupportedModelError
from llmjax.model.config import ModelConfig
from llmjax.model.config_fields import whole
from llmjax.model.param_spec import Path, leaf_name
from llmjax.model.quantization import Quantization, Scheme

METHOD = "compressed-tensors"
FORMAT = "int-quantized"
OWN_KEY = "llmjax"

_UNREAD = ("weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale")
_ADVICE = "use the unquantised weights, and quantise them with llmjax"


def read_scheme(config_json: Mapping[str, Any]) -> Scheme | None:
    """How the int8 weights of a config.json are multiplied; None if it says nothing of compressed-tensors.

    Raises UnsupportedModelError, with the field, for what would be computed differently here.
    """
    section = config_json.get("quantization_config") or config_json.get("compression_config")
    if not isinstance(section, Mapping) or section.get("quant_method") != METHOD:
        return None
    if section.get("format") != FORMAT:
        _refuse(f"format {section.get('format')!r}, only {FORMAT} is read")
    sparsity = section.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        _refuse(f"sparsity_config {sparsity.get('format')!r}")
    for key in ("kv_cache_scheme", "transform_config"):
        if section.get(key):
            _refuse(key)
    groups = section.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _refuse("no config_groups")
    schemes = {_group_scheme(str(name), group) for name, group in groups.items()}
    if len(schemes) > 1:
        _refuse("groups of which some quantise activations and some do not")
    return schemes.pop()


def find_quantization(
    scheme: Scheme, leaves: Iterable[tuple[Path, tuple[str, ...]]], tensors: Mapping[str, Any], kept: Mapping[str, str]
) -> Quantization:
    """Which leaves are int8, from what the files hold.

    Args:
        leaves: (path, names of the tensors that it is stacked from) of each weight.
        tensors: name -> table entry.
        kept: what our own key says of weights in floats; see `read_own`.

    Raises UnsupportedModelError for tensors that would change results and are not read, scales of weights that are not int8 among
    them, and where q, k and v, or gate and up, are not all int8 or all floats: they are multiplied as one here.
    """
    unread = sorted(name for name in tensors if name.endswith(_UNREAD))
    if unread:
        _refuse(f"tensor {unread[0]} ({len(unread)} like it)")
    weights, scales = {}, {name for name in tensors if name.endswith(".weight_scale")}
    for path, names in leaves:
        kinds = {name: tensors[name].type_name for name in names if name in tensors}
        if set(kinds.values()) == {"I8"}:
            weights[leaf_name(path)] = "int8"
            scales -= {f"{name}_scale" for name in names}
        elif "I8" in kinds.values():
            _refuse(f"of {', '.join(kinds)} some are int8 and some are not; they are one weight here")
        elif kept.get(leaf_name(path), "int8") != "int8":
            weights[leaf_name(path)] = kept[leaf_name(path)]
    if scales:
        _refuse(f"tensor {min(scales)} without an int8 weight of this model ({len(scales)} like it)")
    return Quantization(scheme, tuple(weights.items()))


def read_own(config_json: Mapping[str, Any]) -> tuple[int | None, dict[str, str]]:
    """(ids the tokenizer knows, dtype by weight) from our own key; (None, {}) without it."""
    own = config_json.get(OWN_KEY)
    if own is None:
        return None, {}
    try:
        num_tokens = whole(own, "num_tokens", where=OWN_KEY)
        return num_tokens, {str(name): str(dtype) for name, dtype in own["weights"].items()}
    except (TypeError, KeyError, AttributeError, UnsupportedModelError):
        raise UnsupportedModelError(f"config.json: {OWN_KEY} is damaged; write the model again, or remove the key") from None


def own_section(config: ModelConfig) -> dict[str, Any]:
    """Our own key of a config.json, which `read_own` reads."""
    weights = {} if config.quantization is None else dict(config.quantization.weights)
    return {OWN_KEY: {"num_tokens": config.num_tokens, "weights": weights}}


def quantization_section(quantization: Quantization, ignore: list[str]) -> dict[str, Any]:
    """The key of a config.json for int8 weights. `ignore`: modules of the linears that are not int8."""
    shared = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "actorder": None}
    activations = None if quantization.scheme == "w8a16" else {**shared, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quantization_config": {
            "quant_method": METHOD,
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignore,
            "kv_cache_scheme": None,
        },
    }


def _group_scheme(name: str, group: Any) -> Scheme:
    if not isinstance(group, Mapping):
        _refuse(f"{name} is no object")
    weights, activations = group.get("weights"), group.get("input_activations")
    if group.get("output_activations"):
        _refuse(f"{name}: output_activations")
    if group.get("format") not in (None, FORMAT):
        _refuse(f"{name}: format {group['format']!r}, only {FORMAT} is read")
    _check_integers(f"{name}.weights", weights, ("channel", "tensor"))
    if not activations:
        return "w8a16"
    _check_integers(f"{name}.input_activations", activations, ("token",))
    if activations.get("dynamic") is not True:
        _refuse(f"{name}.input_activations: static scales (dynamic is {activations.get('dynamic')!r})")
    return "w8a8"


def _check_integers(where: str, args: Any, strategies: tuple[str, ...]) -> None:
    """That a group's numbers are symmetric int8 with one of the strategies."""
    if not isinstance(args, Mapping):
        _refuse(f"{where} is missing")
    if args.get("num_bits") != 8 or args.get("type", "int") != "int":
        _refuse(f"{where}: {args.get('num_bits')!r} bits of type {args.get('type')!r}, only 8-bit int is read")
    if args.get("symmetric") is not True:
        _refuse(f"{where}: asymmetric (symmetric is {args.get('symmetric')!r})")
    if args.get("strategy") not in strategies:
        _refuse(f"{where}: strategy {args.get('strategy')!r}, only {' or '.join(strategies)} is read")
    for key in ("group_size", "actorder", "block_structure"):
        if args.get(key):
            _refuse(f"{where}: {key} {args[key]!r}")


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModelError(f"config.json: quantization_config ({METHOD}): {what} is not supported; {_ADVICE}")
