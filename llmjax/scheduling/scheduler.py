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

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal, Protocol

from llmjax.errors import ContextLengthError, RequestError
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import FinishReason, Request, RequestState, ScheduledBatch, ScheduledRow, StepOutput
from llmjax.scheduling.results import RequestUpdate, read_tokens

IDLE_SHARE = 1 / 8
"""Row steps of a K-step launch that may lie idle behind rows at their limit while requests wait."""


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
        """K: decode steps of one launch when no waiting request could be taken in before it ends."""

    @property
    def deterministic(self) -> bool:
        """Whether the launches of a request must not depend on other requests."""

    @property
    def reserve_full_length(self) -> bool:
        """Whether a request is admitted only when the pool holds all of its full length (as in a deterministic engine)."""


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
        self._last_kind: Literal["extend", "decode"] = "decode"
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

    @property
    def num_reserved_pages(self) -> int:
        """Pages nobody else may have: those in use, and with full lengths reserved also those running rows will grow into."""
        if not self._reserves:
            return self._pool.num_used
        return self._pool.num_used + sum(self._full_length(r) - len(r.pages) for r in self._running)

    @property
    def _reserves(self) -> bool:
        return self._config.deterministic or self._config.reserve_full_length

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
        request.limit = request.num_left = min(request.limit, longest - request.num_prompt_tokens)
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
        decoding, prefilling, missing = self._survey()
        preempted = False
        while missing > self._pool.num_free:
            if self._in_flight:
                return None  # read first: see "Preemption" above
            self._preempt(self._running[-1])
            preempted = True
            decoding, prefilling, missing = self._survey()
        if self._config.deterministic:
            return self._schedule_apart(decoding, prefilling)

        # Rows that decode always get their token: a long prompt must not stop a running answer.
        num_steps = 1 if prefilling else self._choose_num_steps(decoding, missing)
        rows = self._dispatch_decoding(decoding, num_steps)

        # What the budget leaves goes to prompts, in order of arrival: first those begun, then new ones.
        budget = self._config.max_tokens_per_step - len(rows)
        for request in prefilling:
            if budget > 0:
                rows.append(self._dispatch_chunk(request, budget))
                budget -= rows[-1].num_tokens
        while num_steps == 1 and budget > 0 and not preempted and self._can_admit():
            rows.append(self._dispatch_chunk(self._admit(), budget, is_new=True))
            budget -= rows[-1].num_tokens
        return self._launch("decode" if len(rows) == len(decoding) else "extend", num_steps, rows)

    def _schedule_apart(self, decoding: list[Request], prefilling: list[Request]) -> ScheduledBatch | None:
        """The next launch of a deterministic engine: one chunk of one prompt, or all rows that decode, in turns.

        Every launch of a request depends on the request alone: chunks begin at multiples of the chunk size, and decode
        launches are always K steps. Nothing is preempted, because whoever is admitted finds the pages of its full length.
        """
        if not decoding or self._last_kind == "decode":
            whole = self._config.max_tokens_per_step
            if prefilling:
                return self._launch("extend", 1, [self._dispatch_chunk(prefilling[0], whole)])
            if self._can_admit():
                return self._launch("extend", 1, [self._dispatch_chunk(self._admit(), whole, is_new=True)])
        steps = self._config.decode_steps
        return self._launch("decode", steps, self._dispatch_decoding(decoding, steps))

    def _launch(self, kind: Literal["extend", "decode"], num_steps: int, rows: list[ScheduledRow]) -> ScheduledBatch | None:
        if not rows:
            assert self._in_flight or not self._requests, "nothing can run, and nothing will change that"
            return None
        batch = ScheduledBatch(step_id=self._next_step_id, kind=kind, num_steps=num_steps, rows=rows)
        self._next_step_id += 1
        self._last_kind = kind
        self._in_flight.append(batch)
        return batch

    def _survey(self) -> tuple[list[Request], list[Request], int]:
        """Running requests that decode (the device samples their next token from its own last one, and not all are promised
        yet), those with known tokens still to compute, and how many pages one step of the former takes."""
        page_size = self._pool.page_size
        decoding, prefilling, missing = [], [], 0
        for request in self._running:
            computed = request.num_computed_tokens
            if computed < request.num_prefill_tokens:
                prefilling.append(request)
            elif request.num_left > 0:
                decoding.append(request)
                missing += computed >= page_size * len(request.pages)
        return decoding, prefilling, missing

    def _choose_num_steps(self, decoding: Sequence[Request], missing: int) -> int:
        """K steps when nothing but decoding is to be done, most of the steps have work, and the pages suffice; else one.

        A waiting request that a launch could take in asks for one step. Where none can be taken in before a row or pages
        come back, K steps make it wait at most that long, and cost what rows that are certain to end (at their limit)
        would lie idle: up to `IDLE_SHARE` of the launch that is less than what one-step launches cost. An end by a stop id
        cannot be foreseen, and is not waited for.
        """
        steps = self._config.decode_steps
        if steps == 1 or not decoding:
            return 1
        if self._waiting:
            if self._can_admit(missing):
                return 1
            idle = sum(steps - r.num_left for r in self._running if r.num_left < steps)
            if idle > IDLE_SHARE * steps * len(self._running):
                return 1
        if 2 * max(r.num_left for r in decoding) <= steps:
            return 1  # every row ends in the first half
        pages_for, taken = self._pool.pages_for, 0
        for r in decoding:
            taken += max(0, pages_for(r.num_computed_tokens + min(steps, r.num_left)) - len(r.pages))
        return steps if taken <= self._pool.num_free else 1

    def _can_admit(self, promised: int = 0) -> bool:
        """Whether a row is free and the pool, less `promised` pages, holds the head of the queue with its reserve (see
        "No ping-pong" above; where full lengths are reserved, every row's)."""
        if not self._waiting or not self._free_rows:
            return False
        free = self._pool.num_free - promised
        head = self._waiting[0]
        known = self._pool.pages_for(head.num_tokens)
        if known > free:
            return False
        growth = [self._full_length(r) - len(r.pages) for r in self._running] + [self._full_length(head) - known]
        if not self._reserves:
            per_row = 1 + head.num_preemptions
            growth = [min(per_row, pages) for pages in growth]
        return known + sum(growth) <= free

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

    def _dispatch_decoding(self, decoding: Sequence[Request], num_steps: int) -> list[ScheduledRow]:
        """One launch of `num_steps` steps for rows that decode: takes the pages, and counts their tokens as promised."""
        pool, step_id = self._pool, self._next_step_id
        rows = []
        for request in decoding:
            samples = min(num_steps, request.num_left)
            start = request.num_computed_tokens
            end = start + samples
            new_pages: Sequence[tuple[int, int]] = ()
            if end > pool.page_size * len(request.pages):
                new_pages = self._take_pages(request, end)
            request.num_computed_tokens = end
            request.num_in_flight += samples
            request.num_left -= samples
            request.last_step = step_id
            rows.append(ScheduledRow(request, request.row, request.epoch, start, samples, (), samples, False, new_pages))
        return rows

    def _dispatch_chunk(self, request: Request, budget: int, is_new: bool = False) -> ScheduledRow:
        """At most `budget` known tokens of one request: takes all its pages, and counts the tokens as computed."""
        start = request.num_computed_tokens
        end = min(request.num_prefill_tokens, start + min(self._config.prefill_chunk, budget))
        # A chunk samples when it reaches the last known token, unless only prompt logprobs were asked for.
        samples = int(end == request.num_prefill_tokens and request.num_left > 0)
        row = ScheduledRow(
            request=request,
            row=request.row,
            epoch=request.epoch,
            start=start,
            num_tokens=end - start,
            token_ids=_known_ids(request, start, end),
            samples=samples,
            is_new=is_new,
            new_pages=self._take_pages(request, request.num_prefill_tokens),
            wants_prompt_logprobs=request.scores_prompt and start < request.num_prompt_tokens,
        )
        request.num_computed_tokens = end
        request.num_in_flight += samples
        request.num_left -= samples
        request.last_step = self._next_step_id
        return row

    def _take_pages(self, request: Request, num_tokens: int) -> Sequence[tuple[int, int]]:
        """Pages for `num_tokens` tokens in all; the new ones as (index, page)."""
        held = len(request.pages)
        pages = self._pool.allocate(max(0, self._pool.pages_for(num_tokens) - held))
        request.pages += pages
        return list(enumerate(pages, held))

    # What came back

    def update(self, output: StepOutput) -> list[RequestUpdate]:
        """Take in the result of the oldest launch in flight.

        Returns:
            one entry a row of the launch whose request had not ended before, in the order of the launch's rows.
        """
        batch = self._in_flight.popleft()
        assert output.batch is batch, "results must be read in the order of the launches"
        updates = []
        every_finite = bool(output.finite.all())
        for column, (row, sampled) in enumerate(zip(batch.rows, output.token_lists, strict=True)):
            request = row.request
            if request.state is RequestState.FINISHED:
                continue  # ended by an earlier launch, by `finish` or by `abort`
            assert row.epoch == request.epoch
            samples = row.samples
            request.num_in_flight -= samples  # what was promised: a row that ended on the device gave less
            tokens = sampled[:samples]
            reason: FinishReason | None = None
            if every_finite and request.ending_ids.isdisjoint(tokens):
                assert not tokens or tokens[-1] >= 0, "the device ended a row that the host's rules let go on"
                request.output_ids += tokens
            else:
                tokens, reason = read_tokens(request, tokens, output.finite[:, column])
            if reason is None and len(request.output_ids) == request.limit:
                # With limit 0 only the prompt's logprobs were asked for: done when the prompt is.
                done = samples > 0 or row.start + row.num_tokens == request.num_prompt_tokens
                reason = "length" if done else None
            if reason is not None:
                self._end(request, reason)
            updates.append(RequestUpdate(request, column, tokens, reason is not None))
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
            assert len(request.output_ids) + request.num_in_flight + request.num_left == request.limit
            assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight
            assert len(request.pages) >= self._pool.pages_for(max(request.num_computed_tokens, request.num_prefill_tokens))
            launched = sum(row.samples for batch in self._in_flight for row in batch.rows if row.request is request)
            assert request.num_in_flight == launched
        for request in self._waiting:
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert not request.pages
            assert (request.row, request.num_computed_tokens, request.num_in_flight) == (-1, 0, 0)


def _known_ids(request: Request, start: int, end: int) -> list[int]:
    """Token ids at positions start..end-1, as many as the host knows."""
    num_prompt = request.num_prompt_tokens
    if start >= num_prompt:
        return request.output_ids[start - num_prompt : end - num_prompt]
    return request.prompt_ids[start:end] + request.output_ids[: max(0, end - num_prompt)]
