"""What the host knows of a request, and what scheduler and runner say to each other. No JAX here, and no text.

The scheduler makes a `ScheduledBatch`; the runner turns it into one device launch and later returns a `StepOutput`. The
host is one launch ahead of the results it has seen: `Request.num_in_flight` counts tokens that were launched but not yet read.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.finish_reason import FinishReason
from llmjax.scheduling.request_speculation import RequestSpeculation


class RequestState(enum.Enum):
    """Life of a request; `PREEMPTED` waits at its old place in its lane and is computed again."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One choice of one prompt (a request with n choices is n of these).

    Attributes:
        request_id: unique among unfinished requests.
        prompt_ids: token ids, at least one.
        params: checked sampling settings; `params.n` is not looked at here.
        seed: 64-bit noise seed, already drawn; with `choice` and the token's position it fixes all noise of the request.
        choice: index among the choices of its prompt.
        eos_ids: the model's end-of-sequence ids, empty when `params.ignore_eos`.
        limit: new tokens at most: `params.max_tokens` cut to what the context leaves.
        arrival_time: monotonic seconds.
        priority: lower ones are let in first, in their lane.
        lane, ticket, expected_tokens: index of its lane, its place in the order of arrival, and prompt and expected output in
            tokens; set when it is queued.
        full_pages: pages at its limit; set when it is queued.
        output_ids: new tokens read back so far.
        num_prefill_tokens: tokens the host knew when it admitted the request (prompt, and output after a preemption). Positions
            from here on are sampled on the device: the request decodes once `num_computed_tokens` has reached this.
        num_computed_tokens: tokens whose K and V are in the cache once all dispatched launches have run; the most that it can be
            while launches with drafts are in flight.
        num_once_computed: the most of these that there were before a preemption.
        num_in_flight: tokens dispatched to be sampled whose values the host has not read yet, at most.
        num_left: new tokens that may still be dispatched: `limit` less those read and those in flight. The scheduler's.
        row: index in the device batch while running, else -1.
        pages: page ids in order of position, held by this request; the first ones may be held by others too, to be read.
        page_keys: keys of the leading full pages, as far as they were needed. This and the next two are `PrefixCache`'s.
        commit_at: computed tokens at which the next page is full, all before it being findable; far beyond any where pages must
            not be found, because they mix keys and values of two sets of weights.
        num_cached_tokens: prompt tokens that were found in the prefix cache when the request was first admitted.
        last_step: step id of the last launch that may touch `pages`, -1 before the first.
        epoch: grows at each preemption. The scheduler preempts only when no launch is in flight, so that a result always meets
            the epoch it was dispatched in.
        num_chunks: launches that computed known tokens of it.
        num_steps: decode steps launched for it; a launch with drafts is one.
        num_drafted: leading tokens whose keys and values the draft model has, once all dispatched launches have run; plain steps
            leave it behind. As far as launches in flight may give less than they promised it is, as `num_computed_tokens`, too
            high by that much.
        prompt_class: what sort of text the prompt is ("code", "json", ...): requests of a class are expected to draft alike.
        speculation: how its drafts fare, None before it could draft. `Speculation`'s.
        ending_ids: every token id that ends the output, as a set (the device and `Scheduler.update` both decide by this).
        stepwise: the host must know each token before the next one is launched, because it decides what that may be.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    limit: int
    choice: int = 0
    eos_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    lane: int = 0
    ticket: int = -1
    expected_tokens: int = 0
    full_pages: int = 0
    output_ids: list[int] = dataclasses.field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    num_prefill_tokens: int = 0
    num_computed_tokens: int = 0
    num_once_computed: int = 0
    num_in_flight: int = 0
    num_left: int = 0
    num_preemptions: int = 0
    row: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    page_keys: list[bytes] = dataclasses.field(default_factory=list)
    commit_at: int = 0
    num_cached_tokens: int = 0
    last_step: int = -1
    epoch: int = 0
    num_chunks: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    prompt_class: str = "tokens"
    speculation: RequestSpeculation | None = None
    ending_ids: frozenset[int] = dataclasses.field(init=False)
    stepwise: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.ending_ids = frozenset(self.stop_ids)
        self.stepwise = self.params.structured is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens whose values the host knows: prompt and read output."""
        return len(self.prompt_ids) + len(self.output_ids)

    def known_ids(self, start: int, end: int) -> list[int]:
        """Token ids at positions start..end-1, as many as the host knows."""
        num_prompt = len(self.prompt_ids)
        if start >= num_prompt:
            return self.output_ids[start - num_prompt : end - num_prompt]
        return self.prompt_ids[start:end] + self.output_ids[: max(0, end - num_prompt)]

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt logprobs are computed for it: one of n choices is enough."""
        return self.choice == 0 and self.params.prompt_logprobs is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every token id that ends the output, once each."""
        return tuple(dict.fromkeys((*self.eos_ids, *self.params.stop_ids)))

    @property
    def finished(self) -> bool:
        """Whether nothing more will be computed for it."""
        return self.state is RequestState.FINISHED


@dataclasses.dataclass(slots=True)
class ScheduledRow:
    """One request's part in a launch.

    Attributes:
        request, row, epoch: who, in which device row, and the request's epoch at dispatch.
        start: position (0-based) of the first token computed; of a row that decodes the highest that it can be while launches
            with drafts are in flight.
        num_tokens: tokens computed (in a decode launch: steps at most, one token a step; with drafts: `samples`).
        token_ids: the known tokens at positions start.., `num_tokens` of them; empty for a row that decodes, whose token the
            device has.
        samples: tokens sampled at most: 0 for a chunk that does not reach the last known token, else 1 (extend), steps (decode),
            or drafts and one more (speculate).
        is_new: the device must reset this row (settings, page table, counts) before the launch. Tokens before `start` are in
            the pages it was given.
        new_pages: (index in the row's page table, page id) appended by this launch; all pages of a new row.
        wants_prompt_logprobs: score the chunk's tokens in this launch.
        drafts: of a speculate launch: drafts that the row may have.
        catch_up: positions from the first up to the second that the draft model is to compute before the launch.
    """

    request: Request
    row: int
    epoch: int
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    samples: int
    is_new: bool = False
    new_pages: Sequence[tuple[int, int]] = ()
    wants_prompt_logprobs: bool = False
    drafts: int = 0
    catch_up: tuple[int, int] = (0, 0)


LaunchKind = Literal["extend", "decode", "speculate"]


@dataclasses.dataclass
class ScheduledBatch:
    """One launch. `kind` is "extend" (ragged chunks; decoding rows join with one token), "decode" (`num_steps` steps a row) or
    "speculate" (rows that decode take as many of `draft_length` drafts as are right, and one token more).
    `preempted` lost their rows so that it could be made.
    `dirty_pages` may hold NaN and must be zeroed before the launch: a row that ended with an error wrote to them.
    """

    step_id: int
    kind: LaunchKind
    num_steps: int
    rows: list[ScheduledRow]
    preempted: Sequence[Request] = ()
    dirty_pages: Sequence[int] = ()
    draft_length: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed at most (one step of a decode launch)."""
        return len(self.rows) if self.kind == "decode" else sum(row.num_tokens for row in self.rows)


@dataclasses.dataclass
class TopLogprobs:
    """Alternatives of each sampled token: `ids` and `logprobs` are [steps, rows, 20], most likely first."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclasses.dataclass
class PromptScores:
    """Of an extend launch's packed tokens: entry t scores the token that *follows* packed token t.

    `logprobs` float32 [T], `ranks` int32 [T] (1 is the most likely), `top_ids` / `top_logprobs` [T, 20].
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


@dataclasses.dataclass
class StepOutput:
    """What a launch produced, as numpy on the host; column i belongs to `batch.rows[i]`.

    Attributes:
        tokens: int32 [steps, rows]; -1 where the row sampled nothing at that step (finished before, or a chunk in the middle).
        logprobs: float32 [steps, rows] of those tokens.
        ranks: int32 [steps, rows]; 1 is the most likely token.
        finite: bool [steps, rows]; False where the logits held NaN or nothing but -inf. The token is then -1. Also told of a
            chunk in the middle of a prompt, by the logits after its last token.
        top: alternatives, present when a row asked for logprobs.
        prompt_scores: present when a row asked for prompt logprobs; packed like the launch's tokens.
        proposed, accepted: int32 [rows] of a speculate launch: drafts that each row had, and took.
    """

    batch: ScheduledBatch
    tokens: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    finite: np.ndarray
    top: TopLogprobs | None = None
    prompt_scores: PromptScores | None = None
    proposed: np.ndarray | None = None
    accepted: np.ndarray | None = None

    @property
    def every_finite(self) -> bool:
        """Whether no row met NaN."""
        scores = self.prompt_scores
        return bool(self.finite.all()) and (scores is None or not np.isnan(scores.logprobs).any())

    def is_finite(self, column: int) -> bool:
        """Whether what row `column` sampled, and the prompt scores it asked for, are free of NaN."""
        if not self.finite[:, column].all():
            return False
        row, scores = self.batch.rows[column], self.prompt_scores
        if scores is None or not row.wants_prompt_logprobs:
            return True
        first = sum(other.num_tokens for other in self.batch.rows[:column])
        return not bool(np.isnan(scores.logprobs[first : first + row.num_tokens]).any())

    @functools.cached_property
    def token_lists(self) -> list[list[int]]:
        """`tokens` as Python numbers, one list a row: converting all at once is many times faster than one by one."""
        lists: list[list[int]] = self.tokens.T.tolist()
        return lists

    @functools.cached_property
    def logprob_lists(self) -> list[list[float]]:
        """`logprobs`, likewise."""
        lists: list[list[float]] = self.logprobs.T.tolist()
        return lists
