"""The dashboard in a real browser: numbers that move, a phone's width, the dark, keys, a server that goes and comes back."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fakes_text import plain_byte_tokenizer
from scripted_model import Scripted, paced
from served import TEMPLATE

from llmjax.engine.async_engine import AsyncEngine
from llmjax.scheduling.lane_config import LaneConfig
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig
from llmjax.server.http_server import HttpServer

pytestmark = pytest.mark.browser
LANES = (LaneConfig(name="short", max_tokens=48, weight=3), LaneConfig(name="long"))
PATIENCE = 60.0


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    tokenizer = plain_byte_tokenizer(chat_templates={"default": TEMPLATE})
    return Scripted(tokenizer, kv_cache_bytes=64 * 1024, lanes=LANES, max_wait=5.0)


@pytest.fixture
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or chromium is None:
        pytest.skip("chromium and chromedriver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    one = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    one.set_page_load_timeout(PATIENCE)
    yield one
    one.quit()


def serve(scripted: Scripted, port: int = 0, **options: Any) -> HttpServer:
    engine = AsyncEngine(scripted.engine, model_name="tiny")
    server = HttpServer(
        create_app(engine, ServerConfig(**{"served_names": ("tiny",)} | options)), engine, host="127.0.0.1", port=port, drain=0.0
    )
    server.start()
    return server


@pytest.fixture
def server(scripted: Scripted) -> Iterator[HttpServer]:
    with paced(scripted.engine, 0.02):
        one = serve(scripted)
        yield one
        one.close()


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, url: str, clients: int = 8) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _ask(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=PATIENCE) as client:
            while not self._stop.is_set():
                prompt = "one beginning of many, " * random.randrange(3) + str(random.random())
                body = {"prompt": prompt, "max_tokens": random.randrange(8, 40), "ignore_eos": True}
                client.post("/v1/completions", json=body)


def until(browser: Any, script: str) -> Any:
    """The value of an expression in the page, once it is true."""
    wait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
    return wait(browser, PATIENCE, poll_frequency=0.2).until(lambda one: one.execute_script(f"return {script}"))


def number(name: str) -> str:
    return f"parseFloat(document.getElementById('{name}').textContent.replace('\u202f', ''))"


def console(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_numbers_move_while_requests_run(browser: Any, server: HttpServer) -> None:
    browser.get(f"{server.url}/dashboard")
    until(browser, "document.body.className == 'good'")
    assert until(browser, "document.getElementById('running').textContent") == "0"
    httpx2.post(f"{server.url}/v1/completions", json={"prompt": "very secret", "temperature": "hot"})
    with Load(server.url):
        for name in ("output-rate", "prompt-rate", "running", "waiting", "used", "first-p95", "between-p95", "hits"):
            until(browser, f"{number(name)} > 0")
        first = until(browser, number("output-rate"))
        until(browser, f"{number('output-rate')} != {first}")
        until(browser, "document.querySelectorAll('#largest td.id').length > 0")
        until(browser, "document.querySelector('#chart-rate path').getAttribute('d').split('L').length > 3")
        until(browser, "document.querySelectorAll('#bars-output rect').length > 0")
    lanes = until(browser, "document.getElementById('lanes').textContent")
    assert "short" in lanes
    assert "long" in lanes
    errors = until(browser, "document.getElementById('errors').textContent")
    assert "temperature" in errors
    assert "secret" not in errors
    until(browser, f"{number('running')} === 0")
    assert until(browser, "performance.getEntriesByType('resource').map(e => new URL(e.name).origin)").count(server.url) >= 3
    assert all(
        name.startswith(server.url) for name in until(browser, "performance.getEntriesByType('resource').map(e => e.name)")
    )
    assert console(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(browser: Any, server: HttpServer, scheme: str) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(f"{server.url}/dashboard")
    with Load(server.url, 4):
        until(browser, f"{number('output-rate')} > 0")
        until(browser, "document.querySelectorAll('#largest td.id').length > 0")
        assert browser.execute_script("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in back[4:-1].split(",")) > 384) == (scheme == "light")
    assert console(browser) == []


def test_the_key_is_asked_for_and_stays_in_the_tab(browser: Any, scripted: Scripted) -> None:
    server = serve(scripted, api_keys=("the-key",))
    try:
        browser.get(f"{server.url}/dashboard")
        until(browser, "!document.getElementById('login').hidden")
        for key, shown in (
            ("wrong", "document.getElementById('login-error').textContent"),
            ("the-key", "document.body.className == 'good'"),
        ):
            browser.find_element("id", "key").send_keys(key + "\n")
            until(browser, shown)
        assert browser.execute_script("return [document.getElementById('login').hidden, localStorage.length]") == [True, 0]
        assert "the-key" not in browser.current_url
        assert browser.get_cookies() == []
        browser.refresh()
        until(browser, "document.body.className == 'good'")
    finally:
        server.close()


def test_a_server_that_goes_is_told_and_one_that_comes_back_is_found(browser: Any, scripted: Scripted) -> None:
    server = serve(scripted)
    browser.get(f"{server.url}/dashboard")
    until(browser, "document.body.className == 'good'")
    server.close()
    until(browser, "document.getElementById('state-text').textContent.includes('no connection')")
    again = serve(scripted, int(server.url.rsplit(":", 1)[1]))
    try:
        until(browser, "document.body.className == 'good'")
    finally:
        again.close()
