"""`Scheduler`: which tokens of which requests the next launch computes, and what a launch's result means for them.

Owns the queue, the device rows and (through the pool) the pages. Knows no text, no JAX and no clock. There is no prefill
or decode mode: a request has tokens, and `num_computed_tokens` catches up with them. The engine's loop is

    batch = scheduler.schedule()        # None: nothing to launch before an older result was read
    pending.append(runner.dispatch(batch))
    changes = scheduler.update(pending.popleft().result())

and it may schedule ahead: any number of launches can be in flight. Four rules keep that safe:

*Order.* First come, first served. Every running request came before every waiting one, so a preempted request (always the
latest running one) goes back to the head of the queue and the order holds. No field says when a request came.

*Pages.* A request takes the pages of all its known tokens when it is admitted; after that only decoding asks for pages,
one row at most one page a step. All pages of a launch are taken before it is dispatched. Pages of a request that ended
while a launch could still write to them return to the pool when the result of the last such launch has been read.

*Preemption* waits until nothing is in flight (`schedule` returns None until then): what was sampled is read and not thrown
away, pages of ended requests have come back and may suffice, and the victim's pages are free at once. It costs one bubble.

*No ping-pong.* A request is admitted only when, beyond the pages of its known tokens, every running row and itself can
grow by one page, or by one page more for each time it was preempted. So a request that lost its place waits for more room
each time, at most for all that the rows can ever use. Nothing is admitted in a launch that preempted.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, Protocol

from llmjax.errors import ContextLengthError, RequestError
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import FinishReason, Request, RequestState, ScheduledBatch, ScheduledRow, StepOutput


class SchedulerConfig(Protocol):
    """The numbers a scheduler needs; `EngineConfig` has them, and has checked them."""

    @property
    def max_sequences(self) -> int:
        """Device rows: requests running at once, at most."""

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens of an extend launch, at most; not below `max_sequences`."""

    @property
    def prefill_chunk(self) -> int:
        """Tokens of one prompt in one launch, at most."""

    @property
    def decode_steps(self) -> int:
        """K: decode steps of one launch when nothing waits."""


@dataclasses.dataclass
class RequestUpdate:
    """What a launch did for a request that had not ended before.

    Attributes:
        request: already brought up to date (`output_ids`, `finish_reason`, ...).
        column: its index in `StepOutput.batch.rows`, and its column in the result's arrays.
        tokens: (step of the launch, token id) of each new token. Empty after a chunk in the middle of the prompt.
        finished: whether the request ended with this launch.
    """

    request: Request
    column: int
    tokens: list[tuple[int, int]]
    finished: bool


class Scheduler:
    """Continuous batching, decided anew for every launch."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        """The scheduler is the only one to take pages from `pool`."""
        assert 1 <= config.max_sequences <= config.max_tokens_per_step, "a launch must hold one token of every row"
        self._config = config
        self._pool = pool
        self._requests: dict[str, Request] = {}  # every unfinished request
        self._waiting: deque[Request] = deque()  # in order of arrival, preempted ones included
        self._running: list[Request] = []  # in order of arrival, all before the waiting ones; each has a row and pages
        self._free_rows = list(range(config.max_sequences))  # a heap: the lowest row first, so that few rows mean a small bucket
        self._in_flight: deque[ScheduledBatch] = deque()  # dispatched, result not read; oldest first
        self._next_step_id = 0
        self._releases: list[tuple[int, list[int]]] = []  # (step id, pages to free once its result has been read)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs. Launches may be in flight beyond that; their results still give pages back."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a fresh request. Its `limit` is lowered to what the pool can hold, should that be less.

        Raises:
            RequestError: an unfinished request has the same id.
            ContextLengthError: the prompt and one new token need more pages than the pool has.
        """
        assert request.state is RequestState.WAITING
        assert request.prompt_ids
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use: choose another", "request_id")
        longest = self._pool.capacity * self._pool.page_size
        if request.num_prompt_tokens + 1 > longest:
            raise ContextLengthError(
                f"the prompt has {request.num_prompt_tokens} tokens and with one new token does not fit the page pool of "
                f"{longest} tokens ({self._pool.capacity} pages of {self._pool.page_size}): shorten it, or raise kv_cache_bytes",
                "prompt",
            )
        request.limit = min(request.limit, longest - request.num_prompt_tokens)
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request with reason "abort", at once even if launches are in flight. None when no unfinished one has this id."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request for a reason found outside, such as a stop string. What is in flight for it will be dropped.

        If its last token has ended it already, only the reason changes: a stop string completed by the token that also
        reached the limit is a "stop".
        """
        if request.finished:
            request.finish_reason = reason
        else:
            self._end(request, reason)

    # What to launch

    def schedule(self) -> ScheduledBatch | None:
        """Decide the next launch and account for it as dispatched.

        Returns:
            the launch, or None when there is nothing to do before the result of an older launch has been read. With none in
            flight None means that no request is left.
        """
        preempted = False
        while self._pages_missing(self._decoding(), 1) > self._pool.num_free:
            if self._in_flight:
                return None  # read first: see "Preemption" above
            self._preempt(self._running[-1])
            preempted = True

        # Rows that decode always get their token: a long prompt must not stop a running answer.
        decoding = self._decoding()
        num_steps = self._choose_num_steps(decoding)
        rows = [self._dispatch(request, min(num_steps, _num_left(request))) for request in decoding]

        # What the budget leaves goes to prompts, in order of arrival: first those begun, then new ones.
        budget = self._config.max_tokens_per_step - len(rows)
        for request in self._prefilling():
            if budget > 0:
                rows.append(self._dispatch(request, self._chunk(request, budget)))
                budget -= rows[-1].num_tokens
        while budget > 0 and not preempted and self._can_admit():
            request = self._admit()
            rows.append(self._dispatch(request, self._chunk(request, budget), is_new=True))
            budget -= rows[-1].num_tokens

        if not rows:
            assert self._in_flight or not self._requests, "nothing can run, and nothing will change that"
            return None
        kind: Literal["extend", "decode"] = "decode" if len(rows) == len(decoding) else "extend"
        batch = ScheduledBatch(step_id=self._next_step_id, kind=kind, num_steps=num_steps, rows=rows)
        self._next_step_id += 1
        self._in_flight.append(batch)
        return batch

    def _decoding(self) -> list[Request]:
        """Running requests whose next token the device samples from its own last one, and which have not been given all."""
        return [r for r in self._running if r.num_computed_tokens >= r.num_prefill_tokens and _num_left(r) > 0]

    def _prefilling(self) -> list[Request]:
        """Running requests with known tokens still to compute."""
        return [r for r in self._running if r.num_computed_tokens < r.num_prefill_tokens]

    def _chunk(self, request: Request, budget: int) -> int:
        """Known tokens of one request to compute in this launch."""
        return min(request.num_prefill_tokens - request.num_computed_tokens, self._config.prefill_chunk, budget)

    def _choose_num_steps(self, decoding: Sequence[Request]) -> int:
        """K steps when all that is to be done is decoding, most of the steps have work, and the pages suffice; else one."""
        steps = self._config.decode_steps
        if self._waiting or self._prefilling() or not decoding:
            return 1
        if 2 * max(map(_num_left, decoding)) <= steps:
            return 1  # every row ends in the first half
        return steps if self._pages_missing(decoding, steps) <= self._pool.num_free else 1

    def _pages_missing(self, decoding: Sequence[Request], num_steps: int) -> int:
        """Pages to take for a launch of `num_steps` decode steps."""
        return sum(
            max(0, self._pool.pages_for(r.num_computed_tokens + min(num_steps, _num_left(r))) - len(r.pages)) for r in decoding
        )

    def _can_admit(self) -> bool:
        """Whether a row is free and the pool holds the head of the queue with its reserve (see "No ping-pong" above)."""
        if not self._waiting or not self._free_rows:
            return False
        head = self._waiting[0]
        known = self._pool.pages_for(head.num_tokens)
        if known > self._pool.num_free:
            return False
        growth = [self._full_length(r) - len(r.pages) for r in self._running] + [self._full_length(head) - known]
        per_row = 1 + head.num_preemptions
        return known + sum(min(per_row, pages) for pages in growth) <= self._pool.num_free

    def _full_length(self, request: Request) -> int:
        """Pages at its limit. The last token is sampled but never computed."""
        return self._pool.pages_for(request.num_prompt_tokens + max(0, request.limit - 1))

    def _admit(self) -> Request:
        """Give the head of the queue a row."""
        request = self._waiting.popleft()
        request.state = RequestState.RUNNING
        request.row = heapq.heappop(self._free_rows)
        request.num_prefill_tokens = request.num_tokens
        self._running.append(request)
        return request

    def _preempt(self, request: Request) -> None:
        """Send the latest running request back to the head of the queue; its known tokens will be computed again."""
        assert not self._in_flight
        assert request.num_in_flight == 0
        self._leave(request)
        request.state = RequestState.PREEMPTED
        request.num_prefill_tokens = request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.epoch += 1
        self._waiting.appendleft(request)

    def _dispatch(self, request: Request, num_tokens: int, is_new: bool = False) -> ScheduledRow:
        """The request's part in this launch: takes the pages, and counts its tokens as computed and sampled."""
        start = request.num_computed_tokens
        end = start + num_tokens
        if start >= request.num_prefill_tokens:
            samples = num_tokens
        else:  # a chunk samples when it reaches the last known token, unless only prompt logprobs were asked for
            samples = int(end == request.num_prefill_tokens and _num_left(request) > 0)
        num_pages = len(request.pages)
        request.pages += self._pool.allocate(max(0, self._pool.pages_for(max(end, request.num_prefill_tokens)) - num_pages))
        row = ScheduledRow(
            request=request,
            row=request.row,
            epoch=request.epoch,
            start=start,
            num_tokens=num_tokens,
            token_ids=_known_ids(request, start, end),
            samples=samples,
            is_new=is_new,
            new_pages=[(index, request.pages[index]) for index in range(num_pages, len(request.pages))],
            wants_prompt_logprobs=request.scores_prompt and start < request.num_prompt_tokens,
        )
        request.num_computed_tokens = end
        request.num_in_flight += samples
        request.last_step = self._next_step_id
        return row

    # What came back

    def update(self, output: StepOutput) -> list[RequestUpdate]:
        """Take in the result of the oldest launch in flight.

        Returns:
            one entry a row of the launch whose request had not ended before, in the order of the launch's rows.
        """
        batch = self._in_flight.popleft()
        assert output.batch is batch, "results must be read in the order of the launches"
        updates = []
        for column, row in enumerate(batch.rows):
            request = row.request
            if request.finished:
                continue  # ended by an earlier launch, by `finish` or by `abort`
            assert row.epoch == request.epoch
            request.num_in_flight -= row.samples  # what was promised: a row that ended on the device gave less
            tokens, reason = _read(request, row, output, column)
            if reason is not None:
                self._end(request, reason)
            updates.append(RequestUpdate(request, column, tokens, request.finished))
        self._release_until(batch.step_id)
        return updates

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish a waiting or running request; what is in flight for it no longer counts."""
        del self._requests[request.request_id]
        if request.state is RequestState.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.num_in_flight = 0

    def _leave(self, request: Request) -> None:
        """Take row and pages from a running request.

        The row can be given out at once: the device runs launches in order, and resets a row for its new request. The pages
        wait for the last launch that may touch them.
        """
        self._running.remove(request)
        heapq.heappush(self._free_rows, request.row)
        if self._in_flight and request.last_step >= self._in_flight[0].step_id:
            self._releases.append((request.last_step, request.pages))
        else:
            self._pool.free(request.pages)
        request.row = -1
        request.pages = []

    def _release_until(self, step_id: int) -> None:
        """Free the pages no launch after `step_id` can touch."""
        for last_step, pages in self._releases:
            if last_step <= step_id:
                self._pool.free(pages)
        self._releases = [release for release in self._releases if release[0] > step_id]

    def check_integrity(self) -> None:
        """Assert the invariants between calls. Costs O(pages): for tests and debugging."""
        self._pool.check_integrity()
        held = Counter(page for r in self._running for page in r.pages)
        held.update(page for _, pages in self._releases for page in pages)
        assert len(held) == self._pool.num_used, "pages are held that no request and no pending release knows"
        assert all(self._pool.holders(page) == count for page, count in held.items())
        launches = {batch.step_id for batch in self._in_flight}
        assert all(last_step in launches for last_step, _ in self._releases), "a release waits for a launch that is over"
        assert sorted([r.row for r in self._running] + self._free_rows) == list(range(self._config.max_sequences))
        assert sorted(r.request_id for r in (*self._running, *self._waiting)) == sorted(self._requests)
        for request in self._running:
            assert request.state is RequestState.RUNNING
            assert len(request.output_ids) + request.num_in_flight <= request.limit
            assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight
            assert len(request.pages) >= self._pool.pages_for(max(request.num_computed_tokens, request.num_prefill_tokens))
            launched = sum(row.samples for batch in self._in_flight for row in batch.rows if row.request is request)
            assert request.num_in_flight == launched
        for request in self._waiting:
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert not request.pages
            assert (request.row, request.num_computed_tokens, request.num_in_flight) == (-1, 0, 0)


def _num_left(request: Request) -> int:
    """New tokens that may still be dispatched."""
    return request.limit - len(request.output_ids) - request.num_in_flight


def _known_ids(request: Request, start: int, end: int) -> list[int]:
    """Token ids at positions start..end-1, as many as the host knows."""
    num_prompt = request.num_prompt_tokens
    if start >= num_prompt:
        return request.output_ids[start - num_prompt : end - num_prompt]
    return request.prompt_ids[start:end] + request.output_ids[: max(0, end - num_prompt)]


def _read(
    request: Request, row: ScheduledRow, output: StepOutput, column: int
) -> tuple[list[tuple[int, int]], FinishReason | None]:
    """Append the tokens of one row to its request, up to the one that ends it; return them and the reason, if it ended.

    The device decides by the same rules when a row stops: logits without a finite entry end it; a stop id ends it, and is
    masked while fewer than `min_tokens` tokens exist; the limit ends it. A stop id as the last token allowed is a "stop".
    """
    tokens: list[tuple[int, int]] = []
    if request.limit == 0:  # prompt logprobs only: done when the prompt is
        return tokens, "length" if row.start + row.num_tokens == request.num_prompt_tokens else None
    stop_ids = request.stop_ids
    for step in range(row.samples):
        if not output.finite[step, column]:
            return tokens, "error"
        token = int(output.tokens[step, column])
        assert token >= 0, "the device ended a row that the host's rules let go on"
        stops = token in stop_ids and len(request.output_ids) >= request.params.min_tokens
        request.output_ids.append(token)
        tokens.append((step, token))
        if stops:
            request.stop_token = token
            return tokens, "stop"
        if len(request.output_ids) == request.limit:
            return tokens, "length"
    return tokens, None
