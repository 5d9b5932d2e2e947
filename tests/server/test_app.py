"""The server as a client sees it: answers, streams, errors, keys and limits. The model is scripted, everything else is real."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import h11
import pytest
from scripted_model import Scripted, paced
from served import ENDPOINTS, Served, run
from starlette.applications import Starlette
from starlette.routing import Mount

from llmjax.errors import ConfigError
from llmjax.server.config import ServerConfig
from llmjax.server.dashboard_routes import SHELL
from llmjax.server.middleware import PROBES

CHAT = {"messages": [{"role": "user", "content": "hé"}]}
ASK: dict[str, dict[str, Any]] = {"/v1/completions": {"prompt": "hé"}, "/v1/chat/completions": CHAT}
ODD_BYTES = [*"🔥漢ď".encode(), 0xC0, 0x80, 0x99, *b"ok <|im_", *b"end|> tail", 0xE6, 0xBC]


def write_script(served: Served, scripted: Scripted, ids: list[int], prompt: int) -> None:
    run(served.engine.call(lambda: scripted.script(ids, prompt=prompt)))


def prompt_length(served: Served, path: str) -> int:
    return int(served.post("/tokenize", ASK[path]).json()["count"])


def join(events: list[dict[str, Any]], path: str) -> tuple[dict[int, dict[str, Any]], dict[str, Any] | None]:
    """Choices put together from a stream, and the usage."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        if not event["choices"]:
            assert event is events[-1], "the usage comes last"
            usage = event["usage"]
        for piece in event["choices"]:
            one = choices.setdefault(piece["index"], {"text": "", "logprobs": None, "finish_reason": None, "chunks": 0})
            assert one["finish_reason"] is None, "nothing comes after the end of a choice"
            if path.endswith("chat/completions"):
                if not one["chunks"]:
                    assert piece["delta"] == {"role": "assistant", "content": ""}
                else:
                    assert "role" not in piece["delta"]
                    assert (piece["delta"] == {}) == (piece["finish_reason"] is not None)
                one["text"] += piece["delta"].get("content", "")
            else:
                one["text"] += piece["text"]
            one["chunks"] += 1
            one["finish_reason"] = piece["finish_reason"]
            one["stop_reason"] = piece.get("stop_reason")
            for name, values in (piece["logprobs"] or {}).items():
                if one["logprobs"] is None:
                    one["logprobs"] = {}
                one["logprobs"][name] = None if values is None else one["logprobs"].get(name, []) + values
    return choices, usage


OPTIONS: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 40, "stop": ["<|im_end|>"], "logprobs": True},
    {"max_tokens": 40, "stop": ["<|im_end|>", "il"], "include_stop_str_in_output": True},
    {"max_tokens": 9, "n": 3, "temperature": 1, "seed": 7, "logprobs": True, "logit_bias": {"97": 50, "98": 50}},
]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "held-back", "stop-kept", "choices"])
def test_a_stream_put_together_is_the_whole_answer(
    served: Served, scripted: Scripted, path: str, options: dict[str, Any]
) -> None:
    """B01, B02, B04, B05, B13, B25, B67."""
    body = {"temperature": 0, **ASK[path], **options}
    if options.get("logprobs"):
        body |= {"top_logprobs": 2} if "chat" in path else {"logprobs": 2}
    write_script(served, scripted, ODD_BYTES + [random.randrange(97, 123) for _ in range(20)], prompt_length(served, path))
    whole = served.post(path, body)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    events = served.events(path, {**body, "stream_options": {"include_usage": True}})
    choices, usage = join(events, path)
    assert usage == answer["usage"]
    assert len({event["id"] for event in events}) == 1
    assert all(event["model"] == "tiny" and event.get("usage") is None for event in events[:-1])
    assert len(choices) == len(answer["choices"]) == options.get("n", 1)
    for want in answer["choices"]:
        found = choices[want["index"]]
        text = want["message"]["content"] if "chat" in path else want["text"]
        assert found["text"] == text
        assert found["logprobs"] == want["logprobs"]
        assert (found["finish_reason"], found["stop_reason"]) == (want["finish_reason"], want["stop_reason"])
    if "n" not in options:
        assert "🔥漢ď" in choices[0]["text"]
        assert "�" not in choices[0]["text"].partition("ď")[0]
    for event in served.events(path, body):
        assert event["choices"], "no usage chunk unless it was asked for"
        assert "usage" not in event


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_prompts_of_every_form(served: Served, stream: bool) -> None:
    """B12, and what lm-eval sends: lists of token ids with echo and logprobs."""
    body = {"prompt": [[104, 105, 33], [97]], "echo": True, "logprobs": 1, "max_tokens": 0}
    if stream:
        choices, _ = join(served.events("/v1/completions", body), "/v1/completions")
        found = [choices[index] for index in range(2)]
    else:
        found = served.post("/v1/completions", body).json()["choices"]
    assert [choice["text"] for choice in found] == ["hi!", "a"]
    assert [choice["finish_reason"] for choice in found] == ["length", "length"]
    assert found[0]["logprobs"]["tokens"] == ["h", "i", "!"]
    assert found[0]["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in found[0]["logprobs"]["token_logprobs"][1:])
    assert found[0]["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("prompt", ["a", "é", "hi!"])
def test_a_streamed_echo_begins_with_the_prompts_own_entries(served: Served, scripted: Scripted, prompt: str) -> None:
    """Also of a prompt of one token, which has no logprob that one could wait for."""
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0, "n": 2, "ignore_eos": True}
    whole = served.post("/v1/completions", body).json()["choices"]
    with paced(scripted.engine):
        events = served.events("/v1/completions", body)
    choices, _ = join(events, "/v1/completions")
    for index, choice in enumerate(whole):
        assert len(choice["logprobs"]["tokens"]) == len(prompt.encode()) + 3
        assert choices[index]["logprobs"] == choice["logprobs"]
        assert choices[index]["text"] == choice["text"]


def test_prompt_logprobs_are_in_the_whole_answer_and_refused_in_a_stream(served: Served) -> None:
    body = {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1}
    scores = served.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert [str(ord(letter)) in score for letter, score in zip("bc", scores[1:], strict=True)] == [True, True]
    refused = served.post("/v1/completions", {**body, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_usage_so_far_comes_with_every_chunk_when_asked_for(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = served.events("/v1/completions", {"prompt": "a", "max_tokens": 6, "ignore_eos": True, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6


DEEP = b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}"
WRONG: list[tuple[Any, int, str | None]] = [
    (b"", 400, None),
    (b"{", 400, None),
    (b'{"prompt": "a",}', 400, None),
    (b'{"prompt": "a", "prompt": "b"}', 400, "prompt"),
    (b'{"prompt": "\xff"}', 400, None),
    (b'{"prompt": "a", "temperature": NaN}', 400, None),
    (DEEP, 400, None),
    (b"[]", 400, None),
    (b"null", 400, None),
    (b'"x"', 400, None),
    ({"prompt": {}}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [288]}, 400, "prompt"),
    ({"prompt": "a\ud83d"}, 400, "prompt"),
    ({"prompt": [97] * 128}, 400, "prompt"),
    ({"prompt": "a", "stop": ""}, 400, "stop"),
    ({"prompt": "a", "stop_token_ids": [288]}, 400, "stop_token_ids"),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature"),
    (b'{"prompt": "a", "stream_options": {"include_usage": true}}', 400, "stream_options"),
    ({"prompt": "a", "suffix": "b"}, 400, "suffix"),
    ({"prompt": "a", "guided_regex": "("}, 400, "guided_regex"),
    ({"prompt": "a", "model": "Tiny"}, 404, "model"),
    ({"prompt": "a", "model": ""}, 404, "model"),
]


def test_what_is_wrong_is_refused_and_the_next_request_works(served: Served) -> None:
    """B03, B06, B10, B11, B14, B17, B20, B64-B66, streaming or not: an error object with the field, never a 500 or an event."""
    for wrong, status, param in WRONG:
        variants = [wrong] if isinstance(wrong, bytes) else [wrong, {**wrong, "stream": True}]
        for body in variants:
            if isinstance(body, bytes):
                response = served.post("/v1/completions", data=body)
            else:
                response = served.post("/v1/completions", body)
            assert response.status_code == status, (body, response.text)
            error = response.json()["error"]
            assert error["param"] == param, (body, error)
            assert set(error) == {"message", "type", "param", "code"}
    too_long = served.post("/v1/completions", {"prompt": [97] * 128}).json()["error"]
    assert too_long["code"] == "context_length_exceeded"
    assert "128" in too_long["message"]
    assert served.post("/v1/completions", {"prompt": "a", "model": None}).json()["model"] == "tiny"
    assert served.post("/v1/completions", {"prompt": [97] * 127, "model": "alias"}).json()["model"] == "alias"
    assert served.engine.num_open == 0


def test_one_bad_prompt_of_several_leaves_none_behind(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": [[97], [98], [999], [99]], "max_tokens": 100})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert served.engine.num_open == 0


def test_unknown_fields_are_told_or_refused(served: Served) -> None:
    body = {"prompt": "a", "max_tokens": 1, "max_new_tokens": 3, "é\n": 1}
    response = served.post("/v1/completions", body)
    assert response.status_code == 200
    assert response.headers["x-llmjax-warning"] == 'unknown fields ignored: "max_new_tokens", "\\xe9\\n"'
    assert "x-llmjax-warning" not in served.post("/v1/completions", {"prompt": "a", "user": "me"}).headers
    strict = served.with_options(strict=True).post("/v1/completions", body)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "max_new_tokens")


@pytest.mark.parametrize("name", ["", " ", "\t", "\r\n", "\x00", "\x7f", "\x85", "\ud800", "a,", '"', "\\"])
def test_any_name_of_an_unknown_field_can_be_told_in_a_header(name: str, served: Served) -> None:
    warning = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1, name: 1}).headers["x-llmjax-warning"]
    h11.Response(
        status_code=200, headers=[("x-llmjax-warning", warning.encode("ascii"))]
    )  # which refuses what HTTP does not allow


def test_models_and_tokens(served: Served) -> None:
    models = served.get("/v1/models").json()
    assert [model["id"] for model in models["data"]] == ["tiny", "alias"]
    assert models["data"][0]["max_model_len"] == 128
    assert served.get("/v1/models/alias").json() == models["data"][1]
    missing = served.get("/v1/models/no/such")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    text = "né漢 <|im_end|>" + "x" * random.randrange(5)
    tokens = served.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert served.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = served.post("/tokenize", CHAT).json()["tokens"]
    assert served.post("/detokenize", {"tokens": chat}).json() == {"prompt": "<bos>user: hé\n"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "\ud83d"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/abort", {}, "request_id"),
    ):
        response = served.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), (path, body)
    assert served.post("/tokenize", {"prompt": "a", "model": "none"}).status_code == 404


def test_routes_that_are_not_there(served: Served) -> None:
    for method, path, status in (
        ("GET", "/nope", 404), ("GET", "/v1/completions", 405), ("POST", "/metrics", 405),
        ("POST", "/v1/completions/", 404), ("GET", "/dashboard/", 404),  # no address that is made of the client's own words
    ):  # fmt: skip
        response = run(served.request(method, path))
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


def test_probes_version_metrics_and_the_api_description(served: Served) -> None:
    for path in ("/livez", "/readyz", "/health"):
        assert served.get(path).status_code == 200
    assert served.get("/version").json()["version"]
    served.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    served.post("/v1/completions", {"prompt": ""})
    lines = served.get("/metrics").text.splitlines()
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="200"} 1.0' in lines
    assert 'http_requests_total{handler="/v1/completions",method="POST",status="400"} 1.0' in lines
    assert 'llmjax:engine_ready{model_name="tiny"} 1.0' in lines
    assert 'llmjax:open_requests{model_name="tiny"} 0.0' in lines
    assert f'num_pages="{served.engine.engine.stats.num_pages}"' in next(line for line in lines if "cache_config_info{" in line)
    document = served.get("/openapi.json").json()
    paths = {route.path.replace("{id:path}", "{id}") for route in served.app.routes}
    assert {path for path in paths if not path.startswith("/dashboard")} == set(document["paths"])
    fields = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "temperature", "top_k", "stream_options"} <= fields["properties"].keys()


def test_a_key_opens_every_route_but_the_probes_which_need_none(served: Served) -> None:
    locked = served.with_options(api_keys=("first", "second"))
    for route in locked.app.routes:
        path, method = route.path.replace("{id:path}", "tiny"), "POST" if "POST" in route.methods else "GET"
        expected = 200 if path in PROBES | SHELL else 401
        assert run(locked.request(method, path, {})).status_code == expected, path
    assert locked.get("/nope").status_code == 401
    for header in ("", "Bearer", "Bearer ", "Bearer third", "Basic first", "first", "Bearer fir", "Bearer \u00e9"):
        response = run(locked.request("GET", "/v1/models", authorization=header))
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for key in ("first", "second"):
        assert locked.get("/v1/models", authorization=f"Bearer {key}").status_code == 200


def test_bodies_have_a_limit(served: Served) -> None:
    small = served.with_options(max_body_bytes=100)
    for path in ("/v1/completions", "/tokenize"):
        response = small.post(path, {"prompt": "a" * 200})
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert small.post(path, {"prompt": "a"}).status_code == 200
    assert served.post("/v1/completions", data=b"\x1f\x8b", content_encoding="gzip").status_code == 415


def test_a_page_of_another_origin_is_let_in_only_when_told_so(served: Served) -> None:
    asks = {"origin": "https://a.example", "access_control_request_method": "POST"}
    assert run(served.request("OPTIONS", "/v1/completions", **asks)).status_code == 405
    assert "access-control-allow-origin" not in served.get("/v1/models", origin="https://a.example").headers
    open_app = served.with_options(cors_origins=("https://a.example",), api_keys=("k",))
    allowed = run(open_app.request("OPTIONS", "/v1/completions", **asks))
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"


def test_the_app_mounts_inside_another(served: Served) -> None:
    locked = served.with_options(api_keys=("k",))
    locked.app = Starlette(routes=[Mount("/llm", locked.app)])
    assert locked.get("/llm/livez").status_code == 200
    assert locked.get("/llm/v1/models").status_code == 401
    answer = locked.post("/llm/v1/completions", {"prompt": "a", "max_tokens": 1}, authorization="Bearer k")
    assert answer.json()["choices"][0]["finish_reason"] in ("length", "stop")
    assert "/llm/v1/completions" not in locked.get("/llm/metrics", authorization="Bearer k").text


def test_a_request_id_of_the_clients_own_comes_back(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, x_request_id="mine-1")
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    twice = [served.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 4}, x_request_id="same") for _ in range(2)]

    async def both() -> list[Any]:
        return await asyncio.gather(*twice)

    assert [one.status_code for one in run(both())] == [200, 200]
    odd = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, x_request_id="a b")
    assert odd.headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    "wrong", [{"served_names": ()}, {"served_names": ("",)}, {"api_keys": ("",)}, {"api_keys": ("a b",)}, {"keep_alive": 0.0}]
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**{"served_names": ("a",)} | wrong)
