"""LangChain's OpenAI model against the real server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

langchain_openai = pytest.importorskip("langchain_openai", reason="make test-clients has it")

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
ASK = "Name three colours of the rainbow."


@pytest.fixture(scope="module")
def model(server: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=server.key, model=server.model, temperature=0, max_tokens=16, max_retries=0
    )


def test_invoke_batch_and_stream_agree(model: Any, server: Any) -> None:
    answer = model.invoke(ASK)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 16
    assert answer.response_metadata["model_name"] == server.model
    assert answer.response_metadata["finish_reason"] in ("stop", "length")
    assert [one.content for one in model.batch([ASK] * 3)] == [answer.content] * 3
    chunks = list(model.stream(ASK, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    told, expected = ({**one.usage_metadata, "input_token_details": None} for one in (total, answer))
    assert told == expected, "but for what was found in the cache"


def test_astream_agrees(model: Any) -> None:
    async def streamed() -> str:
        return "".join([chunk.content async for chunk in model.astream(ASK)])

    assert asyncio.run(streamed()) == model.invoke(ASK).content


def test_a_conversation_of_every_role(model: Any) -> None:
    turns = [("system", "Answer in one word."), ("human", "Hi"), ("ai", "Hello"), ("human", [{"type": "text", "text": "Bye"}])]
    assert model.invoke(turns).content


def test_stop(model: Any) -> None:
    text = model.invoke(ASK).content
    word = text.split()[2]
    assert model.invoke(ASK, stop=[word]).content == text.partition(word)[0]


def test_logprobs(model: Any) -> None:
    told = model.bind(logprobs=True, top_logprobs=2).invoke(ASK).response_metadata["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in told)


def test_a_tool_is_called(model: Any) -> None:
    def set_light(room: str) -> str:
        """Switch the light in a room on."""
        return room

    calls = (
        model.bind_tools([set_light], tool_choice="set_light").invoke("Light in the kitchen, please.", max_tokens=80).tool_calls
    )
    assert [call["name"] for call in calls] == ["set_light"]
