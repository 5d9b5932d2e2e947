"""What a client sends does not hold up the others: long work is done on a thread, and threads let one another run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from fakes_engine import FakeEngine, FakeTokenizer
from fakes_text import plain_byte_tokenizer
from served import Served, run

from llmjax.engine.config import EngineConfig

CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class NotingTokenizer(FakeTokenizer):
    """Notes the threads on which it works."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.get_ident())
        return [97, 98]

    def token_bytes(self, token: int) -> bytes:
        self.threads.add(threading.get_ident())
        return bytes([token])

    def render_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.threads.add(threading.get_ident())
        return "ab"


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


CALLER = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SHORT: list[dict[str, Any]] = [
    {"prompt": "a" * 4000},
    {"prompt": ["a" * 40] * 100},
    {"messages": [user("a" * 1000)] * 4},
    {"messages": [user("a")], "chat_template_kwargs": {"enable_thinking": True}},
]
LONG: list[dict[str, Any]] = [
    {"prompt": "a" * 5000},
    {"prompt": ["a" * 4000] * 20},
    {"messages": [user("a" * 5000)]},
    {"messages": [user("")] * 1000},
    {"messages": [user("a"), CALLER, {"role": "tool", "content": "b", "tool_call_id": "a"}]},
    {"messages": [user("a"), {"role": "assistant", "content": "a", "reasoning_content": "a" * 5000}]},
    {"messages": [user("a")], "chat_template_kwargs": {"documents": ["a" * 5000]}},
]


@pytest.mark.parametrize(("body", "long"), [(body, False) for body in SHORT] + [(body, True) for body in LONG])
def test_what_takes_its_time_is_not_done_on_the_event_loop(body: dict[str, Any], long: bool) -> None:
    engine = FakeEngine(EngineConfig(max_context=64, max_sequences=4))
    engine.tokenizer = tokenizer = NotingTokenizer()
    served = Served(engine, max_waiting=200)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"

    async def ask() -> int:
        answer = await served.request("POST", path, {"max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text
        return threading.get_ident()

    loop = run(ask())
    served.stop()
    assert loop not in tokenizer.threads if long else tokenizer.threads == {loop}


def test_the_texts_of_tokens_are_not_looked_up_on_the_event_loop() -> None:
    engine = FakeEngine(EngineConfig(max_context=64, max_sequences=4))
    engine.tokenizer = tokenizer = NotingTokenizer()
    served = Served(engine)

    async def ask() -> int:
        answer = await served.request("POST", "/tokenize", {"prompt": "ab", "return_token_strs": True})
        assert answer.json()["token_strs"] == ["a", "b"]
        return threading.get_ident()

    assert run(ask()) not in tokenizer.threads
    served.stop()


def test_a_long_text_is_tokenised_beside_other_threads() -> None:
    tokenizer, turns, found = plain_byte_tokenizer(), 0, []
    text = "ab cd " * 200_000
    thread = threading.Thread(target=lambda: found.append(tokenizer.encode(text)))
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0)
    assert found == [list(text.encode())]
    assert turns > 50
