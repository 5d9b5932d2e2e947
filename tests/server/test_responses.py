"""Answers out: bodies of both endpoints against values worked out by hand. The fake tokenizer's tokens are bytes."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from fakes_engine import FakeEngine, FakeTokenizer, fake_logprob
from hypothesis import given
from hypothesis import strategies as st

from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob
from llmjax.errors import ContextLengthError, LlmjaxError, QueueFullError, QueueTimeoutError, RequestError
from llmjax.server.protocol import ApiRequest, parse_request
from llmjax.server.responses import error_body, error_status, response_body


def answer(request: ApiRequest, outputs: list[RequestOutput]) -> dict[str, Any]:
    body = response_body(request, outputs, response_id="7", model="m", created=5, decode=FakeTokenizer().decode)
    return json.loads(json.dumps(body, allow_nan=False))


def run(endpoint: Any, **fields: Any) -> dict[str, Any]:
    request = parse_request(endpoint, fields)
    engine, done = FakeEngine(), {}
    if request.messages:
        ids = [engine.add_chat(list(request.messages), request.params)]
    else:
        ids = [engine.add_request(prompt, request.params) for prompt in request.prompts]
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step()}
    return answer(request, [done[request_id] for request_id in ids])


def scripted(text: str, pieces: list[bytes], prompt: str = "p", **fields: Any) -> dict[str, Any]:
    """The old logprobs of an output whose tokens have these bytes."""
    logprobs = [PositionLogprobs(TokenLogprob(i, -1.0, 1, "", piece)) for i, piece in enumerate(pieces)]
    choice = CompletionOutput(0, text, list(range(len(pieces))), logprobs=logprobs, finish_reason="stop")
    request = parse_request("completions", {"prompt": prompt, "logprobs": 0, **fields})
    return answer(request, [RequestOutput("r", prompt, [0], [choice])])["choices"][0]["logprobs"]


def usage_of(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def test_cached_tokens_are_told_once_a_prompt() -> None:
    request = parse_request("completions", {"prompt": ["abcd", "efgh"], "n": 2})
    choices = [CompletionOutput(0, "x", [1], finish_reason="stop"), CompletionOutput(1, "x", [1], finish_reason="stop")]
    outputs = [RequestOutput("r", "abcd", [1] * 4, choices, num_cached_tokens=cached) for cached in (3, 0)]
    assert answer(request, outputs)["usage"] == usage_of(8, 4, cached=3)


def test_a_completion_answer() -> None:
    assert run("completions", prompt="abc", max_tokens=4) == {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "text": "abca", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": usage_of(3, 4),
    }


def test_a_chat_answer() -> None:
    body = run("chat", messages=[{"role": "user", "content": "hi"}], max_tokens=3, n=2)
    assert (body["id"], body["object"]) == ("chatcmpl-7", "chat.completion")
    assert [choice["message"] for choice in body["choices"]] == [
        {"role": "assistant", "content": "<us", "refusal": None},
        {"role": "assistant", "content": "use", "refusal": None},
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == usage_of(8, 6)


def test_choices_of_several_prompts_are_numbered_through() -> None:
    body = run("completions", prompt=["ab", "xy"], n=2, max_tokens=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "ab"), (1, "ba"), (2, "xy"), (3, "yx")]
    assert body["usage"]["prompt_tokens"] == 4


def test_scoring_echoes_the_prompt_and_generates_nothing() -> None:
    """Report B12."""
    body = run("completions", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], body["usage"]["completion_tokens"]) == ("abc", "length", 0)
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, fake_logprob(98).logprob, fake_logprob(99).logprob],
        "top_logprobs": [None, {"b": fake_logprob(98).logprob}, {"c": fake_logprob(99).logprob}],
        "text_offset": [0, 1, 2],
    }


def test_echo_without_logprobs_only_adds_the_text() -> None:
    body = run("completions", prompt=[97, 98], max_tokens=1, echo=True)
    assert (body["choices"][0]["text"], body["choices"][0]["logprobs"]) == ("aba", None)


def test_echo_with_generation_joins_prompt_and_output() -> None:
    logprobs = run("completions", prompt="ab", max_tokens=2, echo=True, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "a", "b"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert [value is None for value in logprobs["token_logprobs"]] == [True, False, False, False]


def test_offsets_count_characters_from_the_start_of_the_prompt() -> None:
    """Report B26: the prompt holds characters of several bytes, and so does the output."""
    logprobs = run("completions", prompt="é🔥a", max_tokens=7, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [3, 3, 4, 4, 4, 4, 5]
    assert logprobs["tokens"][:2] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["tokens"][-1] == "a"


def test_offsets_of_tokens_that_the_text_leaves_out() -> None:
    assert scripted("ab", [b"a", b"<|special|>", b"b", b"<|end|>"])["text_offset"] == [1, 2, 2, 3]
    assert scripted("abc", [b"abc", b"STOPd"])["text_offset"] == [1, 4]
    assert scripted("abc", [b"ab", b"cST", b"OP"])["text_offset"] == [1, 3, 4]


@given(st.text(max_size=30), st.data())
def test_offsets_are_monotone_and_exact_for_any_cut_of_any_text(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(raw) - 1)), max_size=8))) if len(raw) > 1 else []
    bounds = [0, *(cut for cut in cuts if cut < len(raw)), len(raw)]
    offsets = scripted(text, [raw[a:b] for a, b in itertools.pairwise(bounds)], prompt="p")["text_offset"]
    assert offsets == [1 + len(raw[:a].decode(errors="ignore")) for a in bounds[:-1]]


def test_chat_logprobs_have_an_entry_a_token_and_bytes_that_join_to_the_text() -> None:
    """Report B25."""
    body = run("chat", messages=[{"role": "user", "content": "🔥"}], max_tokens=11, logprobs=True, top_logprobs=5)
    choice = body["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"] == 11
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace") == choice["message"]["content"]
    assert choice["message"]["content"].startswith("<user>🔥")
    assert all(len(entry["top_logprobs"]) == 5 for entry in content)
    assert content[0] == {
        "token": "<",
        "logprob": fake_logprob(60).logprob,
        "bytes": [60],
        "top_logprobs": [
            {"token": chr(60 + i), "logprob": fake_logprob(60 + i, i + 1).logprob, "bytes": [60 + i]} for i in range(5)
        ],
    }


def test_the_chosen_token_is_among_the_old_alternatives() -> None:
    chosen = TokenLogprob(1, -3.0, 9, "z", b"z")
    position = PositionLogprobs(chosen, (TokenLogprob(2, -0.5, 1, "a", b"a"), TokenLogprob(3, -math.inf, 2, "b", b"b")))
    choice = CompletionOutput(0, "z", [1], logprobs=[position], finish_reason="length")
    body = answer(parse_request("completions", {"prompt": "p", "logprobs": 2}), [RequestOutput("r", "p", [0], [choice])])
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -9999.0, "z": -3.0}]


def test_prompt_logprobs_are_given_when_asked_for_by_name() -> None:
    body = run("completions", prompt="ab", max_tokens=1, prompt_logprobs=0)
    entry = {"logprob": fake_logprob(98).logprob, "rank": 1, "decoded_token": "b"}
    assert body["choices"][0]["prompt_logprobs"] == [None, {"98": entry}]
    assert "prompt_logprobs" not in run("completions", prompt="ab", max_tokens=1, echo=True, logprobs=0)["choices"][0]


@pytest.mark.parametrize(
    ("error", "kind", "param", "code"),
    [
        (RequestError("m", "n"), "invalid_request_error", "n", "invalid_value"),
        (ContextLengthError("m", "prompt"), "invalid_request_error", "prompt", "context_length_exceeded"),
        (LlmjaxError("m"), "server_error", None, "internal_error"),
    ],
)
def test_error_objects(error: LlmjaxError, kind: str, param: str | None, code: str) -> None:
    assert error_body(error) == {"error": {"message": "m", "type": kind, "param": param, "code": code}}


def test_the_status_of_an_error() -> None:
    errors = (RequestError("m"), ContextLengthError("m"), QueueFullError("m", "short"), QueueTimeoutError("m"), LlmjaxError("m"))
    assert [error_status(error) for error in errors] == [400, 400, 429, 503, 500]
    bodies = [error_body(error)["error"] for error in errors[2:4]]
    assert [(body["type"], body["code"]) for body in bodies] == [
        ("rate_limit_error", "queue_full"),
        ("server_error", "queue_timeout"),
    ]
