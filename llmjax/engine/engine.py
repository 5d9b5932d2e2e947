"""`Engine`: requests in, tokens and text out. It joins scheduler (what runs), runner (how) and text (what it means).

`step()` is the whole loop: schedule, dispatch, take the result of the launch before, update. The host is one launch
ahead of the device's results, so that its own work hides behind the device's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

from llmjax.engine.backend import is_gpu, use_compile_cache
from llmjax.engine.compile_programs import Program
from llmjax.engine.config import EngineConfig
from llmjax.engine.draft_model import DraftModel, fitting_draft, limit_tokens
from llmjax.engine.engine_stats import EngineStats
from llmjax.engine.engine_trace import EngineTrace
from llmjax.engine.engine_view import read_engine
from llmjax.engine.grammar import GrammarCompiler
from llmjax.engine.grammar_rows import follow, launch_masks
from llmjax.engine.launch_timer import LaunchTimer
from llmjax.engine.memory_map import MemoryMap, live_bytes, memory_map
from llmjax.engine.output_processor import NON_FINITE, LiveRequest
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.prompt_class import FORM, UNKNOWN, class_of
from llmjax.engine.request_checks import check_ids, check_params, output_limit, token_ids
from llmjax.engine.runner import PendingStep
from llmjax.engine.startup import start_runner
from llmjax.engine.tokenizer import Tokenizer, needed
from llmjax.errors import ConfigError, EngineError, QueueFullError, RequestError
from llmjax.model.registry import DecoderConfig, get_model
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request, ScheduledBatch, StepOutput
from llmjax.scheduling.scheduler import Scheduler
from llmjax.scheduling.speculation import Speculation
from llmjax.telemetry.metrics import EngineMetrics
from llmjax.telemetry.startup import Timeline
from llmjax.telemetry.timings import RequestTimeline

log = logging.getLogger(__name__)

POLICIES = ("reserve_full_length", "lanes", "max_wait", "speculative")  # fields of the config that no program is compiled for
LAUNCHES_AHEAD = 1  # launches dispatched beyond the one whose result is read next
NAP_SECONDS = 5e-4  # at most, while the next launch is put off: what comes meanwhile is looked at in between


class Engine:
    """Continuous batching over one model.

    Args:
        config: the model's config; `config.family` chooses its functions in the registry.
        params: parameter pytree on the device; held, not copied. Or `PendingParams`, which are being loaded: compiling goes on
            beside it.
        tokenizer: None serves token ids only.
        engine_config: sizes and policies.
        eos_ids: ids that end an output, besides the tokenizer's own.
        startup: the timeline of a start that began earlier.
        draft: the model that drafts, with `speculative.method: draft`; its parameters are held, not copied, and stay as they are
            when `update_params` swaps those of the model.

    Attributes:
        startup: the phases of its start.
        memory: where the device's memory went.
        grammars: compiles the forms of structured outputs; for a thread that must not wait, before it calls `add_request`.

    `metrics` counts for Prometheus. Set `trace` to have launches and requests written to a trace file.

    The engine is not thread-safe: one thread calls `add_request`, `abort` and `step`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Any,
        tokenizer: Tokenizer | None,
        engine_config: EngineConfig,
        *,
        eos_ids: Sequence[int] = (),
        startup: Timeline | None = None,
        draft: DraftModel | None = None,
    ) -> None:
        self.startup = startup if startup is not None else Timeline()
        if engine_config.compile_cache is not None:
            use_compile_cache(engine_config.compile_cache)
        self.tokenizer = tokenizer
        self.model_config = limit_tokens(config, tokenizer)
        self.config = engine_config.resolved(gpu=is_gpu(), model_max_context=config.max_positions)
        model = get_model(config.family)
        draft = fitting_draft(draft, model, self.model_config, tokenizer, self.config)
        started = start_runner(model, self.model_config, params, self.config, self.startup, draft)
        self.runner, self.memory, self._programs = started.runner, started.memory, started.programs
        num_pages = self.memory.num_pages
        self.eos_ids = tuple(dict.fromkeys((*eos_ids, *(tokenizer.eos_ids if tokenizer is not None else ()))))
        self.pool = PagePool(num_pages, self.config.page_size)
        self._built_speculative = self.config.speculative
        self.speculation = self._new_speculation(None)
        self._timer = LaunchTimer()
        self.scheduler = Scheduler(self.config, self.pool, self.speculation)
        self.stats = EngineStats(num_pages=num_pages - 1)
        self.trace: EngineTrace | None = None
        self.metrics = EngineMetrics([lane.name for lane in self.config.lanes])
        self.metrics.watch(lambda: read_engine(self))
        self._prefix_tokens_before = (0, 0)  # of schedulers that are gone
        self.grammars = GrammarCompiler(
            tokenizer,
            vocab_size=self.model_config.vocab_size,
            num_tokens=self.model_config.num_tokens,
            eos_ids=self.eos_ids,
            compiled=lambda seconds: self.metrics.grammar_compiled(seconds),
        )
        self._live: dict[str, LiveRequest] = {}
        self._owners: dict[Request, LiveRequest] = {}  # of each unfinished choice
        self._pending: collections.deque[PendingStep] = collections.deque()
        self._ready: list[RequestOutput] = []  # made outside step(): aborts, and results drained by update_params
        self._ids = itertools.count()
        self._failed: str | None = None  # why nothing can run any more
        self._random = random.Random(self.config.seed) if self.config.seed is not None else random.SystemRandom()
        self._ready_bytes = live_bytes()
        log.info("start: %s", self.startup.text())
        log.info(
            "engine ready in %.1f s: %d programs, %d pages of %d tokens, context %d, prefix cache %s",
            self.startup.elapsed, len(self.programs), num_pages - 1, self.config.page_size, self.config.max_context,
            "on" if self.config.prefix_cache else "off",
        )  # fmt: skip

    # -- requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        arrival_ns: int | None = None,
    ) -> str:
        """Queue a prompt (text, or token ids). Of two that wait in one lane, the one with the lower `priority` goes first.

        `arrival_ns` is when it came, by `time.monotonic_ns`; None is now. Times and a lane's timeout count from there.

        Returns its id. Raises `RequestError` when it can never be served, `QueueFullError` when its lane is full.
        """
        now_ns = time.monotonic_ns()
        arrival_ns = now_ns if arrival_ns is None else min(arrival_ns, now_ns)
        if isinstance(prompt, str):
            ids = needed(self.tokenizer, "a text prompt").encode(prompt, add_special_tokens=add_special_tokens)
            return self._add(ids, params, request_id, prompt, priority, arrival_ns)
        return self._add(token_ids(prompt), params, request_id, None, priority, arrival_ns)

    def add_chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **template_options: Any,
    ) -> str:
        """Queue a conversation, rendered by the model's chat template (`template_options` go to it); see `add_request`."""
        arrival_ns = time.monotonic_ns()
        tokenizer = needed(self.tokenizer, "chat")
        prompt = tokenizer.render_chat(messages, **template_options)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        return self._add(ids, params, request_id, prompt, priority, arrival_ns)

    def _add(
        self,
        ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        prompt: str | None,
        priority: int,
        arrival_ns: int,
    ) -> str:
        if request_id is None:
            request_id = next(name for name in map("request-{}".format, self._ids) if name not in self._live)
        elif request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", "request_id")
        if self._failed is not None:
            raise EngineError(self._failed)
        limit = output_limit(ids, params, self.config.max_context)
        check_ids(ids, self.model_config.num_tokens)
        check_params(params, self.model_config.num_tokens, self.eos_ids, has_tokenizer=self.tokenizer is not None)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed & (2**64 - 1)
        speculates = self.config.speculative is not None
        prompt_class = UNKNOWN if not speculates else FORM if params.structured else class_of(prompt, ids, self.tokenizer)
        requests = [
            Request(
                request_id=f"{request_id}/{choice}",
                prompt_ids=ids,
                params=params,
                seed=seed,
                limit=limit,
                choice=choice,
                eos_ids=() if params.ignore_eos else self.eos_ids,
                arrival_time=arrival_ns * 1e-9,
                priority=priority,
                prompt_class=prompt_class,
            )
            for choice in range(params.n)
        ]
        matchers = [] if params.structured is None else self.grammars.matchers(params, requests[0].stop_ids)
        live = LiveRequest(request_id, prompt, ids, requests, self.tokenizer, RequestTimeline(arrival_ns), matchers)
        try:
            for request in requests:
                self.scheduler.add(request)
        except QueueFullError as error:  # told by the first choice: nothing was queued
            self.metrics.refused(error.lane)
            raise
        except RequestError:
            for request in requests:
                self.scheduler.abort(request.request_id)
            raise
        live.timeline.enqueued(time.monotonic_ns())
        self._live[request_id] = live
        self._owners |= dict.fromkeys(requests, live)
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request now; it gets a last output with finish reason "abort". Unknown or finished ids are ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        now_ns = time.monotonic_ns()
        for request in live.requests:
            self._owners.pop(request, None)
            if not request.finished:
                self.scheduler.abort(request.request_id)
        self._ready.append(self._finish(live, live.abort(), now_ns))

    # -- the loop

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has anything left to do or to say."""
        return bool(self._live or self._pending or self._ready)

    def step(self, *, closed: bool = False) -> list[RequestOutput]:
        """One turn: launch the next batch, then read the launch before it. Returns the requests that changed.

        While rows are free the next batch is put off until the device is about to want it, so that whoever comes is in it: such a
        turn takes `NAP_SECONDS` at most, and does nothing.

        closed: no request will be added before the next call; nothing is put off then, and launches need not be short so as to be
        over when one comes.
        """
        if self._failed is not None:
            raise EngineError(self._failed)
        now_ns = time.monotonic_ns()
        self._expire(now_ns)
        may_gain = not closed and self.scheduler.num_running < self.config.max_sequences
        if may_gain and (put_off_ns := self._timer.put_off_ns(now_ns)) and not self._device_waits():
            time.sleep(min(put_off_ns * 1e-9, NAP_SECONDS))
            return self._take_ready()
        batch = self.scheduler.schedule(now_ns * 1e-9, closed=closed)
        if batch is not None:
            pending = self._dispatch(batch, now_ns)
            self._timer.launched(pending.program, time.monotonic_ns(), late=self._device_waits())
            self._pending.append(pending)
            self.stats.launches += 1
            self.stats.peak_pages_used = max(self.stats.peak_pages_used, self.pool.num_used)
            queried, cached = self.scheduler.prefix_tokens
            self.stats.prompt_tokens_queried = self._prefix_tokens_before[0] + queried
            self.stats.prompt_tokens_cached = self._prefix_tokens_before[1] + cached
            self.metrics.launched(batch.num_tokens, batch.num_steps)
        if self._pending and (batch is None or len(self._pending) > LAUNCHES_AHEAD):
            self._read_oldest()
            if not self._live and not self._pending:
                for line in self.scheduler.find_leaks():
                    log.error("nothing runs, but %s: a bug in llmjax; please report it", line)
        return self._take_ready()

    def _device_waits(self) -> bool:
        """Whether all that was launched has ended, and its results were not read yet."""
        return bool(self._pending) and self._pending[-1].ended

    def _take_ready(self) -> list[RequestOutput]:
        ready, self._ready = self._ready, []
        return ready

    def _dispatch(self, batch: ScheduledBatch, scheduled_ns: int) -> PendingStep:
        for request in batch.preempted:
            self._owners[request].timeline.left_row(scheduled_ns)
        self.stats.preemptions += len(batch.preempted)
        made_ns = time.monotonic_ns()
        new: list[RequestTimeline] = []
        if batch.kind == "extend":
            new = [self._owners[row.request].timeline for row in batch.rows if row.is_new]
            for row in batch.rows:
                known, request = len(row.token_ids), row.request
                self.stats.prompt_tokens_computed += known
                if known and request.num_preemptions:
                    first = min(row.start + known, request.num_prompt_tokens) - max(row.start, request.num_once_computed)
                    self.stats.tokens_recomputed += known - max(0, first)
        for timeline in new:
            timeline.scheduled(scheduled_ns)
        try:
            pending = self.runner.dispatch(batch, launch_masks(batch, self._owners, self.grammars, self.config.speculative))
        except BaseException as error:
            # The launch is accounted for, and the device's state may be lost with it: nothing can go on from here.
            reason = (str(error).splitlines() or ["no message"])[0]
            self._failed = f"a launch failed ({type(error).__name__}: {reason}); build a new engine"
            raise
        now_ns = time.monotonic_ns()
        for timeline in new:
            timeline.dispatched(now_ns)
        if self.trace is not None:
            counts = {"running": self.scheduler.num_running, "waiting": self.scheduler.num_waiting}
            self.trace.launched(batch, (scheduled_ns, made_ns), now_ns, **counts, pages=self.pool.num_used)
        return pending

    def _expire(self, now_ns: int) -> None:
        """Requests that waited too long for their first row are told so."""
        changed: dict[LiveRequest, None] = {}
        for request in self.scheduler.expire(now_ns * 1e-9):
            live = self._owners.pop(request)
            lane = self.config.lanes[request.lane]
            live.expire(request, f"the request waited longer than {lane.timeout:g} s for its turn in lane '{lane.name}'")
            changed[live] = None
        for live in changed:
            one = live.output()
            self._ready.append(self._finish(live, one, now_ns) if one.finished else one)

    def _read_oldest(self) -> None:
        waits_ns = time.monotonic_ns()
        result = self._pending[0].result()  # blocks: an interrupt here leaves the launch in place, to be read again
        self._pending.popleft()
        read_ns = time.monotonic_ns()
        self._measure(result.batch, read_ns)
        self._ready += self._process(result, read_ns)
        if result.proposed is not None and result.accepted is not None:
            self.stats.drafted += int(result.proposed.sum())
            self.stats.accepted += int(result.accepted.sum())
        if self.trace is not None:
            self.trace.read(result, waits_ns, read_ns, time.monotonic_ns())

    def _measure(self, batch: ScheduledBatch, read_ns: int) -> None:
        """Tell what a launch has taken, where that says something of its program: not if a draft model had to catch up before."""
        took = self._timer.read(read_ns)
        if self.speculation is None or took is None:
            return
        if batch.kind == "decode":
            self.speculation.measured("decode", len(batch.rows), batch.num_steps, took.seconds, at_most=took.waited)
        elif batch.kind == "speculate" and all(row.catch_up == (0, 0) for row in batch.rows):
            self.speculation.measured("speculate", len(batch.rows), batch.draft_length, took.seconds, at_most=took.waited)

    def _process(self, output: StepOutput, now_ns: int) -> list[RequestOutput]:
        changed: dict[LiveRequest, None] = {}
        gaps: dict[tuple[int, int], int] = {}  # (time of the tokens before, tokens of one row) -> tokens of all such rows
        updates = self.scheduler.update(output)
        follow(self.grammars, updates, self._owners)
        for result in updates:
            request = result.request
            live = self._owners[request]
            reason = live.take(result, output)
            if request.stepwise and result.tokens and reason in (None, "length"):
                reason = live.keep_to_form(request)
            changed[live] = None
            if count := len(result.tokens):
                timeline = live.timeline
                if timeline.first_token_ns is None:
                    self.metrics.first_token(self._lane_of(live), (now_ns - timeline.arrival_ns) * 1e-9)
                if (before_ns := timeline.tokens(count, now_ns)) is not None:
                    gaps[before_ns, count] = gaps.get((before_ns, count), 0) + count
            if reason is None:
                continue
            live.timeline.left_row(now_ns)
            del self._owners[request]
            if reason != request.finish_reason:
                self.scheduler.finish(request, reason)  # what only the text knows: a stop string, a NaN in the scores
        for (before_ns, count), tokens in gaps.items():
            self.metrics.between_tokens.add((now_ns - before_ns) * 1e-9 / count, tokens)
        outputs = []
        for live in changed:
            one = live.output()
            for new in one.new_token_ids:
                self.stats.output_tokens += len(new)
            outputs.append(self._finish(live, one, now_ns) if one.finished else one)
        return outputs

    def _finish(self, live: LiveRequest, last: RequestOutput, ended_ns: int) -> RequestOutput:
        """Count a request that has ended at `ended_ns`, whatever ended it, and forget it; its last output gets the timings."""
        del self._live[live.request_id]
        lane, reason, params = self._lane_of(live), str(last.outputs[0].finish_reason), live.requests[0].params
        self.stats.finished[reason] += 1
        self.stats.corrupted += any(choice.error == NON_FINITE for choice in last.outputs)
        live.timeline.ended(ended_ns)
        last.timings, last.speculation = live.timings(time.monotonic_ns()), live.speculation()
        longest = max(len(choice.token_ids) for choice in last.outputs)
        self.metrics.finished(last.timings, lane=lane, reason=reason, n=params.n, max_tokens=params.max_tokens, longest=longest)
        if self.trace is not None:
            self.trace.finished(live.timeline, last, lane=lane, reason=reason)
        return last

    # -- the rest

    def _lane_of(self, live: LiveRequest) -> str:
        return self.config.lanes[live.requests[0].lane].name

    @property
    def programs(self) -> list[Program]:
        """Every compiled program of this engine."""
        return self._programs

    def memory_map(self) -> MemoryMap:
        """Where the memory is at this moment, page by page and by purpose."""
        temp_bytes = max(program.temp_bytes for program in self.programs)
        return memory_map(self.pool, self.scheduler.page_uses(), self.stats.launches, self.runner, temp_bytes)

    def find_leaks(self) -> list[str]:
        """What is held that should not be while nothing runs, one line each; nothing, unless there is a leak.

        Looks at pages, rows, and the arrays alive in the process against those when the engine became ready: arrays that the
        caller has made or dropped since count too. Pages and rows are also looked at by `step` whenever the last request
        ends. Raises `EngineError` while something runs.
        """
        if self.has_unfinished:
            raise EngineError("leaks can be told only while nothing runs: call step until has_unfinished is False")
        self.pool.check_integrity()
        found = self.scheduler.find_leaks()
        more = live_bytes() - self._ready_bytes
        if more > 0:
            found.append(f"arrays of {more} bytes more are alive than when the engine became ready")
        return found

    def set_policy(self, **policy: Any) -> None:
        """Schedule by other rules from now on (`POLICIES`), with the same programs, buckets and pages, and an empty
        prefix cache. What was counted stays. `speculative` may be None, or what needs no other program: another temperature, a
        length that was compiled for, other limits.

        Raises `EngineError` while something runs, `ConfigError` for any other field of `EngineConfig`.
        """
        for name in policy:
            if name not in POLICIES:
                raise ConfigError(f"{name} cannot be changed in a running engine, only {', '.join(POLICIES)}: build a new engine")
        if self.has_unfinished:
            raise EngineError("the policy can be changed only while nothing runs: call step until has_unfinished is False")
        wanted, built = policy.get("speculative"), self._built_speculative
        deterministic = self.config.deterministic
        if wanted is not None and (built is None or not wanted.runs_on(built, deterministic=deterministic)):
            raise ConfigError(f"the engine has no programs for {wanted}; it was built for {built}: build a new engine")
        self.config = dataclasses.replace(self.config, **policy)
        if "speculative" in policy:
            self.speculation = self._new_speculation(self.speculation or self._paused)
        self.pool.forget_all()
        self.scheduler = Scheduler(self.config, self.pool, self.speculation)
        self.metrics.add_lanes([lane.name for lane in self.config.lanes])
        self._prefix_tokens_before = (self.stats.prompt_tokens_queried, self.stats.prompt_tokens_cached)

    def _new_speculation(self, before: Speculation | None) -> Speculation | None:
        """Who decides what is drafted, for the present config: it goes on counting, and knows what launches cost."""
        self._paused, config = before, self.config.speculative
        if config is None:
            return None
        self.runner.set_draft_temperature(config.temperature)
        seconds, counts = (self.runner.launch_seconds, None) if before is None else (before.launch_seconds, before.counts)
        return Speculation(config, seconds, deterministic=self.config.deterministic, counts=counts)

    def update_params(self, params: Any) -> None:
        """Swap the weights between two steps, e.g. after a training update. Same tree, shapes and dtypes; they are
        held, not copied.

        Requests that are running go on with the keys and values they have, unless they are preempted and computed
        again. For tokens of the new weights alone, update when `has_unfinished` is False. Nothing computed before is found in
        the prefix cache afterwards.
        """
        while self._pending:
            self._read_oldest()
        self.runner.update_params(params)
        self.scheduler.forget_prefixes()
