"""`inspect --live`: the memory of a server as tables and as JSON, and what happens where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes_text import plain_byte_tokenizer
from raw_server import raw_server
from scripted_model import Scripted

from llmjax import cli
from llmjax.cli import live
from llmjax.cli.live import _owners, _totals
from llmjax.engine.async_engine import AsyncEngine
from llmjax.errors import LlmjaxError
from llmjax.sampling_params import SamplingParams
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig
from llmjax.server.http_server import HttpServer

KEY = "of-the-server"


@pytest.fixture
def scripted() -> Scripted:
    """A request runs that began with two pages of one that has ended."""
    made = Scripted(plain_byte_tokenizer(), kv_cache_bytes=64 * 1024)
    engine = made.engine
    engine.add_request([5] * 40, SamplingParams(max_tokens=1, temperature=0.0), request_id="gone")
    while engine.has_unfinished:
        engine.step()
    engine.add_request([5] * 40, SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True), request_id="runs")
    engine.step()
    return made


@pytest.fixture
def server(scripted: Scripted) -> Iterator[HttpServer]:
    engine = AsyncEngine(scripted.engine)
    app = create_app(engine, ServerConfig(served_names=("m",), api_keys=(KEY,)))
    made = HttpServer(app, engine, host="127.0.0.1", port=0, drain=1.0)
    made.start()
    yield made
    made.close()


def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> tuple[Any, str, str]:
    monkeypatch.setattr("sys.argv", ["llmjax", "inspect", *map(str, args)])
    try:
        cli.main()
        code: Any = 0
    except SystemExit as stop:
        code = stop.code or 0
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out, err


def test_who_holds_what(scripted: Scripted) -> None:
    found = scripted.engine.memory_map().to_json()
    (line,) = _owners(found["pages"])
    assert line[:3] == ("runs/0", "3", "0")
    assert int(line[3]) < int(line[4]), "two pages are the earlier request's"
    totals = dict(_totals(found))
    assert totals["held"] == "3, 0 of them by several, by 1 at most"
    assert totals["in_use"] == "not told"
    shared = [{"owners": ["a", "b"], "holders": 2, "age": 7}, {"owners": ["b"], "holders": 1, "age": 1}]
    assert _owners(shared) == [("b", "2", "1", "1", "7"), ("a", "1", "1", "7", "7")]


def test_a_server_is_asked(
    server: HttpServer,
    scripted: Scripted,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    key = tmp_path / "key"
    key.write_text(f"# für alle, the server's own file\n\n{KEY}  # the first\nanother\n", "utf-8")
    for url in (server.url, server.url + "/v1"):
        code, out, _ = inspect(monkeypatch, capsys, "--live", url, "--api-key-file", key, "--json")
        assert code == 0
        found = json.loads(out)
        assert found["num_pages"] == scripted.engine.pool.capacity
        assert set(found["device"]) == {"weights", "cache", "state", "temporaries", "in_use", "limit"}
    code, out, _ = inspect(monkeypatch, capsys, "--live", server.url, "--api-key-file", key)
    assert code == 0
    assert f"{scripted.engine.pool.capacity} of 16 tokens" in out
    code, out, err = inspect(monkeypatch, capsys, "--live", server.url)
    assert (code, out) == (LlmjaxError.exit_code, "")
    assert "answers 401 to /memory" in err


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--live", "file:///etc/passwd"), "takes the URL of a server"),
        (("--live", "http://me:secret@host"), "takes the URL of a server"),
        (("--live", "http://host:port"), "is no URL"),
        (("--live", "http://localhost", "--random", "llama-8b"), "name no model"),
        (("--random", "llama-8b", "--api-key-file", "key"), "is for --live"),
        (("--live", "http://localhost", "--api-key-file", "none"), "cannot be read"),
        (("--live", "http://127.0.0.1:1"), "does not answer"),
    ],
)
def test_what_cannot_work_is_one_line(
    args: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = inspect(monkeypatch, capsys, *args)
    assert code != 0
    assert out == ""
    assert why in err
    assert "secret" not in err
    assert len(err.splitlines()) == 1


def test_another_server_is_told_from_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server(b"") as other:  # it answers every GET with a list of models
        code, _, err = inspect(monkeypatch, capsys, "--live", other.url)
    assert code == LlmjaxError.exit_code
    assert "not as this version of llmjax does" in err


def test_what_is_no_memory_map_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are there, but not what they stand for."""
    counts = ("page_size", "page_bytes", "num_pages", "num_held", "num_shared", "num_kept", "num_empty", "step")
    answers: list[dict[str, Any]] = [{"device": {}}, dict.fromkeys(counts, 0) | {"pages": [], "device": []}]
    for found in answers:
        monkeypatch.setattr(live, "_ask", lambda url, key, found=found: found)
        with pytest.raises(LlmjaxError, match="not as this version of llmjax does"):
            live.show_memory("http://other", None, to_json=False)
