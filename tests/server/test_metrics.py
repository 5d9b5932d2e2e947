"""/metrics as Prometheus reads it: every end of a request in every series, also of clients that leave and of a full queue."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from scripted_model import Scripted, paced
from served import Exchange, Served, run

BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "stream": True}
OF_REQUESTS = (
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens", "request_chunks", "request_steps",
)  # fmt: skip


def read(text: str) -> dict[str, float]:
    """Sums over everything but a finish reason, by name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name + ("/" + sample.labels["finished_reason"] if "finished_reason" in sample.labels else "")
            found[name] = found.get(name, 0.0) + sample.value
    return found


def test_b31_clients_that_leave_are_in_every_series(served: Served, scripted: Scripted) -> None:
    async def main() -> None:
        before = read((await served.request("GET", "/metrics")).text)
        with paced(scripted.engine, 0.25):
            clients = [Exchange(served.app, "/v1/completions", BODY) for _ in range(4)]  # as many as rows
            async with asyncio.timeout(60):
                while not all(client.data for client in clients):
                    await asyncio.sleep(0.002)
            for client in clients:
                client.leave()
            await asyncio.gather(*(client.task for client in clients))
        await served.request("POST", "/v1/completions", {**BODY, "stream": False, "max_tokens": 7})
        async with asyncio.timeout(60):
            while True:
                after = read((await served.request("GET", "/metrics")).text)
                grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
                if sum(value for name, value in grown.items() if name.startswith("llmjax:request_success")) == 5:
                    break
                await asyncio.sleep(0.01)
        assert grown["llmjax:request_success_total/abort"] == 4
        assert grown["llmjax:request_success_total/length"] == 1
        for name in OF_REQUESTS:
            assert grown[f"llmjax:{name}_count"] == 5, name
        assert grown["llmjax:time_to_first_token_seconds_count"] == 5
        assert grown["llmjax:request_prompt_tokens_sum"] == grown["llmjax:prompt_tokens_total"] == 5 * 3
        assert grown["llmjax:generation_tokens_total"] >= grown["llmjax:request_generation_tokens_sum"] >= 4 + 7
        assert after["llmjax:num_requests_running"] == after["llmjax:num_requests_waiting"] == after["llmjax:open_requests"] == 0
        assert after["llmjax:kv_cache_usage_perc"] == 0
        assert after["llmjax:compiles_after_ready_total"] == 0

    run(main())


def test_b71_a_full_queue_is_counted_and_bytes_are(scripted: Scripted) -> None:
    served = Served(scripted.engine, max_waiting=1)

    async def main() -> None:
        before = read((await served.request("GET", "/metrics")).text)
        body = {**BODY, "stream": False}
        with paced(scripted.engine) as full_speed:
            work = [asyncio.ensure_future(served.request("POST", "/v1/completions", body)) for _ in range(12)]
            refused = 0
            for done in asyncio.as_completed(work):
                refused += (await done).status_code == 429
                if refused == 7:
                    full_speed.set()
        after = read((await served.request("GET", "/metrics")).text)
        assert refused == 7
        assert after["llmjax:queue_full_total"] - before["llmjax:queue_full_total"] == 7
        assert after["http_request_size_bytes_count"] >= 12
        assert after["http_request_size_bytes_sum"] >= 12 * len('{"prompt": "abc"}')
        assert after["http_response_size_bytes_sum"] > before.get("http_response_size_bytes_sum", 0)

    run(main())
    served.stop()
