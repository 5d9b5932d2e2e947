"""`LiveRequest`: a request's choices while they run, turned from token ids into `RequestOutput`s. No JAX."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llmjax.engine.grammar import GrammarMatcher
from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, SpeculationOutput, TokenLogprob
from llmjax.engine.prompt_lookup import PromptLookup
from llmjax.engine.text_output import ChoiceText, token_text
from llmjax.engine.tokenizer import Tokenizer
from llmjax.scheduling.finish_reason import FinishReason
from llmjax.scheduling.request import Request, StepOutput
from llmjax.scheduling.results import RequestUpdate
from llmjax.telemetry.timings import RequestTimeline, Timings

NON_FINITE = (
    "the model's logits were NaN or infinite for this request; with float16 use bfloat16 or float32, else check the weights"
)


class LiveRequest:
    """All choices of one prompt. `take` adds what a launch brought, `output` says what is new since the last call."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_ids: list[int],
        requests: list[Request],
        tokenizer: Tokenizer | None,
        timeline: RequestTimeline,
        matchers: Sequence[GrammarMatcher] = (),
    ) -> None:
        self.request_id = request_id
        self.timeline = timeline
        self.prompt_ids = prompt_ids
        self.requests = requests
        self._matchers = matchers  # one a choice where the output must have a form, else none
        self._lookups: dict[int, PromptLookup] = {}  # by choice, of those with a form that were to have drafts
        self._prompt = prompt
        self._tokenizer = tokenizer
        params = requests[0].params
        self._outputs = [
            CompletionOutput(index=i, logprobs=None if params.logprobs is None else []) for i in range(len(requests))
        ]
        self._texts = [None if tokenizer is None else ChoiceText(tokenizer, prompt_ids, request.params) for request in requests]
        self._seen = [[0, 0] for _ in requests]  # characters and tokens already given out
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None] * len(prompt_ids)

    def take(self, update: RequestUpdate, output: StepOutput) -> FinishReason | None:
        """Add one row's result of a launch. Returns why its choice has ended, None while it runs."""
        request = update.request
        out = self._outputs[request.choice]
        if output.prompt_scores is not None and not self._take_prompt_scores(update, output):
            out.finish_reason, out.error = "error", NON_FINITE
        elif not self._take_tokens(update, output, out, self._texts[request.choice]) and update.finished:
            out.finish_reason = request.finish_reason
            if request.finish_reason == "stop" and request.stop_token not in request.eos_ids:
                out.stop_reason = request.stop_token
            if request.finish_reason == "error":
                out.error = NON_FINITE
            text = self._texts[request.choice]
            if text is not None:
                out.text += text.finish()
        return out.finish_reason

    def _take_tokens(self, update: RequestUpdate, output: StepOutput, out: CompletionOutput, text: ChoiceText | None) -> bool:
        """Add the new tokens; True when a stop string has ended the output. What follows it in the same launch is dropped."""
        logprobs = output.logprob_lists[update.column]
        if text is None and out.logprobs is None:
            out.token_ids += update.tokens
            for logprob in logprobs[: len(update.tokens)]:
                out.cumulative_logprob += logprob
            return False
        request = update.request
        ended_at = len(update.tokens) - 1 if request.finish_reason == "stop" else -1
        deltas = []
        matched = None
        for step, token in enumerate(update.tokens):
            out.token_ids.append(token)
            out.cumulative_logprob += logprobs[step]
            if out.logprobs is not None:
                out.logprobs.append(self._logprobs(request, update.column, step, token, output))
            if text is not None:
                delta, matched = text.add(token, len(out.token_ids), ended=step == ended_at)
                deltas.append(delta)
                if matched is not None:
                    out.finish_reason, out.stop_reason = "stop", matched
                    break
        out.text += "".join(deltas)
        return matched is not None

    def matcher(self, request: Request) -> GrammarMatcher:
        """Where a choice stands in the form that it must have."""
        return self._matchers[request.choice]

    def lookup(self, request: Request) -> PromptLookup:
        """What a choice with a form has said before, up to its last token that was read."""
        lookup = self._lookups.get(request.choice)
        if lookup is None:
            lookup = self._lookups[request.choice] = PromptLookup(request.num_prompt_tokens + request.limit)
        lookup.add(request.known_ids(len(lookup), request.num_tokens))
        return lookup

    def keep_to_form(self, request: Request) -> FinishReason | None:
        """After `take` of a choice with a form that runs, or is at its limit: why it has ended, None while it runs."""
        matcher, out, text = self.matcher(request), self._outputs[request.choice], self._texts[request.choice]
        runs = out.finish_reason is None
        if matcher.complete:
            out.finish_reason = "stop"
        elif runs and matcher.error is not None:
            out.finish_reason, out.error = "error", matcher.error
        if runs and out.finish_reason is not None and text is not None:
            out.text += text.finish()
        return out.finish_reason

    def expire(self, request: Request, why: str) -> None:
        """A choice waited too long, and nothing was computed for it."""
        out = self._outputs[request.choice]
        out.finish_reason, out.error = "timeout", why

    def abort(self) -> RequestOutput:
        """The last output of a request that was aborted: choices still running end with "abort"."""
        for out, text in zip(self._outputs, self._texts, strict=True):
            if out.finish_reason is None:
                out.finish_reason = "abort"
                if text is not None:
                    out.text += text.finish()
        return self.output()

    def timings(self, now_ns: int) -> Timings:
        """Where the time of the finished request went; `now_ns` is when its last output is handed over."""
        requests = self.requests
        return self.timeline.close(
            now_ns,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=requests[0].num_cached_tokens,
            output_tokens=sum(len(out.token_ids) for out in self._outputs),
            preemptions=sum(request.num_preemptions for request in requests),
            chunks=sum(request.num_chunks for request in requests),
            steps=sum(request.num_steps for request in requests),
        )

    def speculation(self) -> SpeculationOutput | None:
        """How the drafts of the finished request fared; None where none were asked for."""
        records = [request.speculation for request in self.requests if request.speculation is not None]
        if not records:
            return None
        return SpeculationOutput(
            rounds=sum(record.rounds for record in records),
            drafted=sum(record.drafted for record in records),
            accepted=sum(record.accepted for record in records),
            off=next((reason for record in records if (reason := record.off or record.held) is not None), None),
        )

    def output(self) -> RequestOutput:
        """Everything so far, and what is new since the last call."""
        new_text, new_ids, finished, preemptions = [], [], True, 0
        for out, seen, request in zip(self._outputs, self._seen, self.requests, strict=True):
            text, ids = out.text, out.token_ids
            new_text.append(text[seen[0] :])
            new_ids.append(ids[seen[1] :])
            seen[:] = len(text), len(ids)
            if out.finish_reason is None:
                finished = False
            preemptions += request.num_preemptions
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=self._outputs,
            prompt_logprobs=self._prompt_logprobs,
            new_text=new_text,
            new_token_ids=new_ids,
            num_preemptions=preemptions,
            num_cached_tokens=self.requests[0].num_cached_tokens,
            finished=finished,
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
