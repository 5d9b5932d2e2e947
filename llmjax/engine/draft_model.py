"""`DraftModel`: the model that drafts for another one, and whether it can. Owns no memory; knows no requests."""

from __future__ import annotations

import dataclasses
from typing import Any

from llmjax.engine.config import ResolvedConfig
from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import ConfigError
from llmjax.model.registry import DecoderConfig, Model, is_shared_decoder


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A draft model.

    Attributes:
        config, params: as an `Engine` takes them; `params` are held, not copied.
        tokenizer: its own, to be compared with the target's; None where there is none.
    """

    config: DecoderConfig
    params: Any
    tokenizer: Tokenizer | None = None


def limit_tokens[C: DecoderConfig](config: C, tokenizer: Tokenizer | None) -> C:
    """A vocabulary is often padded to a round number of rows; ids no tokenizer can name must never be sampled."""
    if tokenizer is None or tokenizer.vocab_size >= config.num_tokens:
        return config
    return dataclasses.replace(config, num_tokens=tokenizer.vocab_size)  # type: ignore[type-var]


def fitting_draft(
    draft: DraftModel | None,
    model: Model,
    config: DecoderConfig,
    tokenizer: Tokenizer | None,
    engine_config: ResolvedConfig,
) -> DraftModel | None:
    """The draft model as the engine of `config` uses it: with ids limited to those that a tokenizer names.

    Raises:
        ConfigError: there is one and none is wanted, or the other way round; it has other tokens, or fewer positions than the
            engine's context; the target cannot be truncated so.
    """
    speculative = engine_config.speculative
    method = None if speculative is None else speculative.method
    if method == "truncated":
        _check_layers(speculative.layers if speculative is not None else None, model, config)
    if method != "draft":
        if draft is not None:
            raise ConfigError(f"a draft model is given, but speculative.method is {method or 'off'}: set it to 'draft'")
        return None
    if draft is None:
        raise ConfigError("speculative.method 'draft' needs a draft model: give one, or set the method to 'ngram'")
    fitted = dataclasses.replace(draft, config=limit_tokens(draft.config, draft.tokenizer or tokenizer))
    if fitted.config.num_tokens != config.num_tokens:
        raise ConfigError(
            f"the draft model has {fitted.config.num_tokens} tokens, the model {config.num_tokens}: "
            "both must have one vocabulary; use a draft model of the same family"
        )
    if tokenizer is not None and draft.tokenizer is not None:
        _check_tokens(draft.tokenizer, tokenizer, config.num_tokens)
    if fitted.config.max_positions < engine_config.max_context:
        raise ConfigError(
            f"the draft model has {fitted.config.max_positions} positions, max_context is {engine_config.max_context}: "
            "lower max_context, or use another draft model"
        )
    return fitted


def _check_layers(layers: int | None, model: Model, config: DecoderConfig) -> None:
    if not is_shared_decoder(model):
        raise ConfigError(f"speculative.method 'truncated' cannot be used with a model of one's own ('{config.family}')")
    if layers is not None and layers >= config.num_layers:
        raise ConfigError(f"speculative.layers is {layers}, but the model has {config.num_layers}: name fewer")


def _check_tokens(draft: Tokenizer, target: Tokenizer, count: int) -> None:
    named, drafted = target.token_strings(), draft.token_strings()
    for token in range(count):
        ours, other = named.get(token), drafted.get(token)
        if ours != other:
            raise ConfigError(
                f"token {token} is {other!r} to the draft model and {ours!r} to the model: "
                "both must have one vocabulary; use a draft model of the same family"
            )
