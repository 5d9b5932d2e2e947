"""What handing a step's outputs to an HTTP process costs the engine's process, without a model: microseconds a step.

    python -m bench.serve_ipc --streams 256 --json out.json

Every stream has one new token a step. `engine thread` is what the loop of the engine does (cut the news out, post them), the
only part that holds up the next launch; `clients thread` packs, pickles and writes one message; `worker` reads it and puts it
into its streams. Of each thread's own time, median and 99th percentile. The reader is in this process, so that all three
share one interpreter lock, which is worse than in service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from llmjax.engine import engine_socket
from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.engine_messages import frame
from llmjax.engine.engine_socket import EngineSocket
from llmjax.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput, TokenLogprob
from llmjax.engine.remote_engine import RemoteEngine
from llmjax.sampling_params import SamplingParams
from llmjax.telemetry.metrics import EngineMetrics

PAUSE = 0.02  # seconds of a step: the device's time


class OneTokenAStep:
    """An engine whose every request gets a token at each step, for so many steps."""

    def __init__(self, streams: int, steps: int) -> None:
        self.config = SimpleNamespace(max_context=8192, max_sequences=streams)
        self.tokenizer = None
        self.metrics = EngineMetrics(["all"])
        self._requests: dict[str, RequestOutput] = {}
        self._streams, self._left = streams, steps

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to step."""
        return bool(self._requests)

    def add_request(self, prompt: list[int], params: SamplingParams, *, request_id: str, arrival_ns: int) -> None:
        """A request like all others."""
        logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self._requests[request_id] = RequestOutput(request_id, None, prompt, [CompletionOutput(0, logprobs=logprobs)])

    def abort(self, request_id: str) -> None:
        """Forget it."""
        self._requests.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """A token for each, once all are there."""
        time.sleep(PAUSE)
        if len(self._requests) < self._streams:
            return []
        self._left -= 1
        outputs = list(self._requests.values())
        for output in outputs:
            (choice,) = output.outputs
            choice.token_ids.append(12345)
            choice.text += " token"
            if choice.logprobs is not None:
                one = TokenLogprob(12345, -1.5, 1, " token", b" token")
                choice.logprobs.append(PositionLogprobs(one, (one,) * 5))
            output.new_text, output.new_token_ids = [" token"], [[12345]]
            output.finished = self._left == 0
        if self._left == 0:
            self._requests.clear()
        return outputs


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`function`, adding the calling thread's own time."""

    def call(*args: Any, **options: Any) -> Any:
        began = time.thread_time()
        result = function(*args, **options)
        spent.append(time.thread_time() - began)
        return result

    return call


def measure(streams: int, steps: int, logprobs: int | None) -> dict[str, list[float]]:
    """Seconds of each thread at each step."""
    spent: dict[str, list[float]] = {"engine thread": [], "clients thread": [], "worker": []}
    engine = AsyncEngine(OneTokenAStep(streams, steps))  # type: ignore[arg-type]
    engine._hand_out = timed(engine._hand_out, spent["engine thread"])  # type: ignore[method-assign]
    clients = EngineSocket(engine, "bench")
    clients.start()
    news, take = engine_socket._Client._news, RemoteEngine._take

    def packed(client: Any) -> Any:
        began = time.thread_time()
        message = news(client)
        data = frame(message)
        if len(message.parts) == streams:
            spent["clients thread"].append(time.thread_time() - began)
            sizes.append(len(data))
        return message

    def taken(remote: RemoteEngine, message: Any) -> None:
        began = time.thread_time()
        take(remote, message)
        if len(message.parts) == streams:
            spent["worker"].append(time.thread_time() - began)

    sizes: list[int] = []
    engine_socket._Client._news = packed  # type: ignore[method-assign]
    RemoteEngine._take = taken  # type: ignore[method-assign]
    try:
        reader = threading.Thread(target=asyncio.run, args=(_read_all(clients, streams, logprobs),))
        reader.start()
        while engine.num_open or len(spent["engine thread"]) < steps:
            time.sleep(0.05)
        reader.join()
    finally:
        engine_socket._Client._news, RemoteEngine._take = news, take  # type: ignore[method-assign]
        clients.close(5)
        engine.stop()
    spent["engine thread"] = spent["engine thread"][-steps:]
    spent["bytes"] = [float(size) for size in sizes]
    return spent


async def _read_all(clients: EngineSocket, streams: int, logprobs: int | None) -> None:
    ours, theirs = socket.socketpair()
    hello = asyncio.Event()
    remote = RemoteEngine(hello.set)
    connection = asyncio.create_task(remote.connect(ours))
    await asyncio.to_thread(clients.add, theirs)
    await hello.wait()
    params = SamplingParams(max_tokens=8000, logprobs=logprobs)

    async def read() -> None:
        async with await remote.submit([1] * 100, params) as stream:
            async for _ in stream:
                pass

    await asyncio.gather(*(read() for _ in range(streams)))
    connection.cancel()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", default=None)
    args = parser.parse_args()
    rows = []
    for logprobs in (None, 5):
        spent = measure(args.streams, args.steps, logprobs)
        size = statistics.mean(spent.pop("bytes"))
        for part, seconds in spent.items():
            ordered = sorted(seconds)
            median, p99 = (1e6 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
            rows.append({"streams": args.streams, "logprobs": logprobs, "part": part, "median_us": median, "p99_us": p99})
            print(f"{args.streams} streams, logprobs {logprobs}: {part:15} median {median:6.0f} us, p99 {p99:6.0f} us a step")
        print(f"{args.streams} streams, logprobs {logprobs}: {size:.0f} bytes a message")
    if args.json is not None:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
