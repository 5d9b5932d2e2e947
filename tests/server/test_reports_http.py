"""Public bug reports over HTTP that no other test of the server has: each test names its reports.

Elsewhere: B01-B06, B10-B14, B17, B20, B25, B64-B67 in test_app.py; B28, B29, B33, B68-B71 in test_lifecycle.py and
test_http_server.py; B30 in abuse/, over sockets.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes_engine import FakeEngine
from fakes_text import BOS_ID, byte_tokenizer, plain_byte_tokenizer
from scripted_model import Scripted, paced
from served import TEMPLATE, Exchange, Served, run
from tiny_models import CONFIGS, random_params

from llmjax.engine.config import EngineConfig
from llmjax.engine.engine import Engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def script(served: Served, scripted: Scripted, ids: list[int], prompt: int = 1) -> None:
    run(served.engine.call(lambda: scripted.script(ids, prompt=prompt)))


def flat(served: Served, scripted: Scripted) -> None:
    """All tokens are equally likely at every place."""
    script(served, scripted, [])


def ask(served: Served, **body: Any) -> dict[str, Any]:
    response = served.post(COMPLETIONS, {"prompt": "a", **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def at_once(served: Served, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(served.request("POST", COMPLETIONS, {"prompt": "a", **body}) for body in bodies))

    answers = run(all_of_them())
    assert {answer.status_code for answer in answers} == {200}
    return [answer.json() for answer in answers]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_before_min_tokens_stays_in_the_text(served: Served, scripted: Scripted, stream: bool) -> None:
    """B07."""
    script(served, scripted, [*b"a\nbcdefghijkl\nxyz", *b"0123456789"])
    body = {"stop": "\n", "min_tokens": 10, "max_tokens": 20, "temperature": 0}
    if stream:
        events = served.events(COMPLETIONS, {"prompt": "a", **body})
        assert "".join(event["choices"][0]["text"] for event in events) == "a\nbcdefghijkl"
        return
    answer = ask(served, **body)
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a\nbcdefghijkl", "stop")
    assert answer["usage"]["completion_tokens"] >= 10


@pytest.fixture(scope="module")
def ending() -> Iterator[tuple[Served, Scripted]]:
    """A model with three ids that end an output."""
    scripted = Scripted(plain_byte_tokenizer(), eos_ids=(2, 7, 9), kv_cache_bytes=64 * 1024)
    one = Served(scripted.engine)
    yield one, scripted
    one.engine.stop()


@pytest.mark.parametrize("eos", [2, 7, 9])
def test_any_of_the_models_ends_ends_it_unless_it_is_told_not_to(ending: tuple[Served, Scripted], eos: int) -> None:
    """B08, B09."""
    served, scripted = ending
    script(served, scripted, [*b"ab", eos, *b"c" * 40])
    answer = ask(served, max_tokens=20, temperature=0)["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("ab", "stop")
    beyond = ask(served, max_tokens=20, temperature=0, ignore_eos=True)
    assert (beyond["usage"]["completion_tokens"], beyond["choices"][0]["finish_reason"]) == (20, "length")


def test_a_prompt_larger_than_a_step_runs(served: Served, scripted: Scripted) -> None:
    """B15: steps have 64 tokens."""
    script(served, scripted, [*b"done"], prompt=120)
    assert ask(served, prompt=[97] * 120, max_tokens=4, temperature=0)["choices"][0]["text"] == "done"


def test_seats_are_free_again_after_those_who_had_them_were_aborted(served: Served, scripted: Scripted) -> None:
    """B16: four run and four wait, half of them prompts of several steps."""

    async def main() -> None:
        bodies = [{"prompt": [97] * 100 if index % 2 else "a", "max_tokens": 20, "ignore_eos": True} for index in range(8)]
        crowd = [Exchange(served.app, COMPLETIONS, body) for body in bodies]
        while served.engine.num_open < 8:
            await asyncio.sleep(0.001)
        assert (await served.request("POST", "/abort", {"abort_all": True})).json() == {"aborted": 8}
        await asyncio.gather(*(one.task for one in crowd))
        answer = await served.request("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 3

    with paced(scripted.engine):
        run(main())
    assert scripted.engine.scheduler.num_waiting == 0


def test_a_tiny_temperature_is_greedy_and_ties_go_to_the_lowest_id(served: Served, scripted: Scripted) -> None:
    """B18."""
    table = np.full((100, 288), -60.0, np.float32)
    table[:, 100] = table[:, 98] = 60.0
    table[:, 97] = 59.9
    run(served.engine.call(lambda: scripted.logits(table)))
    for options in ({"temperature": 0}, {"temperature": 1e-4}, {"temperature": 1e-8}, {"temperature": 1e-38}):
        assert ask(served, max_tokens=6, **options)["choices"][0]["text"] == "bbbbbb"


def test_a_repetition_penalty_is_refused_at_nothing_and_finite_otherwise(served: Served, scripted: Scripted) -> None:
    """B19."""
    flat(served, scripted)
    for penalty in (0, 1e-9, -1):
        response = served.post(COMPLETIONS, {"prompt": "a", "repetition_penalty": penalty})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "repetition_penalty")
    for penalty in (0.01, 2, 1000):
        told = ask(served, repetition_penalty=penalty, max_tokens=6, logprobs=2, logprobs_mode="processed", ignore_eos=True)
        assert all(math.isfinite(value) and value <= 0 for value in told["choices"][0]["logprobs"]["token_logprobs"])


def test_seeds_are_of_the_request_and_their_absence_is_chance(served: Served, scripted: Scripted) -> None:
    """B21, B22, B23."""
    flat(served, scripted)
    body = {"temperature": 1, "max_tokens": 16, "ignore_eos": True, "logprobs": 0}

    def ids(answers: list[dict[str, Any]]) -> list[tuple[str, ...]]:
        return [tuple(choice["logprobs"]["tokens"]) for answer in answers for choice in answer["choices"]]

    seed = random.randrange(2**31)
    assert len(set(ids(at_once(served, [{**body, "seed": seed}] * 6)))) == 1
    assert len(set(ids(at_once(served, [body] * 8)) + ids([ask(served, **body) for _ in range(4)]))) == 12
    four = ids([ask(served, **body, n=4, seed=seed)])
    assert len(set(four)) == 4
    assert ids([ask(served, **body, n=4, seed=seed)]) == four
    assert len(set(ids([ask(served, **body, n=4)]))) == 4


@pytest.fixture(scope="module", params=[16, pytest.param(64, marks=pytest.mark.slow)])
def exact(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A deterministic engine of a real decoder, whose prompts are computed in pieces of so many tokens."""
    config = dataclasses.replace(CONFIGS["llama"], num_tokens=260)  # as many as the tokenizer has
    options = EngineConfig(
        max_context=128, max_sequences=4, max_tokens_per_step=64, prefill_chunk=request.param, decode_steps=3, deterministic=True,
        kv_cache_bytes=512 * 1024,
    )  # fmt: skip
    one = Served(Engine(config, random_params(config), plain_byte_tokenizer(), options))
    yield one
    one.stop()


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1, "seed": 5, "top_p": 0.9, "n": 2}], ids=["greedy", "sampled"]
)
def test_a_deterministic_server_answers_the_same_to_the_bit_in_any_crowd(exact: Served, options: dict[str, Any]) -> None:
    """B24: alone, with 1, 7 and 31 others, and whether its prefix is found or not."""
    draw = random.Random()
    ids = [draw.randrange(256) for _ in range(70)]
    mine = {"prompt": ids, "max_tokens": 12, "logprobs": 3, "ignore_eos": True, **options}

    def told(answer: dict[str, Any]) -> tuple[Any, ...]:
        return answer["choices"], answer["usage"]["completion_tokens"]

    alone = ask(exact, **mine, cache_salt="alone")
    cached = set()
    for others in (0, 1, 7, 31):
        crowd = [
            {"prompt": [draw.randrange(256) for _ in range(draw.randint(1, 80))], "max_tokens": draw.randint(1, 20)}
            for _ in range(others)
        ]
        for salt in (f"{others}", f"{others}"):  # the second finds what the first has left
            place = draw.randint(0, others)
            answer = at_once(exact, [*crowd[:place], {**mine, "cache_salt": salt}, *crowd[place:]])[place]
            assert told(answer) == told(alone), (others, ids, crowd)
            cached.add(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached >= {0, 64}  # a crowd may leave less of it


def test_offsets_count_characters_of_the_prompt_first(served: Served, scripted: Scripted) -> None:
    """B26."""
    prompt = "né🔥"
    script(served, scripted, [*"é🔥z".encode()], prompt=len(prompt.encode()))
    told = ask(served, prompt=prompt, max_tokens=7, temperature=0, logprobs=1)["choices"][0]["logprobs"]
    assert told["text_offset"] == [3, 3, 4, 4, 4, 4, 5]


def test_logprobs_are_the_models_own_unless_asked_otherwise(served: Served, scripted: Scripted) -> None:
    """B27: against the log-softmax of the scripted logits."""
    table = np.random.default_rng(random.randrange(2**32)).normal(size=(100, 288)).astype(np.float32)
    table[:, 98] = 9.0
    run(served.engine.call(lambda: scripted.logits(table)))

    def told(temperature: float, mode: str) -> float:
        body = {"max_tokens": 1, "logprobs": 0, "logit_bias": {"98": 100}, "temperature": temperature, "logprobs_mode": mode}
        return float(ask(served, **body)["choices"][0]["logprobs"]["token_logprobs"][0])

    own = float(table[0, 98] - np.logaddexp.reduce(table[0].astype(np.float64)))
    assert [told(temperature, "raw") for temperature in (0.1, 2.0)] == pytest.approx([own, own], abs=1e-4)
    assert told(2.0, "processed") == pytest.approx(0.0, abs=1e-4)


def test_an_interrupted_turn_keeps_its_prefix(served: Served, scripted: Scripted) -> None:
    """B32: aborted in the middle; the next turn begins with all of it."""
    salt = f"{random.random()}"  # nobody else's pages
    prompt = [random.randrange(97, 123) for _ in range(80)]
    script(served, scripted, [98] * 40, prompt=80)

    async def interrupted() -> None:
        body = {"prompt": prompt, "max_tokens": 40, "stream": True, "cache_salt": salt, "ignore_eos": True, "temperature": 0}
        exchange = Exchange(served.app, COMPLETIONS, body)
        while exchange.data.count(b'"text":') < 3:
            await asyncio.sleep(0.001)
        exchange.leave()
        await exchange.task

    with paced(scripted.engine):
        run(interrupted())
    again = ask(served, prompt=[*prompt, 98, 98, 120], max_tokens=1, cache_salt=salt)
    page = scripted.engine.config.page_size
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 80 // page * page


def test_a_conversation_has_one_beginning_and_a_text_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """B34: the tokenizer adds a beginning of sequence, and so does the template."""
    served = text_only(byte_tokenizer(tmp_path / "t", adds_bos=True, chat_template=TEMPLATE))

    def tokens(**body: Any) -> list[int]:
        return list(served.post("/tokenize", body).json()["tokens"])

    assert tokens(messages=HI).count(BOS_ID) == 1
    assert tokens(prompt="hi") == [BOS_ID, *b"hi"]
    assert tokens(prompt="hi", add_special_tokens=False) == [*b"hi"]
    assert served.post(CHAT, {"messages": HI, "max_tokens": 1}).json()["usage"]["prompt_tokens"] == len(tokens(messages=HI))
    usage = [
        served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1, "add_special_tokens": special}).json()["usage"][
            "prompt_tokens"
        ]
        for special in (True, False)
    ]
    assert usage == [3, 2]


def test_a_model_without_a_chat_template_says_so_and_completes(tmp_path: Path) -> None:
    """B35; and a template that refuses a conversation is a bad request in its own words."""
    base = text_only(byte_tokenizer(tmp_path / "base"))
    response = base.post(CHAT, {"messages": HI})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "chat template" in response.json()["error"]["message"]
    assert base.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1}).status_code == 200
    picky = text_only(byte_tokenizer(tmp_path / "picky", chat_template="{{ raise_exception('roles must alternate') }}"))
    refused = picky.post(CHAT, {"messages": HI})
    assert refused.status_code == 400
    assert "roles must alternate" in refused.json()["error"]["message"]


NO_FORMS: dict[str, dict[str, Any]] = {
    "nothing": {"response_format": {}},
    "no type": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "objec"}}}},
    "unclosed": {"guided_regex": "("},
    "huge enum": {"guided_json": {"enum": [f"value {index}" for index in range(20_000)]}},
    "many choices": {"guided_choice": [f"{index}" for index in range(2_000)]},
    "itself": {"guided_json": {"$ref": "#"}},
    "in a circle": {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    "from nowhere": {"guided_json": {"$ref": "#/$defs/none"}},
    "no schema": {"guided_json": [1]},
    "a grammar of itself": {"guided_grammar": "start: start"},
}


def test_a_form_that_is_none_is_refused_and_its_neighbours_go_on(served: Served, scripted: Scripted) -> None:
    """B72: valid ones come before, between and after; a schema of anything is JSON of any form, and one may contain itself."""
    flat(served, scripted)
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    valid: list[dict[str, Any]] = [{"guided_regex": "[ab]{30}"}, {"guided_json": tree}, {"guided_json": {}}, {}]
    bodies = [{**form, "max_tokens": 40, "seed": 3, "ignore_eos": True} for form in valid]
    alone = [ask(served, **body)["choices"] for body in bodies]
    assert re.fullmatch("[ab]{30}", alone[0][0]["text"])

    async def main() -> list[Any]:
        beside = [asyncio.ensure_future(served.request("POST", COMPLETIONS, {"prompt": "a", **body})) for body in bodies]
        for name, form in NO_FORMS.items():
            for stream in (False, True):
                refused = await served.request("POST", COMPLETIONS, {"prompt": "a", **form, "stream": stream})
                assert (refused.status_code, [refused.json()["error"]["param"]]) == (400, list(form)), (name, refused.text)
        return [(await answer).json()["choices"] for answer in beside]

    with paced(scripted.engine):
        assert run(main()) == alone
    assert [ask(served, **body)["choices"] for body in bodies] == alone


class TextEngine(FakeEngine):
    """The fake under a real tokenizer: it takes special tokens for spaces."""

    def add_request(self, prompt: Any, params: Any, **options: Any) -> str:
        return super().add_request([token if token < 256 else 32 for token in prompt], params, **options)


def text_only(tokenizer: Any) -> Served:
    engine = TextEngine(EngineConfig(max_context=64, max_sequences=4))
    engine.tokenizer = tokenizer
    return Served(engine)
