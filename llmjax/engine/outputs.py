"""What the engine gives back: plain data, no JAX."""

from __future__ import annotations

import dataclasses

from llmjax.scheduling.finish_reason import FinishReason
from llmjax.telemetry.timings import Timings


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """One token with its logprob (nats) and its rank (1 is the most likely). `text` and `bytes` are the token's own."""

    token_id: int
    logprob: float
    rank: int
    text: str
    bytes: bytes


@dataclasses.dataclass(frozen=True)
class PositionLogprobs:
    """The token at one position, and the alternatives asked for, most likely first (the chosen one may be among them)."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One choice. `text` excludes what follows a stop; `token_ids` holds every sampled token, the stopping one included.

    `logprobs` has one entry a token of `token_ids`. `stop_reason` is the stop string or stop id that ended it, None for the
    model's own end of sequence or a limit. `error` says why when `finish_reason` is "error" or "timeout".
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationOutput:
    """How the drafts of a request fared, all its choices together.

    Attributes:
        rounds: launches in which a choice had drafts. drafted, accepted: tokens proposed, and taken over.
        off: why it did not draft at the end, of its first choice that did not: acceptance or length, or batch or cost
            where nobody drafted; None where all did.
    """

    rounds: int
    drafted: int
    accepted: int
    off: str | None


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A request's state after a step: everything so far, and what is new since the last one.

    `outputs` and `prompt_logprobs` are the engine's own objects and go on growing; `new_text` and `new_token_ids` do not.

    Attributes:
        prompt_logprobs: one entry a prompt token; the first is None (nothing precedes it). Filled in chunk by chunk.
        new_text: per choice, the text that may be shown since the previous output; concatenated it equals `text`.
        new_token_ids: per choice, likewise.
        num_cached_tokens: prompt tokens that the first choice found in the prefix cache (the others may find more).
        finished: every choice has a finish reason.
        timings: where its time went, and its counters; with the last output only.
        speculation: how its drafts fared; with the last output only, and only where the engine drafts and it decoded.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    new_text: list[str] = dataclasses.field(default_factory=list)
    new_token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    finished: bool = False
    timings: Timings | None = None
    speculation: SpeculationOutput | None = None
