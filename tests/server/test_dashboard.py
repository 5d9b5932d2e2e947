"""The dashboard's page and events without a browser: what is told, to whom, and how often the engine is asked."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_model import Scripted, paced
from served import Exchange, Served, run

import llmjax.server
from llmjax.errors import EngineError, RequestError
from llmjax.server.dashboard_feed import DashboardFeed
from llmjax.server.dashboard_figures import Window, bars
from llmjax.server.dashboard_routes import EVENTS, SHELL
from llmjax.server.recent_errors import KEPT, RecentErrors, without_quotes
from llmjax.telemetry.histogram import SECONDS, SIZES, Histogram

FOLDER = Path(llmjax.server.__file__).parent / "dashboard"
BODY: dict[str, Any] = {"prompt": "a secret prompt", "max_tokens": 20, "ignore_eos": True}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def parse(data: bytes) -> list[tuple[str, Any]]:
    """(name, data) of each event."""
    found = []
    for block in data.decode("ascii").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


def feed_of(served: Served, interval: float = 0.0) -> DashboardFeed:
    return DashboardFeed(served.app.state.service, interval=interval)


def test_an_event_tells_what_the_server_does_and_no_prompt(served: Served, scripted: Scripted) -> None:
    async def main() -> None:
        feed = feed_of(served, 0.01)
        events = feed.events()
        ((name, past), (_, first)) = parse(await anext(events))
        assert (name, past) == ("history", [first["point"]])
        assert first["health"] == {"state": "ready", "reason": ""}
        assert (first["models"], first["figures"]["output_rate"]) == (["tiny", "alias"], None)
        assert first["engine"]["running"] == {"all": 0}
        with paced(scripted.engine) as at_full_speed:
            long = {**BODY, "max_tokens": 100}
            work = [asyncio.ensure_future(served.request("POST", "/v1/completions", long)) for _ in range(6)]
            seen: dict[str, Any] = {}
            while not all(task.done() for task in work):
                ((_, now),) = parse(await anext(events))
                engine, figures = now["engine"], now["figures"]
                seen["rate"] = seen.get("rate") or figures["output_rate"]
                seen["waiting"] = max(seen.get("waiting", 0), engine["waiting"]["all"])
                seen["first"] = seen.get("first") or figures["first"]["p95"]
                seen["owner"] = seen.get("owner") or engine["largest"]
                if seen["waiting"] >= 2 and all(seen.values()):
                    at_full_speed.set()
        assert seen["rate"] > 0
        assert seen["waiting"] >= 2
        assert seen["owner"][0]["prompt"] == len("a secret prompt")
        assert 0 < seen["first"] < 30
        await served.request("POST", "/v1/completions", {**BODY, "temperature": "very secret"}, x_request_id="bad-one")
        ((_, last),) = parse(await anext(events))
        while not last["errors"]:
            ((_, last),) = parse(await anext(events))
        assert [(error["id"], error["status"]) for error in last["errors"]] == [("bad-one", 400)]
        assert "temperature" in last["errors"][0]["message"]
        assert last["engine"]["finished"]["length"] >= 6
        assert sum(count for _, count in last["engine"]["sizes"]["output"]) == sum(last["engine"]["finished"].values())
        assert "secret" not in json.dumps(last)
        assert len(json.dumps(last)) < 20_000
        await events.aclose()

    run(main())


def test_all_viewers_share_one_look_at_the_engine_and_nobody_means_none(served: Served) -> None:
    asked = 0
    snapshot = served.engine.snapshot

    async def counted() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return await snapshot()

    served.engine.snapshot = counted  # type: ignore[method-assign]

    async def main() -> None:
        feed = feed_of(served)
        assert (feed.runs, asked) == (False, 0)
        viewers = [feed.events() for _ in range(20)]
        firsts = await asyncio.gather(*(anext(viewer) for viewer in viewers))
        assert len(set(firsts)) <= asked, "what is made once is sent to all"
        assert asked < 10
        while asked < 12:
            await asyncio.gather(*(anext(viewer) for viewer in viewers[:3]))
        for viewer in viewers[:-1]:
            await viewer.aclose()
        assert (feed.num_viewers, feed.runs) == (1, True)
        await viewers[-1].aclose()
        assert (feed.num_viewers, feed.runs) == (0, False)
        await asyncio.sleep(0)
        before = asked
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert asked == before
        again = feed.events()
        (name, past), _ = parse(await anext(again))
        assert name == "history"
        assert len(past) >= 12, "what was seen before is shown to who comes back"
        await again.aclose()

    run(main())


def test_viewers_who_come_and_go_do_not_have_the_engine_asked_more_often(served: Served) -> None:
    async def main() -> None:
        feed = feed_of(served, 3600.0)
        first = feed.events()
        await anext(first)
        await first.aclose()
        second = feed.events()
        coming = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0.05)
        assert not coming.done()
        coming.cancel()
        await asyncio.gather(coming, return_exceptions=True)
        await second.aclose()
        assert not feed.runs

    run(main())


def test_the_page_goes_on_without_the_engine(served: Served) -> None:
    async def broken() -> dict[str, Any]:
        raise EngineError("gone")

    served.engine.snapshot = broken  # type: ignore[method-assign]

    async def main() -> None:
        events = feed_of(served).events()
        _, (_, event) = parse(await anext(events))
        assert (event["engine"], event["figures"], event["point"]) == (None, None, None)
        assert event["health"]["state"] in ("new", "ready")
        await events.aclose()

    run(main())


def test_a_viewer_over_http_leaves_and_a_draining_server_lets_go_of_them(served: Served) -> None:
    feed = next(route.app for route in served.app.routes if route.path == EVENTS).feed

    async def main() -> None:
        leaves, stays = Exchange(served.app, EVENTS, None, method="GET"), Exchange(served.app, EVENTS, None, method="GET")
        await until(lambda: b"data: {" in leaves.data and b"data: {" in stays.data)
        assert dict(stays.sent[0]["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
        leaves.leave()
        await leaves.task
        assert feed.num_viewers == 1
        served.engine.close_doors()
        await asyncio.wait_for(stays.task, 30)
        assert parse(stays.data)[-1][1]["health"]["state"] == "draining"
        assert not stays.sent[-1]["more_body"]
        assert not feed.runs

    run(main())


def test_the_shell_is_open_and_empty_and_the_data_needs_the_key(served: Served) -> None:
    locked = served.with_options(api_keys=("k",), served_names=("a-name",))
    for path in SHELL:
        response = locked.get(path)
        assert response.status_code == 200
        assert "a-name" not in response.text
        assert "default-src 'none'" in response.headers["content-security-policy"]
    assert locked.get(EVENTS).status_code == 401
    assert locked.get(EVENTS + "?key=k").status_code == 401, "a key in an address would end up in logs"
    assert locked.get("/dashboard/../metrics").status_code == 401


def test_the_page_needs_nothing_from_anywhere_else(served: Served) -> None:
    page = (FOLDER / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert name in ("data:,", "metrics") or served.get(f"/{name}").status_code == 200, name
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"//[a-z]+[.]|https?:|@import|url\(", text), path
        assert "innerHTML" not in text
        assert "localStorage" not in text
    ids = set(re.findall(r'id="([^"]+)"', page))
    script = (FOLDER / "page.js").read_text()
    used = set(re.findall(r'(?:\$|put|table|counts)\("([a-z0-9-]+)"', script))
    assert used <= ids
    assert {"map", "errors", "lanes", "login"} <= used


# -- figures


def snapshot(
    taken: float, output: int, *, started: float = 0, between: Histogram | None = None, cached: int = 0
) -> dict[str, Any]:
    between = between or Histogram(SECONDS)
    return {
        "taken": taken, "started": started, "output_tokens": output, "prompt_tokens_computed": 2 * output,
        "prompt_tokens_cached": cached, "prompt_tokens_queried": 2 * cached,
        "times": {"first": [0] * len(between.counts), "between": list(between.counts)},
    }  # fmt: skip


def test_rates_are_of_the_last_seconds_and_percentiles_of_the_last_minute() -> None:
    window, between = Window(), Histogram(SECONDS)
    found: dict[str, Any] = {}
    for second in range(0, 200):
        between.add(0.01 if second < 100 else 0.1, 10)
        found = window.add(snapshot(second, 50 * second + (1000 if second > 195 else 0), between=between, cached=3 * second))
        if second == 0:
            assert found["output_rate"] is None
            assert found["between"] == {"p50": None, "p95": None, "p99": None}
        elif second in (50, 120):
            assert found["output_rate"] == pytest.approx(50)
            assert found["prompt_rate"] == pytest.approx(103)
            assert found["hit_rate"] == pytest.approx(0.5)
        if second == 120:
            assert found["between"]["p50"] < 0.011 < 0.089 < found["between"]["p95"] < 0.101
    assert found["output_rate"] == pytest.approx(250)
    assert 0.089 < found["between"]["p50"] < 0.101, "what was before the last minute is forgotten"


def test_drafts_are_those_of_the_last_minute() -> None:
    window, found = Window(), {}
    for second in range(100):
        drafts = {
            "rounds": 10 * second,
            "drafted": 30 * second,
            "accepted": 10 * second + (10 * second - 500 if second > 50 else 0),
        }
        found = window.add(snapshot(second, second) | {"speculation": drafts})
    assert found["accepted"] == pytest.approx((1480 - 390) / (2970 - 1170))  # of second 99 and second 39
    assert found["round_tokens"] == pytest.approx(1 + (1480 - 390) / (990 - 390))
    assert window.add(snapshot(100, 100) | {"speculation": None})["accepted"] is None
    assert Window().add(snapshot(0, 0) | {"speculation": drafts})["round_tokens"] is None


def test_points_of_long_ago_are_no_history(served: Served) -> None:
    feed, now = DashboardFeed(served.app.state.service), time.time()
    feed._history.extend([[now - 400, 1.0], [now - 10, 2.0]])
    assert [point[1] for point in feed._past()] == [2.0]


def test_an_engine_that_was_restarted_begins_anew() -> None:
    window = Window()
    window.add(snapshot(0, 1000))
    window.add(snapshot(1, 1100))
    assert window.add(snapshot(9, 5000, started=5))["output_rate"] is None
    assert window.add(snapshot(10, 5020, started=5))["output_rate"] == 20


def test_bars_leave_out_the_empty_ends() -> None:
    counts = [0] * (len(SIZES) + 1)
    assert bars(counts) == []
    counts[3], counts[5] = 7, 1
    assert bars(counts) == [(8, 7), (16, 0), (32, 1)]
    counts[-1] = 2
    assert bars(counts)[-1] == (2 * SIZES[-1], 2)


def test_errors_are_the_last_ones_and_quote_nobody() -> None:
    errors = RecentErrors()
    for index in range(KEPT + 5):
        errors.add(f"r{index}", RequestError(f"number {index}", "prompt"))
    errors.add("bug", ValueError("the prompt was: my secret"))
    newest = errors.newest()
    assert len(newest) == KEPT
    assert (newest[0]["id"], newest[0]["status"], newest[1]["message"]) == ("bug", 500, f"number {KEPT + 4}")
    assert "secret" not in json.dumps(newest)
    assert without_quotes("the model's field 'my ''secret' is \"se\\\"cret\", got 'cut off\nsecret") == (
        "the model's field '…''…' is '…', got '…'"
    )
    assert without_quotes("there is nothing at /v1/my secret/x") == "there is nothing at …"
    assert without_quotes("regex: it cannot be compiled: unclosed group: secret(") == "regex: it cannot be compiled: …"
