"""llmjax: an LLM inference engine for JAX. The public names, imported when first used.

Three layers: `LLM` (generate, chat), `Engine` (continuous batching), and the functional layer for research
(`load_model`, `forward`, `logits`, `init_cache`, `pack_sequences`, `register_model`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llmjax.version import __version__ as __version__

if TYPE_CHECKING:
    from llmjax.engine.config import EngineConfig as EngineConfig
    from llmjax.engine.config import LaneConfig as LaneConfig
    from llmjax.engine.engine import Engine as Engine
    from llmjax.engine.llm import LLM as LLM
    from llmjax.engine.outputs import CompletionOutput as CompletionOutput
    from llmjax.engine.outputs import RequestOutput as RequestOutput
    from llmjax.engine.tokenizer import Tokenizer as Tokenizer
    from llmjax.engine.tokenizer import load_tokenizer as load_tokenizer
    from llmjax.model.batch import ModelBatch as ModelBatch
    from llmjax.model.batch import pack_sequences as pack_sequences
    from llmjax.model.checkpoint.load import load_model as load_model
    from llmjax.model.config import ModelConfig as ModelConfig
    from llmjax.model.kv_cache import KVCache as KVCache
    from llmjax.model.kv_cache import init_cache as init_cache
    from llmjax.model.registry import Model as Model
    from llmjax.model.registry import register_model as register_model
    from llmjax.model.transformer import forward as forward
    from llmjax.model.transformer import logits as logits
    from llmjax.sampling_params import SamplingParams as SamplingParams
    from llmjax.structured_output import StructuredOutput as StructuredOutput

_HOMES = {
    "EngineConfig": "llmjax.engine.config",
    "LaneConfig": "llmjax.engine.config",
    "Engine": "llmjax.engine.engine",
    "LLM": "llmjax.engine.llm",
    "CompletionOutput": "llmjax.engine.outputs",
    "RequestOutput": "llmjax.engine.outputs",
    "Tokenizer": "llmjax.engine.tokenizer",
    "load_tokenizer": "llmjax.engine.tokenizer",
    "ModelBatch": "llmjax.model.batch",
    "pack_sequences": "llmjax.model.batch",
    "load_model": "llmjax.model.checkpoint.load",
    "ModelConfig": "llmjax.model.config",
    "KVCache": "llmjax.model.kv_cache",
    "init_cache": "llmjax.model.kv_cache",
    "Model": "llmjax.model.registry",
    "register_model": "llmjax.model.registry",
    "forward": "llmjax.model.transformer",
    "logits": "llmjax.model.transformer",
    "SamplingParams": "llmjax.sampling_params",
    "StructuredOutput": "llmjax.structured_output",
}
__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llmjax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
