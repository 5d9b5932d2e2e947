"""A service of several processes: how it starts, and what is left when one of them, or all, come to an end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from served import parse_events

TESTS = Path(__file__).resolve().parent.parent
LONG = {"prompt": "ab", "max_tokens": 50_000, "stream": True}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Service:
    """A running `fake_service`, from outside."""

    def __init__(self, folder: Path, **options: Any) -> None:
        address = folder / "address"
        self.log = folder / "log"
        path = [str(TESTS), *(entry or "." for entry in sys.path)]
        options["address"] = str(address)
        code = f"import sys; sys.path[:] = {path!r}; from fake_service import supervise; supervise({options!r})"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", code], stdout=log, stderr=log)
        until(lambda: (address.exists() and address.read_text() != "") or self.process.poll() is not None)
        assert self.process.poll() is None, self.log.read_text()
        self.url = address.read_text()
        self.client = httpx2.Client(base_url=self.url, timeout=60)
        self.pids: set[int] = set()

    def children(self, kind: str) -> set[int]:
        """Processes of a kind ("worker", "engine" or "beside") that run at this moment."""
        found = set()
        for pid in map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                modules = {"worker": "llmjax.server.worker", "engine": "fake_service_engine", "beside": "fake_beside"}
                if modules[kind] in command:
                    found.add(pid)
        self.pids |= found
        return found

    def status(self, path: str = "/readyz") -> tuple[int, str]:
        """Status and reason of a probe, over a connection of its own; (0, "") when nobody listens."""
        try:
            response = httpx2.get(self.url + path, timeout=60)
        except httpx2.TransportError:
            return 0, ""
        return response.status_code, response.json()["reason"]

    def wait_for(self, status: int, reason: str = "") -> None:
        """Until /readyz says so."""

        def said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            found, why = self.status()
            return found == status and reason in why

        until(said)

    def series(self, name: str) -> list[str]:
        """Lines of /metrics."""
        return [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(name)]

    def answers(self, route: str) -> int:
        """Answers on a route, of all workers."""
        lines = [line for line in self.series("http_requests_total") if f'handler="{route}"' in line]
        return sum(int(float(line.split()[1])) for line in lines)

    def open_requests(self) -> int:
        """Requests under way, of all workers."""
        (line,) = self.series("llmjax:open_requests")
        return int(float(line.split()[1]))

    def complete(self, **body: Any) -> str:
        """The text of a completion."""
        response = self.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, **body})
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def ended(self) -> int:
        """The exit code, when the service has ended; no process of it is left."""
        code = self.process.wait(60)
        until(lambda: not any(map(alive, self.pids)))
        return code


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Stream:
    """A client with a stream of its own, read by a thread to whatever end."""

    def __init__(self, service: Service, **body: Any) -> None:
        self.data = b""
        self.id = ""
        self.begun = threading.Event()
        self.broken = False
        self._url = service.url + "/v1/completions"
        self._body = {**LONG, **body}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.begun.wait(60)

    def _read(self) -> None:
        try:
            with httpx2.stream("POST", self._url, json=self._body, timeout=60) as response:
                self.id = response.headers["x-request-id"]
                for data in response.iter_bytes():
                    self.data += data
                    self.begun.set()
        except httpx2.TransportError:
            self.broken = True
        self.begun.set()

    def join(self) -> None:
        """Until it has ended, however that was."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def ended(self) -> Any:
        """The last event."""
        self.join()
        return parse_events(self.data)[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts the service of a test."""
    services: list[Service] = []

    def one(**options: Any) -> Service:
        services.append(Service(tmp_path, **options))
        return services[0]

    yield one
    for service in services:
        service.process.kill()
        service.client.close()
        service.ended()


def test_it_is_not_ready_before_the_engine_is_and_drains_at_the_end(start: Callable[..., Service], tmp_path: Path) -> None:
    """B33, B70: /readyz is 200 once requests are served. At SIGTERM three run and two wait: all are answered, and it exits 0."""
    service = start(engine={"load": str(tmp_path / "loaded"), "rows": 3}, workers=2)
    service.wait_for(503, "the engine is starting")
    assert service.status("/livez")[0] == 200
    refused = service.client.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"], "retry-after" in refused.headers) == (503, "unavailable", True)
    until(lambda: len(service.children("worker")) == 2)
    (tmp_path / "loaded").touch()
    service.wait_for(200)
    models = service.client.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("fake", 100_000)]
    assert len(service.children("engine")) == 1

    running = [Stream(service) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(service.complete, prompt="b", max_tokens=2) for _ in range(2)]
        until(lambda: service.open_requests() == 5)
        service.process.send_signal(signal.SIGTERM)
        service.wait_for(503, "takes no more requests")
        assert service.client.post("/v1/completions", json={"prompt": "a"}).status_code == 503
        for stream in running:  # they would take minutes
            assert service.client.post("/abort", json={"request_id": stream.id}).json() == {"aborted": 1}
        assert [one.result(60) for one in waiting] == ["bb", "bb"]
    assert [stream.ended()["choices"][0]["finish_reason"] for stream in running] == ["abort"] * 3
    assert service.ended() == 0


def test_two_workers_are_one_service_that_lives_without_them_but_not_without_its_parent(start: Callable[..., Service]) -> None:
    """Ids differ, and a request is aborted through whichever worker hears of it. The requests of a killed worker are aborted."""
    service = start(workers=2, engine={"rows": 12})
    service.wait_for(200)
    streams = [Stream(service) for _ in range(12)]
    assert len({stream.id for stream in streams}) == 12
    for stream in streams[:6]:
        answer = httpx2.post(f"{service.url}/abort", json={"request_id": f"cmpl-{stream.id}"}, timeout=60)
        assert answer.json() == {"aborted": 1}
        assert stream.ended()["choices"][0]["finish_reason"] == "abort"
    assert service.client.post("/abort", json={"abort_all": True}).json() == {"aborted": 6}
    assert {stream.ended()["choices"][0]["finish_reason"] for stream in streams[6:]} == {"abort"}
    until(lambda: service.answers("/abort") == 7)  # by both

    streams = [Stream(service) for _ in range(12)]
    before = service.children("worker")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    for stream in streams:
        stream.join()
        assert stream.broken
    service.wait_for(200)
    assert service.complete() == "abca", "rows are free again"
    assert not service.children("worker") & before

    stream = Stream(service)
    service.children("worker"), service.children("engine")
    service.process.kill()
    service.ended()
    stream.join()
    assert stream.broken


def test_an_engine_that_is_killed_is_started_again_as_often_as_allowed(start: Callable[..., Service], tmp_path: Path) -> None:
    """B69: clients get an error; meanwhile it is alive and not ready. The last time it ends, with a line that says why."""
    loaded = tmp_path / "loaded"
    loaded.touch()
    service = start(restart=1, engine={"load": str(loaded)})
    service.wait_for(200)
    for allowed in (True, False):
        streams = [Stream(service) for _ in range(2)]
        (engine,) = service.children("engine")
        loaded.unlink()  # what is started again waits for it
        os.kill(engine, signal.SIGKILL)
        assert [stream.ended()["error"]["code"] for stream in streams] == ["unavailable"] * 2
        if allowed:
            service.wait_for(503, "SIGKILL")
            assert service.status("/livez")[0] == 200
            loaded.touch()
            service.wait_for(200)
            assert service.complete() == "abca"
    assert service.ended() == 5
    (line,) = [line for line in service.log.read_text().splitlines() if line.startswith("llmjax: ")]
    assert "the engine's process was killed by SIGKILL" in line
    assert "serve.restart" in line
    assert "Traceback" not in service.log.read_text()


@pytest.mark.slow
def test_an_engine_that_dies_inside_its_process_counts_as_well(start: Callable[..., Service], tmp_path: Path) -> None:
    service = start(restart=1, workers=2, engine={"fail": str(tmp_path / "fail")})
    service.wait_for(200)
    stream = Stream(service)
    (tmp_path / "fail").touch()
    assert "the device is lost" in stream.ended()["error"]["message"]
    service.wait_for(503, "ended with code 5")
    (tmp_path / "fail").unlink()
    service.wait_for(200)
    assert service.complete() == "abca"


@pytest.mark.slow
def test_a_second_signal_does_not_wait(start: Callable[..., Service]) -> None:
    """B33."""
    service = start()
    service.wait_for(200)
    stream = Stream(service)
    service.children("worker"), service.children("engine")
    service.process.send_signal(signal.SIGTERM)
    service.wait_for(503, "takes no more requests")
    service.process.send_signal(signal.SIGINT)
    assert service.ended() == 130
    assert stream.ended()["error"]["code"] == "unavailable"


@pytest.mark.slow
def test_a_stop_while_the_engine_loads_ends_all(start: Callable[..., Service], tmp_path: Path) -> None:
    service = start(engine={"load": str(tmp_path / "never")})
    service.wait_for(503)
    until(lambda: len(service.children("engine")) == 1)
    service.process.send_signal(signal.SIGINT)
    assert service.ended() == 130


def ask_to_replace(beside: Path, **fields: Any) -> None:
    """Have the process beside replace the engine."""
    aside = beside.with_name("aside")
    aside.write_text(json.dumps(fields))
    aside.rename(f"{beside}.ask")  # whole, whenever it is looked for


def replace(beside: Path, **fields: Any) -> Any:
    """`ask_to_replace`, and what it was told then."""
    ask_to_replace(beside, **fields)
    told = Path(f"{beside}.told")
    until(lambda: told.exists() and told.read_text() != "")
    return json.loads(told.read_text())


def test_an_engine_is_replaced_when_its_requests_have_ended(start: Callable[..., Service], tmp_path: Path) -> None:
    """It counts as no crash, and the name of the model is the new one's. Without the process beside the service goes on."""
    service = start(beside=str(tmp_path / "beside"), workers=2)
    service.wait_for(200)
    (engine,), (beside,) = service.children("engine"), service.children("beside")
    stream = Stream(service, max_tokens=400)
    assert replace(tmp_path / "beside", name="anew") == ["replaced", True]
    assert stream.ended()["choices"][0]["finish_reason"] == "length"
    service.wait_for(200)
    assert service.children("engine") != {engine}
    until(lambda: [httpx2.get(service.url + "/v1/models").json()["data"][0]["id"] for _ in range(8)] == ["anew"] * 8)
    os.kill(beside, signal.SIGKILL)
    until(lambda: "the service goes on without it" in service.log.read_text())
    assert service.complete() == "abca"
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 0


def test_an_engine_that_does_not_start_leaves_its_place_to_the_one_before(start: Callable[..., Service], tmp_path: Path) -> None:
    service = start(beside=str(tmp_path / "beside"))
    service.wait_for(200)
    assert replace(tmp_path / "beside", name="anew", broken=True) == ["replaced", False]
    service.wait_for(200)
    assert service.client.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert service.complete() == "abca"
    service.process.send_signal(signal.SIGTERM)
    assert service.ended() == 0


def test_a_stop_while_the_engine_is_being_replaced_is_the_first_one(start: Callable[..., Service], tmp_path: Path) -> None:
    """Requests that run are drained: the word to make room was not yet one to stop."""
    service = start(beside=str(tmp_path / "beside"))
    service.wait_for(200)
    stream = Stream(service, max_tokens=1000)
    ask_to_replace(tmp_path / "beside", name="anew")
    service.wait_for(503)
    service.process.send_signal(signal.SIGTERM)
    assert stream.ended()["choices"][0]["finish_reason"] == "length"
    assert service.ended() == 0
