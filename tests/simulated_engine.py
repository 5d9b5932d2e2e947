"""An engine in virtual time: the real scheduler and page pool, a device that takes as long as it is told, and no model.

A launch takes `fixed` seconds and `a_token` for each token computed (of a decode launch: each step and row). A request that is
not in the way of another one can so be timed by hand. Text has a token a character.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import CompletionOutput
from llmjax.errors import ContextLengthError
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request, ScheduledBatch, StepOutput
from llmjax.scheduling.scheduler import Scheduler


@dataclasses.dataclass
class SimulatedOutput:
    """What the load test reads of a `RequestOutput`, the queue's time included."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    new_token_ids: list[list[int]]
    num_preemptions: int
    finished: bool
    timings: Any = None


class SimulatedEngine:
    """`Engine`, as far as a load test goes. `now` is the time; `clock` and `sleep` are for `EngineTarget`."""

    def __init__(
        self,
        *,
        num_pages: int = 1000,
        fixed: float = 0.01,
        a_token: float = 0.0,
        interrupt_at: float | None = None,
        **options: Any,
    ) -> None:
        options = {"max_sequences": 4, "max_context": 512, "max_tokens_per_step": 64} | options
        self.config = EngineConfig(**options).resolved(gpu=False, model_max_context=4096)
        self.model_config = types.SimpleNamespace(num_tokens=100)
        self.pool = PagePool(num_pages, self.config.page_size)
        self.stats = types.SimpleNamespace(num_pages=num_pages - 1)
        self.runner = types.SimpleNamespace(compiles_after_ready=0)
        self.now = 100.0
        self.policies: list[dict[str, Any]] = []
        self.most_running = 0
        self._fixed, self._a_token, self._interrupt_at = fixed, a_token, interrupt_at
        self._ids = itertools.count()
        self._pending: collections.deque[tuple[ScheduledBatch, float]] = collections.deque()  # and when it ends
        self._ready: list[SimulatedOutput] = []
        self._live: dict[str, tuple[Request, CompletionOutput]] = {}
        self._queued: dict[str, float] = {}  # since when it waits
        self._waited: dict[str, float] = {}
        self.set_policy()
        self.policies.clear()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live or self._pending or self._ready)

    def set_policy(self, **policy: Any) -> None:
        assert not self.has_unfinished
        self.policies.append(policy)
        self.config = dataclasses.replace(self.config, **policy)
        self.pool.forget_all()
        self.scheduler = Scheduler(self.config, self.pool)

    def add_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams) -> str:
        return self.add_request("".join(str(message["content"]) for message in messages), params)

    def add_request(self, prompt: str | Sequence[int], params: SamplingParams) -> str:
        ids = [ord(letter) for letter in prompt] if isinstance(prompt, str) else list(prompt)
        left = self.config.max_context - len(ids)
        if left < 1:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens", "prompt")
        name = f"sim-{next(self._ids)}"
        assert params.max_tokens is not None
        request = Request(
            request_id=name, prompt_ids=ids, params=params, seed=0, limit=min(left, params.max_tokens), arrival_time=self.now
        )
        self.scheduler.add(request)
        self._live[name] = (request, CompletionOutput(0))
        self._queued[name], self._waited[name] = self.now, 0.0
        return name

    def abort(self, request_id: str) -> None:
        if (found := self._live.pop(request_id, None)) is not None:
            self.scheduler.abort(request_id)
            found[1].finish_reason = "abort"
            self._ready.append(self._output(*found, [], finished=True))

    def step(self, *, closed: bool = False) -> list[SimulatedOutput]:
        """As the real one: one launch ahead of what was read, and decided when the device wants it while rows are free."""
        if self._interrupt_at is not None and self.now >= self._interrupt_at:
            self._interrupt_at = None
            raise KeyboardInterrupt
        self._expire()
        may_gain = not closed and self.scheduler.num_running < self.config.max_sequences
        if may_gain and len(self._pending) == 1 and self.now < self._pending[0][1]:
            self.now = self._pending[0][1]
            return self._take_ready()
        batch = self.scheduler.schedule(self.now, closed=closed)
        if batch is not None:
            self._dispatched(batch)
        if self._pending and (batch is None or len(self._pending) > 1):
            self._read(*self._pending.popleft())
        self.scheduler.check_integrity()
        return self._take_ready()

    def _take_ready(self) -> list[SimulatedOutput]:
        ready, self._ready = self._ready, []
        return ready

    def _expire(self) -> None:
        for request in self.scheduler.expire(self.now):
            _, out = self._live.pop(request.request_id)
            out.finish_reason, out.error = "timeout", f"it waited too long in lane '{self.config.lanes[request.lane].name}'"
            self._ready.append(self._output(request, out, [], finished=True))

    def _dispatched(self, batch: ScheduledBatch) -> None:
        for row in batch.rows:
            name = row.request.request_id
            if row.is_new and name in self._queued:
                self._waited[name] += self.now - self._queued.pop(name)
        self.most_running = max(self.most_running, self.scheduler.num_running)
        steps = batch.num_steps if batch.kind == "decode" else 1
        begins = max(self.now, self._pending[-1][1] if self._pending else 0.0)
        self._pending.append((batch, begins + self._fixed + self._a_token * steps * batch.num_tokens))

    def _read(self, batch: ScheduledBatch, ended: float) -> None:
        self.now = max(self.now, ended)
        shape = (batch.num_steps, len(batch.rows))
        tokens = np.full(shape, -1, np.int32)
        for column, row in enumerate(batch.rows):
            tokens[: row.samples, column] = 7
        output = StepOutput(batch, tokens, np.zeros(shape, np.float32), np.ones(shape, np.int32), np.ones(shape, bool))
        for update in self.scheduler.update(output):
            request, out = self._live[update.request.request_id]
            out.token_ids += update.tokens
            out.finish_reason = request.finish_reason
            if update.finished:
                del self._live[request.request_id]
            self._ready.append(self._output(request, out, list(update.tokens), finished=update.finished))

    def _output(self, request: Request, out: CompletionOutput, new: list[int], *, finished: bool) -> SimulatedOutput:
        name = request.request_id
        waited = types.SimpleNamespace(queue_ns=round(self._waited[name] * 1e9)) if finished else None
        return SimulatedOutput(name, request.prompt_ids, [out], [new], request.num_preemptions, finished, waited)


class SimulatedLLM:
    """What `LLM` is to `Engine`."""

    def __init__(self, **options: Any) -> None:
        self.engine = SimulatedEngine(**options)
        self.name = "simulated"
