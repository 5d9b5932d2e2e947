"""One line of the log an exchange: who, what, how long, and no text unless asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_model import Scripted, paced
from served import ENDPOINTS, Exchange, Served, run

from llmjax.server.request_log import line
from llmjax.telemetry.timings import SEGMENTS

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a secret"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a secret"}]},
}


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def request(self, number: int = -1) -> tuple[str, dict[str, Any]]:
        """A request's line, and its fields."""
        found = [record for record in self.records if getattr(record, "event", "") == "request"]
        return found[number].getMessage(), found[number].fields  # type: ignore[attr-defined]


@pytest.fixture
def kept() -> Iterator[Kept]:
    logger, handler = logging.getLogger("llmjax.server"), Kept()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_one_line_with_tokens_and_times(served: Served, kept: Kept, path: str, stream: bool) -> None:
    body = {**BODIES[path], "max_tokens": 5, "ignore_eos": True, "n": 2, "temperature": 1, "stream": stream}
    assert served.post(path, body, x_request_id="mine").status_code == 200
    text, fields = kept.request()
    assert len([record for record in kept.records if getattr(record, "event", "") == "request"]) == 1
    assert (fields["id"], fields["client"], fields["method"], fields["route"]) == ("mine", "127.0.0.1", "POST", path)
    assert (fields["status"], fields["model"], fields["stream"], fields["output_tokens"]) == (200, "tiny", stream, 10)
    assert fields["finish_reasons"] == ["length", "length"]
    assert fields["prompt_tokens"] >= len("a secret")
    assert 0 < fields["first_token_s"] <= sum(fields[f"{segment}_s"] for segment in SEGMENTS) <= fields["seconds"] + 1e-3
    assert text.startswith(f"mine POST {path} 200 ")
    assert "+ 10 tokens (0 cached), length, first token" in text
    assert all("secret" not in record.getMessage() + str(getattr(record, "fields", "")) for record in kept.records)


def test_texts_are_logged_when_asked_for(served: Served, kept: Kept) -> None:
    open_book = served.with_options(log_prompts=True)
    answer = open_book.post("/v1/completions", {"prompt": ["a secret", "b"], "max_tokens": 3, "ignore_eos": True}).json()
    text, fields = kept.request()
    assert fields["prompt"] == ["a secret", "b"]
    assert fields["output"] == [choice["text"] for choice in answer["choices"]]
    assert "secret" not in text
    open_book.post("/v1/chat/completions", {**BODIES["/v1/chat/completions"], "max_tokens": 1, "stream": True})
    assert kept.request()[1]["prompt"][0]["content"] == "a secret"


def test_a_client_that_left_and_one_that_was_refused_are_lines_too(served: Served, scripted: Scripted, kept: Kept) -> None:
    served.post("/v1/completions", {"prompt": "a", "temperature": "hot"})
    text, fields = kept.request()
    assert (fields["status"], "output_tokens" in fields) == (400, False)
    assert text.endswith(" s")

    async def main() -> None:
        with paced(scripted.engine):
            body = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "stream": True}
            leaves = Exchange(served.app, "/v1/completions", body)
            async with asyncio.timeout(30):
                while not leaves.data:
                    await asyncio.sleep(0.002)
            leaves.leave()
            await leaves.task

    run(main())
    text, fields = kept.request()
    assert (fields["status"], fields["finish_reasons"]) == (499, [None])
    assert 0 < fields["output_tokens"] < 120
    assert "unfinished" in text


def test_probes_are_not_logged(served: Served, kept: Kept) -> None:
    served.get("/livez")
    assert not kept.records


def test_an_answer_without_tokens_says_so() -> None:
    fields = {"id": "a", "method": "POST", "route": "/x", "status": 503, "seconds": 1.0, "prompt_tokens": 3, "cached_tokens": 0}
    assert line(fields | {"output_tokens": 0, "finish_reasons": []}).endswith("3 + 0 tokens (0 cached), unfinished")
