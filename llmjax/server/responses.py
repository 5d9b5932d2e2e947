"""The OpenAI answers, built from `RequestOutput`: bodies of both endpoints, their logprobs, usage and errors. Host only: no HTTP.

Rules
- Logprobs and `usage.completion_tokens` cover every sampled token, the one that ended the output included, whether or not the
  text shows it, and those of calls with their marks.
- `text_offset` counts characters from the start of the prompt's text, with or without `echo`. A token that carries part of a
  character has the offset of that character; a token the text leaves out has the offset of what comes next.
- A logprob of minus infinity is written as -9999.0, because JSON has no infinity.
- The old format names tokens by text; one whose bytes are no text by itself is written `bytes:\\xf0\\x9f`, so that names stay
  distinct.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob
from llmjax.errors import ContextLengthError, LlmjaxError, QueueFullError, QueueTimeoutError, RequestError
from llmjax.server.protocol import ApiRequest
from llmjax.server.tool_calls import call_writer

LOWEST_LOGPROB = -9999.0
_RESYNC_CHARS = 4  # how far ahead a token's text is looked for when the text left something out before it


def response_body(
    request: ApiRequest,
    outputs: Sequence[RequestOutput],
    *,
    response_id: str,
    model: str,
    created: int,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """The whole answer to a request that did not stream.

    Args:
        outputs: one finished output a prompt, in the order of `request.prompts` (exactly one for chat).
        response_id: unique part of the answer's id.
        model: the served model's own name.
        created: Unix seconds.
        decode: token ids to text, for prompts that were given as ids.
    """
    chat = request.endpoint == "chat"
    choices: list[dict[str, Any]] = []
    for output in outputs:
        for choice in output.outputs:
            body = _chat_choice(request, choice) if chat else _completion_choice(request, output, choice, decode)
            body["index"] = len(choices)
            if request.prompt_logprobs_asked:
                body["prompt_logprobs"] = _prompt_logprobs(output)
            choices.append(body)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{response_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage(outputs),
    }


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts: each prompt once, however many choices it has, and how much of it its first choice found in the prefix cache;
    every sampled token."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def error_body(error: LlmjaxError) -> dict[str, Any]:
    """The OpenAI error object. A `RequestError` is the client's fault; anything else is ours."""
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
        return {"error": {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": code}}
    kind, code = "server_error", "internal_error"
    if isinstance(error, QueueFullError):
        kind, code = "rate_limit_error", "queue_full"
    elif isinstance(error, QueueTimeoutError):
        code = "queue_timeout"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}


def error_status(error: LlmjaxError) -> int:
    """The HTTP status of an error: 400 for the client's, 429 for a full queue, 503 for a wait that was too long, else 500."""
    if isinstance(error, RequestError):
        return 400
    return 429 if isinstance(error, QueueFullError) else 503 if isinstance(error, QueueTimeoutError) else 500


# -- choices


def _chat_choice(request: ApiRequest, choice: CompletionOutput) -> dict[str, Any]:
    logprobs = None
    message: dict[str, Any] = {"content": choice.text}
    finish_reason: str | None = choice.finish_reason
    if (writer := call_writer(request.tools)) is not None:
        message, finish_reason = writer.message(choice.text), writer.finish_reason(finish_reason)
    if choice.logprobs is not None:
        logprobs = chat_logprobs(choice.logprobs)
    return {
        "index": 0,
        "message": {"role": "assistant", **message, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": choice.stop_reason,
    }


def _completion_choice(
    request: ApiRequest, output: RequestOutput, choice: CompletionOutput, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    logprobs = None
    needs_prompt = request.echo or choice.logprobs is not None
    prompt = prompt_text(output, decode) if needs_prompt else ""
    if choice.logprobs is not None:
        logprobs = CompletionLogprobs(output, prompt, decode, echo=request.echo).more(choice)
    return {
        "index": 0,
        "text": prompt + choice.text if request.echo else choice.text,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


class CompletionLogprobs:
    """The old format of one choice, given out bit by bit: parallel lists. With `echo` they start with the prompt's tokens, whose
    first has no logprob."""

    def __init__(self, output: RequestOutput, prompt: str, decode: Callable[[list[int]], str], *, echo: bool) -> None:
        self._sent = 0
        self._offsets = _Offsets(len(prompt))
        self._head: tuple[list[str], list[PositionLogprobs | None], list[int]] = [], [], []
        if echo and output.prompt_logprobs is not None:
            first = decode(output.prompt_token_ids[:1])
            tokens = [None if position is None else position.chosen for position in output.prompt_logprobs]
            offsets = _Offsets(0)
            offsets.add(first.encode() if token is None else token.bytes for token in tokens)
            names = [first if token is None else _old_name(token) for token in tokens]
            self._head = names, list(output.prompt_logprobs), offsets.told(prompt, final=True)

    def more(self, choice: CompletionOutput) -> dict[str, Any]:
        """The tokens that came since the last call, but for those whose place in the text is not known yet. All lists may be
        empty."""
        assert choice.logprobs is not None
        names, positions, offsets = self._head
        self._head = [], [], []
        known = self._sent + self._offsets.waiting
        self._offsets.add(position.chosen.bytes for position in choice.logprobs[known:])
        new_offsets = self._offsets.told(choice.text, final=choice.finish_reason is not None)
        new = choice.logprobs[self._sent : self._sent + len(new_offsets)]
        self._sent += len(new)
        names += [_old_name(position.chosen) for position in new]
        positions += new
        return {
            "tokens": names,
            "token_logprobs": [None if position is None else _finite(position.chosen.logprob) for position in positions],
            "top_logprobs": [None if position is None else _old_top(position) for position in positions],
            "text_offset": offsets + new_offsets,
        }


class _Offsets:
    """Where in a text each token begins, in characters, plus `origin`. Never falls, never passes the end of the text."""

    def __init__(self, origin: int) -> None:
        self._origin = origin
        self._position = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._parts: deque[str] = deque()

    @property
    def waiting(self) -> int:
        """Tokens whose place was not told yet."""
        return len(self._parts)

    def add(self, pieces: Iterable[bytes]) -> None:
        """The bytes of further tokens."""
        self._parts += map(self._decoder.decode, pieces)

    def told(self, text: str, *, final: bool) -> list[int]:
        """The offsets of the next tokens. Unless `text` is `final`, those that it may yet show wait."""
        offsets: list[int] = []
        while self._parts:
            part, position = self._parts[0], self._position
            reach = position + len(part) + _RESYNC_CHARS
            found = text.find(part, position, reach) if part else position
            if found < 0 and not final and len(text) < reach:
                break
            self._parts.popleft()
            offsets.append(self._origin + (position if found < 0 else found))
            if found >= 0:
                self._position = found + len(part)
            elif text[position:] and part.startswith(text[position:]):
                self._position = len(text)  # a stop string cut this token's text
        return offsets


def prompt_text(output: RequestOutput, decode: Callable[[list[int]], str]) -> str:
    """The prompt as the client gave it, or the text of its ids."""
    return output.prompt if output.prompt is not None else decode(output.prompt_token_ids)


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """The format of the chat endpoint."""
    return {"content": [_chat_position(position) for position in positions], "refusal": None}


def _old_top(position: PositionLogprobs) -> dict[str, float]:
    """Alternatives by name, the chosen token always among them; of two tokens with one name the likelier counts."""
    out: dict[str, float] = {}
    for token in (*position.top, position.chosen):
        out.setdefault(_old_name(token), _finite(token.logprob))
    return out


def _old_name(token: TokenLogprob) -> str:
    try:
        return token.bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _chat_position(position: PositionLogprobs) -> dict[str, Any]:
    return {**_chat_token(position.chosen), "top_logprobs": [_chat_token(token) for token in position.top]}


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.bytes)}


def _prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """One entry a prompt token, None for the first: {token id: {logprob, rank, decoded_token}}, the token itself among them."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if position is None
        else {
            str(token.token_id): {"logprob": _finite(token.logprob), "rank": token.rank, "decoded_token": token.text}
            for token in (position.chosen, *position.top)
        }
        for position in output.prompt_logprobs
    ]


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
