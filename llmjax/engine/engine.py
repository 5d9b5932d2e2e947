"""`Engine`: requests in, tokens and text out. It joins scheduler (what runs), runner (how) and text (what it means).

`step()` is the whole loop: schedule, dispatch, take the result of the launch before, update. The host is one launch
ahead of the device's results, so that its own work hides behind the device's.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import operator
import random
import time
from collections.abc import Sequence
from typing import Any

from llmjax.engine.backend import is_gpu, use_compile_cache
from llmjax.engine.config import EngineConfig
from llmjax.engine.memory import plan_pages
from llmjax.engine.output_processor import LiveRequest
from llmjax.engine.outputs import RequestOutput
from llmjax.engine.runner import ModelRunner, PendingStep, Program, on_device
from llmjax.engine.sample import MAX_STOPS
from llmjax.engine.self_check import check_finite
from llmjax.engine.tokenizer import Tokenizer
from llmjax.errors import ConfigError, ContextLengthError, EngineError, RequestError
from llmjax.model.registry import DecoderConfig, get_model
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request, ScheduledBatch, StepOutput
from llmjax.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

POLICIES = ("reserve_full_length",)  # fields of the config that no program is compiled for
LAUNCHES_AHEAD = 1  # launches dispatched beyond the one whose result is read next


@dataclasses.dataclass
class EngineStats:
    """Counters since the engine was made."""

    num_pages: int = 0
    peak_pages_used: int = 0
    launches: int = 0
    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    finished: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Engine:
    """Continuous batching over one model.

    Args:
        config: the model's config; `config.family` chooses its functions in the registry.
        params: parameter pytree on the device; held, not copied.
        tokenizer: None serves token ids only.
        engine_config: sizes and policies.
        eos_ids: ids that end an output, besides the tokenizer's own.

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
    ) -> None:
        started = time.perf_counter()
        if engine_config.compile_cache is not None:
            use_compile_cache(engine_config.compile_cache)
        self.tokenizer = tokenizer
        self.model_config = _mask_padding_ids(config, tokenizer)
        self.config = engine_config.resolved(gpu=is_gpu(), model_max_context=config.max_positions)
        model = get_model(config.family)
        params = on_device(params)
        num_pages = plan_pages(model, self.model_config, params, self.config)
        self.eos_ids = tuple(dict.fromkeys((*eos_ids, *(tokenizer.eos_ids if tokenizer is not None else ()))))
        self.pool = PagePool(num_pages, self.config.page_size)
        self.scheduler = Scheduler(self.config, self.pool)
        self.runner = ModelRunner(model, self.model_config, params, self.config, num_pages=num_pages)
        self.stats = EngineStats(num_pages=num_pages - 1)
        self._live: dict[str, LiveRequest] = {}
        self._owners: dict[Request, LiveRequest] = {}  # of each unfinished choice
        self._pending: collections.deque[PendingStep] = collections.deque()
        self._ready: list[RequestOutput] = []  # made outside step(): aborts, and results drained by update_params
        self._ids = itertools.count()
        self._failed: str | None = None  # why nothing can run any more
        self._random = random.Random(self.config.seed) if self.config.seed is not None else random.SystemRandom()
        self.runner.warm_up()
        check_finite(self.runner, model, self.model_config, self.config)
        log.info(
            "engine ready in %.1f s: %d programs, %d pages of %d tokens, context %d",
            time.perf_counter() - started, len(self.programs), num_pages - 1, self.config.page_size, self.config.max_context,
        )  # fmt: skip

    # -- requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> str:
        """Queue a prompt (text, or token ids). Returns its id; raises `RequestError` when it can never be served."""
        if isinstance(prompt, str):
            ids = self._tokenizer_for("a text prompt").encode(prompt, add_special_tokens=add_special_tokens)
            return self._add(ids, params, request_id, prompt)
        as_list = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # numpy and JAX arrays
        if not isinstance(as_list, list | tuple):
            raise RequestError(f"a prompt is a text or a list of token ids, got {prompt!r:.60}", "prompt")
        return self._add([_token_id(item, index) for index, item in enumerate(as_list)], params, request_id, None)

    def add_chat(
        self,
        messages: Sequence[dict[str, Any]],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        **template_options: Any,
    ) -> str:
        """Queue a conversation, rendered by the model's chat template (`template_options` go to it)."""
        tokenizer = self._tokenizer_for("chat")
        prompt = tokenizer.render_chat(messages, **template_options)
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        return self._add(ids, params, request_id, prompt)

    def _add(self, ids: list[int], params: SamplingParams, request_id: str | None, prompt: str | None) -> str:
        if request_id is None:
            request_id = next(name for name in map("request-{}".format, self._ids) if name not in self._live)
        elif request_id in self._live:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", "request_id")
        if self._failed is not None:
            raise EngineError(self._failed)
        limit = self._limit(ids, params)
        self._check_ids(ids)
        self._check_params(params)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed & (2**64 - 1)
        requests = [
            Request(
                request_id=f"{request_id}/{choice}",
                prompt_ids=ids,
                params=params,
                seed=seed,
                limit=limit,
                choice=choice,
                eos_ids=() if params.ignore_eos else self.eos_ids,
                arrival_time=time.monotonic(),
            )
            for choice in range(params.n)
        ]
        live = LiveRequest(request_id, prompt, ids, requests, self.tokenizer)
        try:
            for request in requests:
                self.scheduler.add(request)
        except RequestError:
            for request in requests:
                self.scheduler.abort(request.request_id)
            raise
        self._live[request_id] = live
        self._owners |= dict.fromkeys(requests, live)
        return request_id

    def _limit(self, ids: list[int], params: SamplingParams) -> int:
        if not ids:
            raise RequestError(
                "the prompt is empty and the tokenizer adds no beginning-of-sequence token: give at least one token", "prompt"
            )
        left = self.config.max_context - len(ids)
        needed = 0 if params.max_tokens == 0 else 1
        if left < needed:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; with max_context {self.config.max_context} at most "
                f"{self.config.max_context - needed} fit: shorten it, or raise max_context",
                "prompt",
            )
        return left if params.max_tokens is None else min(left, params.max_tokens)

    def _check_ids(self, ids: list[int]) -> None:
        size = self.model_config.num_tokens
        for index, item in enumerate(ids):
            if not 0 <= item < size:
                raise RequestError(f"prompt[{index}] is {item}: the model's token ids are 0 to {size - 1}", "prompt")

    def _check_params(self, params: SamplingParams) -> None:
        size = self.model_config.num_tokens
        for name, ids in (("stop_token_ids", params.stop_ids), ("logit_bias", tuple(params.logit_bias or ()))):
            for item in ids:
                if item >= size:
                    raise RequestError(f"{name} names token id {item}, but the vocabulary has ids 0 to {size - 1}", name)
        stops = len({*self.eos_ids, *params.stop_ids})
        if stops > MAX_STOPS:
            raise RequestError(
                f"stop_token_ids and the model's end-of-sequence ids are {stops} ids, at most {MAX_STOPS} fit",
                "stop_token_ids",
            )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this engine has none: use stop_token_ids", "stop")

    def _tokenizer_for(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this engine has none: give token ids, or a tokenizer", "prompt")
        return self.tokenizer

    def abort(self, request_id: str) -> None:
        """End a request now; it gets a last output with finish reason "abort". Unknown or finished ids are ignored."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        for request in live.requests:
            self._owners.pop(request, None)
            if not request.finished:
                self.scheduler.abort(request.request_id)
        self.stats.finished["abort"] += 1
        self._ready.append(live.abort())

    # -- the loop

    @property
    def has_unfinished(self) -> bool:
        """Whether `step()` has anything left to do or to say."""
        return bool(self._live or self._pending or self._ready)

    def step(self) -> list[RequestOutput]:
        """One turn: launch the next batch, then read the launch before it. Returns the requests that changed."""
        if self._failed is not None:
            raise EngineError(self._failed)
        batch = self.scheduler.schedule()
        if batch is not None:
            self._pending.append(self._dispatch(batch))
            self.stats.launches += 1
            self.stats.peak_pages_used = max(self.stats.peak_pages_used, self.pool.num_used)
        if self._pending and (batch is None or len(self._pending) > LAUNCHES_AHEAD):
            self._read_oldest()
        ready, self._ready = self._ready, []
        return ready

    def _dispatch(self, batch: ScheduledBatch) -> PendingStep:
        try:
            return self.runner.dispatch(batch)
        except BaseException as error:
            # The launch is accounted for, and the device's state may be lost with it: nothing can go on from here.
            reason = (str(error).splitlines() or ["no message"])[0]
            self._failed = f"a launch failed ({type(error).__name__}: {reason}); build a new engine"
            raise

    def _read_oldest(self) -> None:
        result = self._pending[0].result()  # blocks: an interrupt here leaves the launch in place, to be read again
        self._pending.popleft()
        self._ready += self._process(result)

    def _process(self, output: StepOutput) -> list[RequestOutput]:
        changed: dict[LiveRequest, None] = {}
        for result in self.scheduler.update(output):
            request = result.request
            live = self._owners[request]
            reason = live.take(result, output)
            changed[live] = None
            if reason is None:
                continue
            del self._owners[request]
            if not request.finished:
                self.scheduler.finish(request, reason)  # what only the text knows: a stop string, a NaN in the scores
        outputs = []
        for live in changed:
            one = live.output()
            outputs.append(one)
            for new in one.new_token_ids:
                self.stats.output_tokens += len(new)
            if one.finished:
                del self._live[live.request_id]
                self._count_finished(live, one)
        return outputs

    def _count_finished(self, live: LiveRequest, result: RequestOutput) -> None:
        self.stats.preemptions += result.num_preemptions
        self.stats.prompt_tokens_computed += len(live.prompt_ids) * len(live.requests)
        self.stats.finished[str(result.outputs[0].finish_reason)] += 1

    # -- the rest

    @property
    def programs(self) -> list[Program]:
        """Every compiled program of this engine."""
        return self.runner.programs

    def set_policy(self, **policy: Any) -> None:
        """Schedule by other rules from now on (`POLICIES`), with the same programs, buckets and pages.

        Raises `EngineError` while something runs, `ConfigError` for any other field of `EngineConfig`.
        """
        for name in policy:
            if name not in POLICIES:
                raise ConfigError(f"{name} cannot be changed in a running engine, only {', '.join(POLICIES)}: build a new engine")
        if self.has_unfinished:
            raise EngineError("the policy can be changed only while nothing runs: call step until has_unfinished is False")
        self.config = dataclasses.replace(self.config, **policy)
        self.scheduler = Scheduler(self.config, self.pool)

    def update_params(self, params: Any) -> None:
        """Swap the weights between two steps, e.g. after a training update. Same tree, shapes and dtypes; they are
        held, not copied.

        Requests that are running go on with the keys and values they have, unless they are preempted and computed
        again. For tokens of the new weights alone, update when `has_unfinished` is False.
        """
        while self._pending:
            self._read_oldest()
        self.runner.update_params(params)


def _token_id(item: Any, index: int) -> int:
    if not isinstance(item, bool):
        try:
            return operator.index(item)
        except TypeError:
            pass
    raise RequestError(f"prompt[{index}] is {item!r:.60}: a token id is a whole number", "prompt")


def _mask_padding_ids(config: DecoderConfig, tokenizer: Tokenizer | None) -> DecoderConfig:
    """A vocabulary is often padded to a round number of rows; ids no tokenizer can name must never be sampled."""
    if tokenizer is None or tokenizer.vocab_size >= config.num_tokens:
        return config
    return dataclasses.replace(config, num_tokens=tokenizer.vocab_size)  # type: ignore[type-var]
