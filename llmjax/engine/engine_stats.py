"""`EngineStats`: what an engine has done so far, as numbers that never go back. Plain data; the engine counts."""

from __future__ import annotations

import collections
import dataclasses
import time


@dataclasses.dataclass
class EngineStats:
    """Counters since the engine was made, at `started` (monotonic seconds).

    `prompt_tokens_queried` are the prompt tokens of requests (each choice) that were looked up in the prefix cache, and
    `prompt_tokens_cached` those of them that were found. A preempted request is not counted again, nor one with
    `prompt_logprobs`, which is not looked up. `prompt_tokens_computed` are known tokens that were computed, and
    `tokens_recomputed` those of them that were no part of a prompt computed for the first time: a preempted request is computed
    again as far as it had come. `drafted` are the tokens drafted by speculative decoding, and `accepted` those of them that were
    right. `corrupted` counts the requests of `finished` that met logits that were not finite.
    """

    num_pages: int = 0
    peak_pages_used: int = 0
    launches: int = 0
    prompt_tokens_computed: int = 0
    tokens_recomputed: int = 0
    prompt_tokens_queried: int = 0
    prompt_tokens_cached: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0
    corrupted: int = 0
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens looked up in the prefix cache that were found; 0 before the first."""
        return self.prompt_tokens_cached / self.prompt_tokens_queried if self.prompt_tokens_queried else 0.0
