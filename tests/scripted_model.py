"""A decoder whose output is written down by the test: the next token depends on the position alone.

It runs through the real engine (scheduler, pages, programs, sampling, text) and compiles in a moment. Its parameters
are the script, so a test changes it with `update_params`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.tokenizer import Tokenizer
from llmjax.model.batch import ModelBatch
from llmjax.model.kv_cache import KVCache
from llmjax.model.registry import register_model
from llmjax.sampling_params import SamplingParams

CONTEXT = 128
LOGIT = 40.0  # of the scripted token; all others have 0


@dataclasses.dataclass(frozen=True)
class ScriptedConfig:
    family: str = "scripted"
    vocab_size: int = 288
    num_tokens: int = 288
    max_positions: int = CONTEXT
    num_layers: int = 1
    num_kv_heads: int = 1
    head_dim: int = 2
    dtype: str = "float32"


class ScriptedModel:
    def forward(self, params: Any, batch: ModelBatch, kv_cache: KVCache, *, config: Any, decode: bool) -> tuple[Array, KVCache]:
        return batch.positions[:, None].astype(jnp.float32), kv_cache

    def logits(self, params: Any, hidden: Array, *, config: Any) -> Array:
        return params["table"][hidden[:, 0].astype(jnp.int32)]


register_model("scripted", ScriptedModel())


@contextlib.contextmanager
def paced(engine: Engine, seconds: float = 0.03) -> Iterator[threading.Event]:
    """Each step of the engine takes at least this long until the event is set: time for a test to act in the middle."""
    step, at_full_speed = engine.step, threading.Event()

    def slow_step(**options: Any) -> list[RequestOutput]:
        at_full_speed.wait(seconds)
        return step(**options)

    engine.step = slow_step  # type: ignore[method-assign]
    try:
        yield at_full_speed
    finally:
        at_full_speed.set()
        del engine.step


class Scripted:
    """An engine over the scripted model."""

    def __init__(self, tokenizer: Tokenizer | None, *, eos_ids: Sequence[int] = (), **options: Any) -> None:
        config = EngineConfig(
            **{
                "max_context": CONTEXT,
                "max_sequences": 4,
                "max_tokens_per_step": 64,
                "decode_steps": 3,
                "row_buckets": (4,),
                "token_buckets": (64,),
            }
            | options
        )
        self.engine = Engine(ScriptedConfig(), self._params([]), tokenizer, config, eos_ids=eos_ids)

    @staticmethod
    def _params(ids: Sequence[int], start: int = 1) -> dict[str, Any]:
        table = np.zeros((CONTEXT, ScriptedConfig.vocab_size), np.float32)
        table[np.arange(start - 1, start - 1 + len(ids)), list(ids)] = LOGIT
        return {"table": jnp.asarray(table)}

    def script(self, ids: Sequence[int], *, prompt: int = 1) -> None:
        """The output of a prompt of `prompt` tokens; after the script all tokens are equally likely (greedy: id 0)."""
        self.engine.update_params(self._params(ids, prompt))

    def logits(self, table: np.ndarray) -> None:
        """Any logits [positions, V]: row p is what follows the token at position p."""
        full = np.zeros((CONTEXT, ScriptedConfig.vocab_size), np.float32)
        full[: len(table)] = table
        self.engine.update_params({"table": jnp.asarray(full)})

    def run(self, params: SamplingParams, prompt: str | Sequence[int] = (1,)) -> tuple[RequestOutput, list[str]]:
        """The final output, and every piece of text of choice 0 as it was given out."""
        request_id = self.engine.add_request(prompt, params)
        pieces: list[str] = []
        while True:
            for output in self.engine.step():
                if output.request_id == request_id:
                    pieces.append(output.new_text[0])
                    if output.finished:
                        assert "".join(pieces) == output.outputs[0].text
                        return output, pieces
