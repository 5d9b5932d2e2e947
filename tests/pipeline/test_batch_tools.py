"""Batch lines with tools: calls in the answers of both formats, and lines that this model cannot serve."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
from fakes_text import plain_byte_tokenizer
from scripted_model import Scripted
from tool_templates import SHORT, tool

from llmjax.pipeline.batch_runner import run_batch

BODY = {"messages": [{"role": "user", "content": "?"}], "tools": [tool("f"), tool("g")], "temperature": 0}
TEXT = 'So: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def model() -> Scripted:
    return Scripted(plain_byte_tokenizer(chat_templates={"default": SHORT["hermes"]}), eos_ids=(257,), kv_cache_bytes=64 * 1024)


def answers(model: Scripted, folder: Path, lines: list[Any], **options: Any) -> list[Any]:
    source = folder / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    run_batch(types.SimpleNamespace(engine=model.engine), input=source, output=folder / "out.jsonl", **options)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("format", ["openai", "prompts"])
def test_calls_are_in_the_answer(model: Scripted, tmp_path: Path, format: str) -> None:
    model.script([*TEXT.encode(), 257], prompt=len("fg:?"))
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": BODY} if format == "openai" else BODY
    (record,) = answers(model, tmp_path, [line])
    if format == "openai":
        (choice,) = record["response"]["body"]["choices"]
        content, finish_reason, calls = choice["message"]["content"], choice["finish_reason"], choice["message"]["tool_calls"]
    else:
        content, finish_reason, calls = record["text"], record["finish_reason"], record["tool_calls"]
    assert (content, finish_reason) == ("So:", "tool_calls")
    assert [call["function"] for call in calls] == [{"name": "f", "arguments": '{"a": 1}'}]


def test_a_line_that_the_model_cannot_serve_fails_alone(model: Scripted, tmp_path: Path) -> None:
    model.script([*TEXT.encode(), 257], prompt=len("fg:?"))
    refused, raw = answers(model, tmp_path, [{**BODY, "tool_choice": "required"}, BODY], tool_parser="none")
    assert refused["error"]["param"] == "tool_choice"
    assert (raw["text"], raw["finish_reason"], "tool_calls" in raw) == (TEXT, "stop", False)
