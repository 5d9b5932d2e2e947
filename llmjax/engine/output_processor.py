"""`LiveRequest`: a request's choices while they run, turned from token ids into `RequestOutput`s. No JAX."""

from __future__ import annotations

import numpy as np

from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob
from llmjax.engine.text_output import ChoiceText, token_text
from llmjax.engine.tokenizer import Tokenizer
from llmjax.scheduling.request import FinishReason, Request, StepOutput
from llmjax.scheduling.scheduler import RequestUpdate

NON_FINITE = (
    "the model's logits were NaN or infinite for this request; with float16 use bfloat16 or float32, else check the weights"
)


class LiveRequest:
    """All choices of one prompt. `take` adds what a launch brought, `output` says what is new since the last call."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: list[int], requests: list[Request], tokenizer: Tokenizer | None
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.requests = requests
        self._prompt = prompt
        self._tokenizer = tokenizer
        params = requests[0].params
        self._outputs = [
            CompletionOutput(index=i, logprobs=None if params.logprobs is None else []) for i in range(len(requests))
        ]
        self._texts = [None if tokenizer is None else ChoiceText(tokenizer, prompt_ids, request.params) for request in requests]
        self._seen = [(0, 0)] * len(requests)  # characters and tokens already given out
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prompt_ids)

    def finish_reason(self, choice: int) -> FinishReason | None:
        """Why this choice has ended, None while it runs."""
        return self._outputs[choice].finish_reason

    def take(self, update: RequestUpdate, output: StepOutput) -> None:
        """Add one row's result of a launch."""
        request = update.request
        out, text = self._outputs[request.choice], self._texts[request.choice]
        if output.prompt_scores is not None and not self._take_prompt_scores(update, output):
            out.finish_reason, out.error = "error", NON_FINITE
            return
        for step, token in update.tokens:
            ended_by_token = request.finish_reason == "stop" and (step, token) == update.tokens[-1]
            out.token_ids.append(token)
            out.cumulative_logprob += float(output.logprobs[step, update.column])
            if out.logprobs is not None:
                out.logprobs.append(self._logprobs(request, update.column, step, token, output))
            if text is None:
                continue
            delta, matched = text.add(token, len(out.token_ids), ended=ended_by_token)
            out.text += delta
            if matched is not None:
                out.finish_reason, out.stop_reason = "stop", matched
                return  # tokens after the stop string in the same launch are dropped
        if request.finished:
            out.finish_reason = request.finish_reason
            if request.finish_reason == "stop" and request.stop_token not in request.eos_ids:
                out.stop_reason = request.stop_token
            if request.finish_reason == "error":
                out.error = NON_FINITE
            if text is not None:
                out.text += text.finish()

    def abort(self) -> RequestOutput:
        """The last output of a request that was aborted: choices still running end with "abort"."""
        for out, text in zip(self._outputs, self._texts, strict=True):
            if out.finish_reason is None:
                out.finish_reason = "abort"
                if text is not None:
                    out.text += text.finish()
        return self.output()

    def output(self) -> RequestOutput:
        """Everything so far, and what is new since the last call."""
        new_text = [out.text[chars:] for out, (chars, _) in zip(self._outputs, self._seen, strict=True)]
        new_ids = [out.token_ids[tokens:] for out, (_, tokens) in zip(self._outputs, self._seen, strict=True)]
        self._seen = [(len(out.text), len(out.token_ids)) for out in self._outputs]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=self._outputs,
            prompt_logprobs=self._prompt_logprobs,
            new_text=new_text,
            new_token_ids=new_ids,
            num_preemptions=sum(request.num_preemptions for request in self.requests),
            finished=all(out.finish_reason is not None for out in self._outputs),
        )

    def _logprobs(self, request: Request, column: int, step: int, token: int, output: StepOutput) -> PositionLogprobs:
        chosen = self._token(token, output.logprobs[step, column], output.ranks[step, column])
        wanted = request.params.logprobs or 0
        if not wanted or output.top is None:
            return PositionLogprobs(chosen)
        return PositionLogprobs(chosen, self._top(output.top.ids[step, column], output.top.logprobs[step, column], wanted))

    def _take_prompt_scores(self, update: RequestUpdate, output: StepOutput) -> bool:
        """Fill in the prompt's logprobs; False where they are not finite."""
        rows = output.batch.rows
        row = rows[update.column]
        scores, wanted = output.prompt_scores, update.request.params.prompt_logprobs
        if not row.wants_prompt_logprobs or scores is None or wanted is None or self._prompt_logprobs is None:
            return True
        first = sum(other.num_tokens for other in rows[: update.column])  # the row's place among the packed tokens
        for i in range(row.num_tokens):
            position = row.start + i + 1  # packed token i predicts the one after it
            if position >= len(self.prompt_ids):
                break
            if np.isnan(scores.logprobs[first + i]):
                return False
            chosen = self._token(self.prompt_ids[position], scores.logprobs[first + i], scores.ranks[first + i])
            top = self._top(scores.top_ids[first + i], scores.top_logprobs[first + i], wanted) if wanted else ()
            self._prompt_logprobs[position] = PositionLogprobs(chosen, top)
        return True

    def _top(self, ids: np.ndarray, logprobs: np.ndarray, wanted: int) -> tuple[TokenLogprob, ...]:
        # -inf alternatives (masked or filtered out) are left out: they are no alternatives.
        return tuple(
            self._token(token, logprob, rank + 1)
            for rank, (token, logprob) in enumerate(zip(ids[:wanted], logprobs[:wanted], strict=True))
            if np.isfinite(logprob)
        )

    def _token(self, token: int, logprob: float, rank: int) -> TokenLogprob:
        text, raw = ("", b"") if self._tokenizer is None else token_text(self._tokenizer, int(token))
        return TokenLogprob(int(token), float(logprob), int(rank), text, raw)
