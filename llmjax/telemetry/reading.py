"""`EngineReading`: the state of an engine at one moment, as plain numbers for those who show it. Knows no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReading:
    """Speculative decoding at one moment: counters since the engine was made, and how it goes.

    Attributes:
        rounds: of all choices; a launch with drafts counts for each choice that had some. drafted, accepted: tokens.
        accepted_at: rounds in which the first, second, ... draft was accepted.
        switches: ("off" or "on", reason, how often).
        off: why nobody drafts at present, None while it is done where it pays.
        acceptance: share of the drafts tested lately that were accepted, 0 to 1, None before the first.
        by_lane, by_class: the same by lane, and by class of the prompt.
    """

    rounds: int
    drafted: int
    accepted: int
    accepted_at: Sequence[int]
    switches: Sequence[tuple[str, str, int]]
    off: str | None
    acceptance: float | None
    by_lane: Mapping[str, float]
    by_class: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """Gauges, and counters since the engine was made, which never go back.

    Attributes:
        running: choices with a row, by lane.
        waiting: choices without one, by lane, preempted ones included.
        preempted: those of them that had a row before.
        pages: pages of the pool. held: those that choices hold, a shared one once. shared: those of them that several hold.
            cached: free pages whose content the prefix cache still finds.
        contiguity: of the steps from one page of a choice to its next, the share that leads to the next page of the pool; 1
            without any.
        launches: of the device.
        prompt_tokens_computed: known tokens that were computed, for the first time or not.
        tokens_recomputed: those of them that were computed again after a preemption.
        prompt_tokens_queried, prompt_tokens_cached: prompt tokens looked up in the prefix cache, and found there.
        output_tokens: tokens sampled.
        preemptions: times that a choice lost its row.
        corrupted: prompts whose logits were not finite.
        compiles_after_ready: programs that were compiled by a launch; there should be none.
        config: what was configured, for people.
        speculation: of speculative decoding; None where it is off.
    """

    running: Mapping[str, int]
    waiting: Mapping[str, int]
    preempted: int
    pages: int
    held: int
    shared: int
    cached: int
    contiguity: float
    launches: int
    prompt_tokens_computed: int
    tokens_recomputed: int
    prompt_tokens_queried: int
    prompt_tokens_cached: int
    output_tokens: int
    preemptions: int
    corrupted: int
    compiles_after_ready: int
    config: Mapping[str, str]
    speculation: SpeculationReading | None = None

    @property
    def prompt_tokens_first_computed(self) -> int:
        """Tokens of prompts that were computed, those of preempted requests once."""
        return self.prompt_tokens_computed - self.tokens_recomputed
