"""OpenAI's own Python client against the real server: what its documentation promises holds."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest

openai = pytest.importorskip("openai", reason="make test-clients has it")
import pydantic  # noqa: E402
from openai import AsyncOpenAI, OpenAI  # noqa: E402

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
ASK: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=300) as one:
        yield one


def asynchronous(server: Any) -> Any:
    return AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=300)


def test_models(client: Any, server: Any) -> None:
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).object == "model"


def test_an_answer_and_the_same_as_a_stream(client: Any, server: Any) -> None:
    whole = client.chat.completions.create(model=server.model, messages=ASK, **GREEDY)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert whole.model == server.model
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert 0 < whole.usage.completion_tokens <= 24
    assert whole._request_id
    chunks = list(
        client.chat.completions.create(
            model=server.model, messages=ASK, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == [choice.finish_reason]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_tasks_at_once_get_what_one_alone_gets(client: Any, server: Any) -> None:
    async def all_of_them() -> list[str]:
        async with asynchronous(server) as many:

            async def streamed() -> str:
                pieces = await many.chat.completions.create(model=server.model, messages=ASK, stream=True, **GREEDY)
                return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

            async def whole() -> str:
                answer = await many.chat.completions.create(model=server.model, messages=ASK, **GREEDY)
                return str(answer.choices[0].message.content)

            return await asyncio.gather(streamed(), whole(), streamed(), whole(), streamed())

    alone = client.chat.completions.create(model=server.model, messages=ASK, **GREEDY).choices[0].message.content
    assert asyncio.run(all_of_them()) == [alone] * 5


def test_the_streaming_helper(client: Any, server: Any) -> None:
    whole = client.chat.completions.create(model=server.model, messages=ASK, **GREEDY).choices[0].message.content
    with client.chat.completions.stream(model=server.model, messages=ASK, stop=[whole.split()[3]], **GREEDY) as stream:
        text = ""
        for event in stream:
            if event.type == "content.delta":
                text += event.delta
                assert event.snapshot == text
    assert stream.get_final_completion().choices[0].message.content == text


def test_the_helper_that_parses_refuses_what_was_cut_off(client: Any, server: Any) -> None:
    with (
        pytest.raises(openai.LengthFinishReasonError),
        client.chat.completions.stream(model=server.model, messages=ASK, temperature=0, max_tokens=2) as stream,
    ):
        stream.get_final_completion()


def test_logprobs(client: Any, server: Any) -> None:
    chat = client.chat.completions.create(model=server.model, messages=ASK, logprobs=True, top_logprobs=3, **GREEDY)
    entries = chat.choices[0].logprobs.content
    assert len(entries) == chat.usage.completion_tokens
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(chat.choices[0].message.content)
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(one.logprob for one in entry.top_logprobs) <= 0, "greedy takes the likeliest"
    old = client.completions.create(model=server.model, prompt="One, two,", logprobs=2, echo=True, max_tokens=3, temperature=0)
    told = old.choices[0].logprobs
    assert "".join(told.tokens).startswith(old.choices[0].text)
    assert old.choices[0].text.startswith("One, two,")
    assert told.token_logprobs[0] is None
    assert all(value <= 0 for value in told.token_logprobs[1:])
    assert len(told.tokens) == len(told.top_logprobs) == len(told.text_offset) == old.usage.total_tokens


def test_choices_differ_and_come_again_with_their_seed(client: Any, server: Any) -> None:
    def choices(**options: Any) -> list[str]:
        body = {"model": server.model, "messages": ASK, "n": 3, "temperature": 1.0, "max_tokens": 16, **options}
        answer = client.chat.completions.create(**body)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = choices(seed=11)
    assert len(set(first)) == 3
    assert choices(seed=11) == first
    assert choices(seed=12) != first


def test_stop_ends_the_text_before_itself(client: Any, server: Any) -> None:
    text = client.chat.completions.create(model=server.model, messages=ASK, **GREEDY).choices[0].message.content
    word = text.split()[3]
    for stream in (False, True):
        answer = client.chat.completions.create(model=server.model, messages=ASK, stop=[word], stream=stream, **GREEDY)
        if stream:
            pieces = [piece.choices[0] for piece in answer]
            found, reason = "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason
        else:
            found, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
        assert (found, reason) == (text.partition(word)[0], "stop")


def test_prompts_of_every_form(client: Any, server: Any) -> None:
    def texts(prompt: Any) -> list[str]:
        answer = client.completions.create(model=server.model, prompt=prompt, max_tokens=4, temperature=0)
        return [choice.text for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    ids = client.post("/../tokenize", body={"prompt": "One, two,"}, cast_to=object)["tokens"]
    (one,) = texts("One, two,")
    assert one
    assert texts(["One, two,", "One, two,"]) == texts(ids) * 2 == texts([ids, ids]) == [one, one]


@pytest.mark.parametrize(
    ("change", "error", "code", "param"),
    [
        ({"model": "other"}, "NotFoundError", "model_not_found", "model"),
        ({"temperature": -1}, "BadRequestError", "invalid_value", "temperature"),
        ({"messages": []}, "BadRequestError", "invalid_value", "messages"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, "BadRequestError", "context_length_exceeded", None),
        ({"n": 100, "max_tokens": 4}, "BadRequestError", "invalid_value", "n"),  # more than could ever wait
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_of_the_class_they_should_be(
    client: Any, server: Any, change: dict[str, Any], error: str, code: str, param: str | None, stream: bool
) -> None:
    body = {"model": server.model, "messages": ASK, "stream": stream, **GREEDY, **change}
    with pytest.raises(getattr(openai, error)) as caught:
        client.chat.completions.create(**body)
    assert (caught.value.code, caught.value.body["code"]) == (code, code)
    if param is not None:
        assert caught.value.param == param
    assert client.chat.completions.create(model=server.model, messages=ASK, max_tokens=1).usage.completion_tokens == 1


def test_a_full_queue_is_a_rate_limit(client: Any, server: Any) -> None:
    with client.chat.completions.create(model=server.model, messages=ASK, stream=True, n=30, max_tokens=400) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=server.model, messages=ASK, n=10, max_tokens=4)
        assert caught.value.code == "queue_full"
        assert int(caught.value.response.headers["retry-after"]) >= 1
    assert client.chat.completions.create(model=server.model, messages=ASK, max_tokens=1).usage.completion_tokens == 1


def test_a_wrong_key_is_an_authentication_error(server: Any) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            stranger.models.list()
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model=server.model, messages=ASK, stream=True)


def test_a_route_that_is_not_there(client: Any) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="a")


def test_a_stream_that_is_left_early_harms_nobody(client: Any, server: Any) -> None:
    for _ in range(6):
        with client.chat.completions.create(model=server.model, messages=ASK, stream=True, max_tokens=400) as stream:
            next(iter(stream))
    answer = client.chat.completions.create(model=server.model, messages=ASK, **GREEDY)
    assert answer.choices[0].message.content


# -- tools and structured output

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch a light.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["kitchen", "hall"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
    },
}
LIGHT: list[Any] = [{"role": "user", "content": "Switch the light in the kitchen on."}]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "set_light"}}], ids=["required", "named"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is_called(client: Any, server: Any, choice: Any, stream: bool) -> None:
    body = {
        "model": server.model, "messages": LIGHT, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False,
        "temperature": 0, "max_tokens": 80,
    }  # fmt: skip
    if stream:
        name, arguments, reasons = "", "", []
        for chunk in client.chat.completions.create(stream=True, **body):
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.index == 0
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reasons.append(chunk.choices[0].finish_reason)
        reason = reasons[-1]
    else:
        answer = client.chat.completions.create(**body)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.type, bool(call.id)) == ("function", True)
        name, arguments, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
    assert name == "set_light"
    told = json.loads(arguments)
    assert told.keys() == {"room", "on"}
    assert told["room"] in ("kitchen", "hall")
    assert isinstance(told["on"], bool)
    assert reason in (("tool_calls",) if choice == "required" else ("tool_calls", "stop"))


def test_the_answer_of_a_tool_is_read(client: Any, server: Any) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "set_light", "arguments": '{"room": "kitchen", "on": true}'}}
    turns = [*LIGHT, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call-1", "content": "done"}]
    answer = client.chat.completions.create(model=server.model, messages=turns, tools=[TOOL], tool_choice="none", **GREEDY)
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls


class Light(pydantic.BaseModel):
    room: Literal["kitchen", "hall"]
    on: bool


def test_an_answer_is_parsed_into_a_model(client: Any, server: Any) -> None:
    # The penalty, because white space is allowed in JSON and a small model likes it.
    body = {"model": server.model, "messages": LIGHT, "temperature": 0, "max_tokens": 200, "frequency_penalty": 1.5}
    answer = client.chat.completions.parse(**body, response_format=Light)
    assert isinstance(answer.choices[0].message.parsed, Light)
    with client.chat.completions.stream(**body, response_format=Light) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_a_schema_is_kept_whatever_the_temperature(client: Any, server: Any) -> None:
    form = {
        "json": TOOL["function"]["parameters"],
        "disable_any_whitespace": True,
    }  # a small model would not end it
    body = {"model": server.model, "messages": LIGHT, "temperature": 1.5, "max_tokens": 80, "n": 4}
    for choice in client.chat.completions.create(**body, extra_body={"structured_outputs": form}).choices:
        Light.model_validate_json(choice.message.content)


def test_a_schema_that_is_none_is_a_bad_request(client: Any, server: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=server.model, messages=LIGHT, response_format=form, max_tokens=8)
    assert caught.value.param == "response_format"
