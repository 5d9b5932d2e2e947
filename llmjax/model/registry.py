"""Which functions serve which model family: the place where a researcher adds a decoder of their own.

A `Model` is two pure functions over a parameter pytree of its own shape. Everything else (pages, batching, sampling,
serving) is shared. `docs/own_model.md` adds one in under a hundred lines.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from llmjax.errors import UnsupportedModelError
from llmjax.model.batch import ModelBatch
from llmjax.model.kv_cache import CacheShape, KVCache


@runtime_checkable
class DecoderConfig(CacheShape, Protocol):
    """What the engine reads of a config; the rest is the model's own. Must be hashable: it is a static argument."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def max_positions(self) -> int: ...


@runtime_checkable
class Model(Protocol):
    """A decoder over the paged cache. Both functions are pure and are traced inside the engine's programs."""

    def forward(
        self, params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, decode: bool
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Hidden states of the batch's T tokens, and the cache with their K and V at `batch.slot_mapping`.

        A token's result may depend on its own row's tokens only. `decode` (static) promises one token a row.
        """
        ...

    def logits(self, params: Any, hidden: Float[Array, "T D"], *, config: Any) -> Float[Array, "T V"]:
        """float32 logits; ids from `config.num_tokens` on must be -inf."""
        ...


class _SharedDecoder:
    """The decoder of `transformer.py`, in the form of a `Model`. Loaded, Flax with it, when it is first traced: an engine whose
    programs are compiled already needs neither."""

    def forward(
        self, params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, decode: bool
    ) -> tuple[Float[Array, "T D"], KVCache]:
        from llmjax.model import transformer

        return transformer.forward(params, batch, kv_cache, config=config, decode=decode)

    def forward_few(
        self, params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, max_queries: int
    ) -> tuple[Float[Array, "T D"], KVCache]:
        from llmjax.model import transformer

        return transformer.forward(params, batch, kv_cache, config=config, max_queries=max_queries)

    def forward_first(
        self, params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, num_layers: int
    ) -> tuple[Float[Array, "T D"], KVCache]:
        from llmjax.model import transformer

        return transformer.forward(params, batch, kv_cache, config=config, decode=True, num_layers=num_layers)

    def logits(self, params: Any, hidden: Float[Array, "T D"], *, config: Any) -> Float[Array, "T V"]:
        from llmjax.model import transformer

        return transformer.logits(params, hidden, config=config)


_SHARED = _SharedDecoder()
_MODELS: dict[str, Model] = dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), _SHARED)


def register_model(family: str, model: Model) -> None:
    """Serve configs whose `family` is this name with `model`. Replacing a name is allowed: last call wins."""
    if not isinstance(model, Model):
        raise UnsupportedModelError(f"model {family!r} must have the functions forward and logits (llmjax.model.registry.Model)")
    _MODELS[family] = model


def get_model(family: str) -> Model:
    """The model registered for `family`."""
    if family not in _MODELS:
        raise UnsupportedModelError(f"no model is registered for family {family!r}; known: {', '.join(sorted(_MODELS))}")
    return _MODELS[family]


def forward_few(
    model: Model, params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, max_queries: int
) -> tuple[Float[Array, "T D"], KVCache]:
    """`model.forward` of rows of at most `max_queries` tokens each, which the shared decoder makes use of."""
    if is_shared_decoder(model):
        return _SHARED.forward_few(params, batch, kv_cache, config=config, max_queries=max_queries)
    return model.forward(params, batch, kv_cache, config=config, decode=False)


def forward_first(
    params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, num_layers: int
) -> tuple[Float[Array, "T D"], KVCache]:
    """The shared decoder's first layers and final norm, one token a row, over the cache of all its layers."""
    return _SHARED.forward_first(params, batch, kv_cache, config=config, num_layers=num_layers)


def is_shared_decoder(model: Model) -> bool:
    """Whether this is the decoder of `transformer.py`: its source is ours, its layers are alike and can be looked at singly."""
    return model is _SHARED
