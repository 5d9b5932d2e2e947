"""An engine without a model, for tests of what is around engines: its output is the prompt's own bytes, over and over.

Choice i starts at byte i of the prompt. Rows are bounded as in the real one, and a step gives each row one token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob
from llmjax.errors import ContextLengthError, RequestError
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.metrics import EngineMetrics
from llmjax.telemetry.startup import Timeline


class FakeTokenizer:
    """A token is a byte."""

    vocab_size = 256

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)


@dataclasses.dataclass
class FakeStats:
    num_pages: int = 64
    peak_pages_used: int = 0


class FakeEngine:
    """`Engine`'s methods. `fail_on` is a text that makes a request end with finish reason "error"."""

    def __init__(self, config: EngineConfig | None = None, *, fail_on: str | None = None) -> None:
        self.config = config or EngineConfig(max_context=64, max_sequences=4)
        self.tokenizer = FakeTokenizer()
        self.stats = FakeStats()
        self.startup = Timeline()
        self.metrics = EngineMetrics(["all"])
        self.added = 0
        self.most_choices = 0
        self._fail_on = fail_on
        self._ids = itertools.count()
        self._live: dict[str, tuple[RequestOutput, SamplingParams]] = {}
        self._aborted: list[RequestOutput] = []

    @property
    def num_running(self) -> int:
        """Requests that have not ended, those with a last output still to be taken not among them."""
        return len(self._live)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live or self._aborted)

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        arrival_ns: int | None = None,
    ) -> str:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        text = prompt if isinstance(prompt, str) else None
        return self._add(ids, params, request_id, text)

    def add_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams, *, request_id: str | None = None, **options: Any
    ) -> str:
        text = self.tokenizer.render_chat(messages, **options)
        return self._add(self.tokenizer.encode(text), params, request_id, text)

    def _add(self, ids: list[int], params: SamplingParams, request_id: str | None, prompt: str | None) -> str:
        if not ids:
            raise RequestError("the prompt is empty", "prompt")
        if any(token >= 256 for token in ids):
            raise RequestError("prompt: no such token", "prompt")
        assert self.config.max_context is not None
        if len(ids) >= self.config.max_context:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens", "prompt")
        self.added += 1
        request_id = request_id or f"fake-{next(self._ids)}"
        choices = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        output = RequestOutput(request_id, prompt, ids, choices)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *(PositionLogprobs(fake_logprob(token)) for token in ids[1:])]
        self._live[request_id] = (output, params)
        self.most_choices = max(self.most_choices, sum(len(out.outputs) for out, _ in self._live.values()))
        return request_id

    def abort(self, request_id: str) -> None:
        output, _ = self._live.pop(request_id, (None, None))
        if output is not None:
            output.new_text, output.new_token_ids = [[""] * len(output.outputs), [[] for _ in output.outputs]]
            for choice in output.outputs:
                choice.finish_reason = choice.finish_reason or "abort"
            output.finished = True
            self._aborted.append(output)

    def step(self, *, closed: bool = False) -> list[RequestOutput]:
        aborted, self._aborted = self._aborted, []
        return aborted + self._step()

    def _step(self) -> list[RequestOutput]:
        rows = list(itertools.islice(self._live.items(), self.config.max_sequences))
        self.stats.peak_pages_used = max(self.stats.peak_pages_used, len(rows))
        return [self._advance(request_id, output, params) for request_id, (output, params) in rows]

    def _advance(self, request_id: str, output: RequestOutput, params: SamplingParams) -> RequestOutput:
        ids = output.prompt_token_ids
        assert self.config.max_context is not None
        room = self.config.max_context - len(ids)
        limit = room if params.max_tokens is None else min(room, params.max_tokens)
        output.new_text, output.new_token_ids = [], []
        for choice in output.outputs:
            fresh = []
            if len(choice.token_ids) < limit:
                token = ids[(choice.index + len(choice.token_ids)) % len(ids)]
                fresh = [token]
                choice.token_ids.append(token)
                if choice.logprobs is not None:
                    top = tuple(fake_logprob(token + rank, rank + 1) for rank in range(params.logprobs or 0))
                    choice.logprobs.append(PositionLogprobs(fake_logprob(token), top))
            before = choice.text
            choice.text = self.tokenizer.decode(choice.token_ids)
            if len(choice.token_ids) >= limit:
                choice.finish_reason = "length"
                if self._fail_on is not None and self._fail_on in self.tokenizer.decode(ids):
                    choice.finish_reason, choice.error = "error", "the logits were NaN"
            output.new_text.append(choice.text.removeprefix(before))
            output.new_token_ids.append(fresh)
        output.finished = all(choice.finish_reason is not None for choice in output.outputs)
        if output.finished:
            self._live.pop(request_id)
        return output


def fake_logprob(token: int, rank: int = 1) -> TokenLogprob:
    """A logprob that tells the token and the rank apart."""
    raw = bytes([token % 256])
    return TokenLogprob(token, -token / 256 - rank, rank, raw.decode(errors="replace"), raw)


class FakeLLM:
    """What `LLM` is to `Engine`."""

    def __init__(self, **options: Any) -> None:
        self.engine = FakeEngine(**options)
        self.name = "fake-model"

    def generate(self, prompts: Sequence[str | list[int]], params: SamplingParams) -> list[RequestOutput]:
        ids, done = [self.engine.add_request(prompt, params) for prompt in prompts], {}
        while self.engine.has_unfinished:
            done |= {output.request_id: output for output in self.engine.step() if output.finished}
        return [done[request_id] for request_id in ids]
