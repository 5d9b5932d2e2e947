"""`Scheduler`: which tokens of which requests the next launch computes, and what a launch's result means for them.

Owns the lanes, the device rows and (through the pool) the pages. Knows no text, no JAX and no clock. There is no prefill
or decode mode: a request has tokens, and `num_computed_tokens` catches up with them. The engine's loop is

    batch = scheduler.schedule(now)     # None: nothing to launch before an older result was read
    pending.append(runner.dispatch(batch))
    changes = scheduler.update(pending.popleft().result())

and it may schedule ahead: any number of launches can be in flight. Four rules keep that safe:

*Order.* Who waits is let in in the order of `lanes.py`. In a lane, among requests of one priority, every running one came before
every waiting one: the first is let in, only the last is preempted, and it waits at its old place. With one lane that is first
come, first served. Between lanes there is no such order: a request may pass one of another lane that does not fit yet.

*Pages.* A request takes the pages of all its known tokens when it is admitted; after that only decoding asks for pages,
one row at most one page a step. All pages of a launch are taken before it is dispatched. Pages of a request that ended
while a launch could still write to them return to the pool when the result of the last such launch has been read. Pages that
the prefix cache finds are shared, and only read; the request's own begin behind them. Pages of a row whose logits were not
finite are found by nobody, and are zeroed on the device before anyone else's launch (`ScheduledBatch.dirty_pages`).

*Preemption* waits until nothing is in flight (`schedule` returns None until then): what was sampled is read and not thrown
away, pages of ended requests have come back and may suffice, and the victim's pages are free at once. It costs one bubble.
The victim is the last of its lane (`choose_victim`), never the oldest of all while another lane has one to give.

*No ping-pong.* A request is admitted only when, beyond the pages of its known tokens, every running row and itself can
grow by one page, or by one page more for each time it was preempted. So a request that lost its place waits for more room
each time, at most for all that the rows can ever use. Nothing is admitted in a launch that preempted.

*Stepwise* requests are launched only when the host has read their last token, so that with launches in flight they are not in
every launch; the others are.

*Turns.* A prompt is computed chunk by chunk, and each launch's tokens are shared anew, so that a short prompt waits for at
most the launches in flight and not for a long one before it. Rows that decode are in every launch. While rows are free the engine
asks for a launch just before the device wants it (`LaunchTimer`), so that whoever comes waits for the rest of one launch only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from llmjax.errors import RequestError
from llmjax.scheduling.admission import Admission
from llmjax.scheduling.finish_reason import FinishReason
from llmjax.scheduling.held_pages import HeldPages
from llmjax.scheduling.lanes import Lanes
from llmjax.scheduling.launch_reader import LaunchReader
from llmjax.scheduling.launch_rows import LaunchRows, note_joined
from llmjax.scheduling.pace import Pace
from llmjax.scheduling.page_map import PageUse
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.policy import (
    SchedulerConfig,
    can_idle,
    choose_victim,
    drafts_apart,
    has_work_and_pages,
    reserves_full_length,
    takes_turns_alone,
)
from llmjax.scheduling.prefix_cache import PrefixCache
from llmjax.scheduling.request import LaunchKind, Request, RequestState, ScheduledBatch, ScheduledRow, StepOutput
from llmjax.scheduling.results import RequestUpdate
from llmjax.scheduling.seats import Seats
from llmjax.scheduling.speculation import Drafting, Speculation


class Scheduler:
    """Continuous batching, decided anew for every launch."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, speculation: Speculation | None = None) -> None:
        """The scheduler is the only one to take pages from `pool`. `speculation` decides who drafts; None: nobody."""
        assert 1 <= config.max_sequences <= config.max_tokens_per_step, "a launch must hold one token of every row"
        self._config = config
        self._pool = pool
        self._requests: dict[str, Request] = {}  # every unfinished request
        self._lanes = Lanes(config.lanes, config.max_wait)  # who waits, preempted ones included
        self._seats = Seats(config.max_sequences, pool.page_size)
        self._running = self._seats.taken  # as they were let in; each has a row and pages
        self._in_flight: deque[ScheduledBatch] = deque()  # dispatched, result not read; oldest first
        self._next_step_id = 0
        self._last_kind: LaunchKind = "decode"
        self._pages = HeldPages(pool)
        self._rows = LaunchRows(pool, self._pages, prefill_chunk=config.prefill_chunk)
        self._speculation, self._speculative = speculation, config.speculative
        assert (speculation is None) == (self._speculative is None)
        self._prefixes: PrefixCache | None = None
        if config.prefix_cache:
            chunk = min(config.prefill_chunk, config.max_tokens_per_step) if config.deterministic else None
            self._prefixes = PrefixCache(pool, chunk=chunk)
        self._reader = LaunchReader(self._pages, self._prefixes, speculation, self._end)
        self._admission = Admission(config, pool, self._lanes, self._prefixes)
        self._pace = Pace()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs. Launches may be in flight beyond that; their results still give pages back."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, preempted ones included."""
        return len(self._lanes)

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    @property
    def running(self) -> list[Request]:
        """Them, as they were let in. May be read from any thread, as `num_preempted` and `waiting_by_lane` may."""
        return list(self._running)

    @property
    def num_preempted(self) -> int:
        """Waiting requests that had a row before."""
        return self._lanes.num_preempted

    @property
    def waiting_by_lane(self) -> dict[str, int]:
        """The same by the name of the lane."""
        return self._lanes.counts()

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """Prompt tokens looked up in the prefix cache, and those found; each request counts once."""
        return (0, 0) if self._prefixes is None else (self._prefixes.query_tokens, self._prefixes.hit_tokens)

    @property
    def num_reserved_pages(self) -> int:
        """Pages nobody else may have: those in use, and with full lengths reserved also those running rows will grow into."""
        growth = sum(r.full_pages - len(r.pages) for r in self._running) if reserves_full_length(self._config) else 0
        return self._pool.num_used + growth

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a fresh request. Its `limit` is lowered to what the pool can hold, should that be less.

        Raises:
            RequestError: an unfinished request has the same id.
            QueueFullError: its lane is full.
            ContextLengthError: the prompt and one new token need more pages than the pool has.
        """
        assert request.state is RequestState.WAITING
        assert request.prompt_ids
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use: choose another", "request_id")
        self._admission.fit(request)
        self._lanes.push(request)
        self._requests[request.request_id] = request
        self._pace.came(request.arrival_time)

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

    def expire(self, now: float) -> list[Request]:
        """End the requests that have waited for their first row longer than their lane lets them, with reason "timeout"."""
        expired = self._lanes.expired(now)
        for request in expired:
            self._end(request, "timeout")
        return expired

    # What to launch

    def schedule(self, now: float = 0.0, *, closed: bool = False) -> ScheduledBatch | None:
        """Decide the next launch and account for it as dispatched.

        Args:
            now: seconds on the clock of `Request.arrival_time`.
            closed: no request will be added before the next call, so that none can be kept waiting by a long launch.

        Returns:
            the launch, or None when there is nothing to do before the result of an older launch has been read. With none in
            flight None means that no request is left.
        """
        decoding, prefilling, missing = self._seats.survey()
        preempted: list[Request] = []
        while missing > self._pool.num_free:
            if self._in_flight:
                return None  # read first: see "Preemption" above
            preempted.append(choose_victim(self._running, self._config.lanes))
            self._preempt(preempted[-1], now)
            decoding, prefilling, missing = self._seats.survey()
        if self._config.deterministic:
            return self._schedule_apart(decoding, prefilling, now)

        if self._in_flight and decoding and takes_turns_alone(self._running) and self._next(now) is None:
            return None  # read first, and launch all together
        if (drafting := self._plan_drafts(decoding, prefilling, now)) is not None:
            self._pace.launched(0, now)
            return self._speculate(decoding, drafting, preempted)
        # Rows that decode always get their token: a long prompt must not stop a running answer.
        num_steps = 1 if prefilling else self._choose_num_steps(decoding, missing, now, closed)
        rows = self._rows.decode(decoding, num_steps, self._next_step_id)
        if num_steps == 1:
            rows += self._dispatch_prompts(prefilling, self._config.max_tokens_per_step - len(rows), now, admit=not preempted)
        kind: LaunchKind = "decode" if len(rows) == len(decoding) else "extend"
        if kind == "extend":
            note_joined(rows[: len(decoding)])
        if rows:
            self._pace.launched(num_steps if kind == "decode" else 0, now)
        return self._launch(kind, num_steps, rows, preempted)

    def _dispatch_prompts(self, prefilling: list[Request], budget: int, now: float, *, admit: bool) -> list[ScheduledRow]:
        """What decoding leaves goes to prompts: to lanes by weight, in a lane first to those begun, then to new ones."""
        rows = []
        left = self._admission.shares(prefilling, self._running, self._seats.num_free if admit else 0, budget, now)
        for request in prefilling:
            if left[request.lane] > 0:
                rows.append(self._rows.chunk(request, left[request.lane], self._next_step_id))
                left[request.lane] -= rows[-1].num_tokens
        while admit and any(left) and (new := self._next(now, left)) is not None:
            self._admit(new, now)
            rows.append(self._rows.chunk(new, left[new.lane], self._next_step_id, is_new=True))
            left[new.lane] -= rows[-1].num_tokens
        return rows

    def _schedule_apart(self, decoding: list[Request], prefilling: list[Request], now: float) -> ScheduledBatch | None:
        """The next launch of a deterministic engine: one chunk of one prompt, or all rows that decode, in turns.

        Every launch of a request depends on the request alone: chunks begin at multiples of the chunk size, and decode
        launches are always K steps. Nothing is preempted, because whoever is admitted finds the pages of its full length.
        """
        if not decoding or self._last_kind != "extend":
            whole = self._config.max_tokens_per_step
            new = self._next(now)
            if prompts := [*prefilling, *([new] if new is not None else [])]:
                request = self._lanes.next_chunk(prompts)
                if request is new:
                    self._admit(request, now)
                chunk = self._rows.chunk(request, whole, self._next_step_id, is_new=request is new)
                return self._launch("extend", 1, [chunk])
        if self._speculative is not None:
            drafts = {request: drafts_apart(request, self._speculative) for request in decoding}
            known = {request: count for request, count in drafts.items() if count is not None}
            return self._speculate(list(known), Drafting(self._speculative.tokens, list(known.values())))
        steps = self._config.decode_steps
        return self._launch("decode", steps, self._rows.decode(decoding, steps, self._next_step_id))

    def _plan_drafts(self, decoding: Sequence[Request], prefilling: Sequence[Request], now: float) -> Drafting | None:
        """Who drafts in this launch; None: nobody, or it is to compute prompts, or there are no pages for all that may come."""
        if self._speculation is None or not decoding or prefilling or self._next(now) is not None:
            return None
        drafting = self._speculation.plan(decoding)
        if drafting is None or self._rows.pages_missing(decoding, drafting.drafts) > self._pool.num_free:
            return None
        return drafting

    def _speculate(
        self, decoding: Sequence[Request], drafting: Drafting, preempted: Sequence[Request] = ()
    ) -> ScheduledBatch | None:
        assert self._speculative is not None
        fills = self._speculative.method == "draft"
        rows = self._rows.speculate(decoding, drafting.drafts, self._next_step_id, fills=fills)
        for row in rows:
            if self._prefixes is not None and row.catch_up != (0, 0):
                self._prefixes.drafted(row.request)
        return self._launch("speculate", 1, rows, preempted, draft_length=drafting.length)

    def _launch(
        self,
        kind: LaunchKind,
        num_steps: int,
        rows: list[ScheduledRow],
        preempted: Sequence[Request] = (),
        *,
        draft_length: int = 0,
    ) -> ScheduledBatch | None:
        if not rows:
            assert self._in_flight or not self._requests, "nothing can run, and nothing will change that"
            return None
        batch = ScheduledBatch(
            self._next_step_id, kind, num_steps, rows, preempted, dirty_pages=self._pool.take_dirty(), draft_length=draft_length
        )
        self._next_step_id += 1
        self._last_kind = kind
        self._in_flight.append(batch)
        return batch

    def _choose_num_steps(self, decoding: Sequence[Request], missing: int, now: float, closed: bool) -> int:
        """K steps when nothing but decoding is to be done, most of the steps have work, and the pages suffice; else one.

        A waiting request that a launch could take in asks for one step; for one that must wait anyway see `can_idle`; one that
        is likely to come while rows are free asks as well, if the launch is long. So does a stepwise one: it gets one token of
        a launch, and would else wait for the other steps.
        """
        steps = self._config.decode_steps
        if steps == 1 or not decoding or any(request.stepwise for request in self._running):
            return 1
        if any(batch.kind == "speculate" for batch in self._in_flight) and any(r.num_left < steps for r in decoding):
            return 1  # a row may have more tokens left than the host knows of, and would take them
        if not closed and self._seats.num_free and self._pace.hurries(steps, now):
            return 1
        if len(self._lanes):
            coming = self._admission.next(self._running, self._seats.num_free, now, promised=missing)
            if coming is not None or not can_idle(self._running, steps):
                return 1
        return steps if has_work_and_pages(decoding, steps, self._pool) else 1

    def _next(self, now: float, left: Sequence[int] | None = None) -> Request | None:
        return self._admission.next(self._running, self._seats.num_free, now, left=left)

    def _admit(self, request: Request, now: float) -> None:
        """Give a waiting request a row."""
        self._lanes.take(request, now)
        request.num_prefill_tokens = request.num_tokens
        if self._prefixes is not None:
            self._prefixes.begin(request)
        self._seats.enter(request)

    def _preempt(self, request: Request, now: float) -> None:
        """Send a running request back to its place in its lane; its known tokens will be computed again."""
        assert not self._in_flight
        assert request.num_in_flight == 0
        self._leave(request)
        request.state = RequestState.PREEMPTED
        request.num_once_computed = max(request.num_once_computed, request.num_computed_tokens)
        request.num_prefill_tokens = request.num_computed_tokens = request.num_drafted = 0
        request.num_preemptions += 1
        request.epoch += 1
        self._lanes.push_front(request, now)

    # What came back

    def update(self, output: StepOutput) -> list[RequestUpdate]:
        """Take in the result of the oldest launch in flight.

        Returns:
            one entry a row of the launch whose request had not ended before, in the order of the launch's rows.
        """
        batch = self._in_flight.popleft()
        assert output.batch is batch, "results must be read in the order of the launches"
        updates = self._reader.read(output)
        self._pages.release_until(batch.step_id)
        return updates

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Finish a waiting or running request; what is in flight for it no longer counts."""
        del self._requests[request.request_id]
        if self._speculation is not None:
            self._speculation.ended(request)
        if reason == "error":
            self._pages.condemn(request)
        if request.state is RequestState.RUNNING:
            self._leave(request)
        else:
            self._lanes.remove(request)
        if reason in ("stop", "length"):
            self._lanes.learn(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.num_in_flight = 0

    def _leave(self, request: Request) -> None:
        """Take row and pages from a running request.

        The row can be given out at once: the device runs launches in order, and resets a row for its new request. The pages
        wait for the last launch that may touch them.
        """
        self._seats.leave(request)
        self._pages.give_back(request, self._in_flight[0].step_id if self._in_flight else None)

    def forget_prefixes(self) -> None:
        """No page is found any more, nor given a key by a request that runs now: the weights have changed."""
        if self._prefixes is not None:
            self._prefixes.forget_all(self._running)

    # Looking at it

    def page_uses(self) -> list[PageUse]:
        """Every page that is held, or that the prefix cache finds."""
        return self._pages.uses(self._running, self._next_step_id)

    def find_leaks(self) -> list[str]:
        """What is still held although no request is left and nothing is in flight, one line each: nothing, unless there is a
        bug. Costs O(1)."""
        assert not self._requests
        assert not self._in_flight
        found = []
        taken_rows = self._seats.num_rows - self._seats.num_free
        if self._pool.num_used:
            found.append(f"{self._pool.num_used} of {self._pool.capacity} pages are held by no request")
        if taken_rows:
            found.append(f"{taken_rows} of {self._seats.num_rows} rows are taken by no request")
        return found

    def check_integrity(self) -> None:
        """Assert the invariants between calls. Costs O(pages): for tests and debugging."""
        self._lanes.check_integrity()
        self._pages.check_integrity(self._running, {batch.step_id for batch in self._in_flight})
        self._seats.check_integrity(self._in_flight)
        assert sorted(r.request_id for r in (*self._running, *self._lanes)) == sorted(self._requests)
        for request in self._lanes:
            assert request.state in (RequestState.WAITING, RequestState.PREEMPTED)
            assert not request.pages
            assert (request.row, request.num_computed_tokens, request.num_in_flight) == (-1, 0, 0)
