"""`EventWriter`: outputs of the engine as server-sent events of the OpenAI streams. Pure: bytes out, no HTTP, no clock.

The contract, for each choice
- chat: a chunk with the role first, then chunks with what is new, then one chunk with the finish reason and an empty delta;
  where calls may come, the role's content is null, and a call has a chunk with its id and name, then chunks with arguments;
- completions: with `echo` the prompt first, then what is new; the last chunk has the finish reason.
One event a choice and step, more only for calls; a step whose text is held back (half a character, the beginning of a stop
string or of a call) has none, unless logprobs were asked for: their entries are not held back, except that `text_offset` must be
known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from llmjax.engine.outputs import CompletionOutput, RequestOutput
from llmjax.server.protocol import ApiRequest
from llmjax.server.responses import CompletionLogprobs, chat_logprobs, prompt_text, usage
from llmjax.server.tool_calls import CallWriter, call_writer

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class EventWriter:
    """The events of one answer.

    Args:
        request: what was asked for.
        response_id: unique part of the answer's id.
        model: the served model's name.
        created: Unix seconds.
        decode: token ids to text, for prompts that were given as ids.
    """

    def __init__(
        self, request: ApiRequest, *, response_id: str, model: str, created: int, decode: Callable[[list[int]], str]
    ) -> None:
        self._request = request
        self._decode = decode
        self._chat = request.endpoint == "chat"
        head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{response_id}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._prefix = f'data: {_json(head)[:-1]},"choices":['
        self._started: set[int] = set()
        self._finished: set[int] = set()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._calls: dict[int, CallWriter] = {}
        self._outputs: dict[int, RequestOutput] = {}

    def events(self, index: int, output: RequestOutput) -> bytes:
        """What output brings, of the prompt number `index`; b"" when nothing of it can be shown."""
        self._outputs[index] = output
        data = []
        for choice, text, ids in zip(output.outputs, output.new_text, output.new_token_ids, strict=True):
            number = index * len(output.outputs) + choice.index
            if number in self._finished or not (ids or text or choice.finish_reason):
                continue
            chunks = self._chat_chunks if self._chat else self._completion_chunks
            data += [self._event(_json({"index": number, **chunk})) for chunk in chunks(number, output, choice, text, len(ids))]
            if choice.finish_reason is not None:
                self._finished.add(number)
        return b"".join(data)

    def end(self) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if not self._request.include_usage:
            return DONE
        return f'{self._prefix}],"usage":{_json(self._usage())}}}\n\n'.encode() + DONE

    def _event(self, choice: str) -> bytes:
        tail = ""
        if self._request.continuous_usage:
            tail = f',"usage":{_json(self._usage())}'
        elif self._request.include_usage:
            tail = ',"usage":null'
        return f"{self._prefix}{choice}]{tail}}}\n\n".encode()

    def _usage(self) -> dict[str, Any]:
        return usage(list(self._outputs.values()))

    def _chat_chunks(
        self, number: int, output: RequestOutput, choice: CompletionOutput, text: str, num_new: int
    ) -> Sequence[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if number not in self._started:
            self._started.add(number)
            if (started := call_writer(self._request.tools)) is not None:
                self._calls[number] = started
            chunks.append(_chat_chunk({"role": "assistant", "content": "" if started is None else None}))
        new = choice.logprobs[len(choice.logprobs) - num_new :] if choice.logprobs is not None else []
        deltas: list[dict[str, Any]] = [{"content": text}] if text or new else []
        reason: str | None = choice.finish_reason
        if (calls := self._calls.get(number)) is not None:
            deltas = calls.deltas(text, final=reason is not None) or ([{"content": None}] if new else [])
            reason = calls.finish_reason(reason)
        for delta in deltas:
            chunks.append(_chat_chunk(delta, chat_logprobs(new) if new else None))
            new = []
        if reason is not None:
            chunks.append({**_chat_chunk({}), "finish_reason": reason, "stop_reason": choice.stop_reason})
        return chunks

    def _completion_chunks(
        self, number: int, output: RequestOutput, choice: CompletionOutput, text: str, num_new: int
    ) -> Sequence[dict[str, Any]]:
        if number not in self._started:
            self._started.add(number)
            prompt = ""
            if self._request.echo or choice.logprobs is not None:
                prompt = prompt_text(output, self._decode)
            if choice.logprobs is not None:
                self._logprobs[number] = CompletionLogprobs(output, prompt, self._decode, echo=self._request.echo)
            if self._request.echo:
                text = prompt + text
        logprobs = None
        if (told := self._logprobs.get(number)) is not None:
            logprobs = told.more(choice)
            if not logprobs["tokens"]:
                logprobs = None
        if not text and logprobs is None and choice.finish_reason is None:
            return ()
        chunk: dict[str, Any] = {"text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        if choice.finish_reason is not None:
            chunk["stop_reason"] = choice.stop_reason
        return (chunk,)


def error_event(error: dict[str, Any]) -> bytes:
    """An error object after the headers have gone out, and the end mark."""
    return f"data: {_json(error)}\n\n".encode() + DONE


def _chat_chunk(delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"delta": delta, "logprobs": logprobs, "finish_reason": None}


# Made once, for it is used for each event. ASCII: some clients split lines at U+2028, which JSON would leave as it is.
_json = json.JSONEncoder(separators=(",", ":")).encode
