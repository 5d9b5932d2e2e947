"""What one event of a stream costs on the HTTP side: CPU of the event loop's thread, sockets left out.

    python -m bench.http_cost --streams 256 --tokens 200
    python -m bench.http_cost --profile                       # where it goes

An engine without a model gives every stream a token a step, and takes the next step when all events of the last one are out, so
that nothing is merged. The real `AsyncEngine`, app and uvicorn protocol run over connections that swallow what they are given:
what a kernel needs for a send differs by machine and comes on top. `us_an_event` is of the median step, `us_quiet` of the fifth
percentile: a machine that others use shows there what it can.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import uvicorn
from uvicorn.server import ServerState

from bench.rows import Rows
from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import CompletionOutput, RequestOutput
from llmjax.sampling_params import SamplingParams
from llmjax.server.app import create_app
from llmjax.server.config import ServerConfig

COLUMNS = ("case", "streams", "events", "us_an_event", "us_quiet")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": [1, 2, 3]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "chat, usage an event": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
}


class Written:
    """Counts events that were written, and wakes the engine's thread when all of a step are."""

    def __init__(self) -> None:
        self._missing = 0
        self._all = threading.Event()
        self._all.set()
        self.marks: list[float] = []  # CPU seconds of the loop's thread at the end of each step

    def expect(self, count: int) -> None:
        """Returns when the events of the step before are written; the next has `count`."""
        assert self._all.wait(60), "events were merged or lost"
        self._all.clear()
        self._missing = count

    def one(self) -> None:
        """An event was written."""
        self._missing -= 1
        if self._missing == 0:
            self.marks.append(time.thread_time())
            self._all.set()


class WordEngine:
    """`Engine`, as far as `AsyncEngine` goes: " word" for everybody, once all events of the last step were written."""

    tokenizer: Any

    def __init__(self, written: Written) -> None:
        self.config = EngineConfig(max_context=2**20, max_sequences=2**12)
        self.tokenizer = self
        self._written = written
        self._live: dict[str, tuple[RequestOutput, int]] = {}
        self._gathering = 0

    def render_chat(self, messages: Sequence[Any], **options: Any) -> str:
        """Any text."""
        return "hi"

    def encode(self, text: str, **options: Any) -> list[int]:
        """Any ids."""
        return [1, 2, 3]

    def gather(self, count: int) -> None:
        """Steps begin when so many requests are there."""
        self._gathering = count

    @property
    def is_gathering(self) -> bool:
        """Whether no step has begun yet."""
        return self._gathering > 0

    @property
    def has_unfinished(self) -> bool:
        """Whether requests are there; not before all are."""
        return len(self._live) >= self._gathering > 0 or (self._gathering == 0 and bool(self._live))

    def add_request(self, prompt: Sequence[int], params: SamplingParams, *, request_id: str, **options: Any) -> str:
        """See `Engine`."""
        assert params.max_tokens is not None
        self._live[request_id] = RequestOutput(request_id, None, list(prompt), [CompletionOutput(0)]), params.max_tokens
        return request_id

    def abort(self, request_id: str) -> None:
        """See `Engine`."""
        self._live.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """See `Engine`."""
        self._gathering = 0
        self._written.expect(len(self._live))
        return [self._advance(*live) for live in list(self._live.values())]

    def _advance(self, output: RequestOutput, limit: int) -> RequestOutput:
        (choice,) = output.outputs
        choice.token_ids.append(7)
        choice.text += " word"
        output.new_text, output.new_token_ids = [" word"], [[7]]
        if len(choice.token_ids) == limit:
            choice.finish_reason, output.finished = "length", True
            del self._live[output.request_id]
        return output


class Swallow(asyncio.Transport):
    """A connection that is always ready; tells of every event and of its end."""

    def __init__(self, written: Written, ended: asyncio.Event) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._written, self._ended = written, ended

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio."""
        if b'"delta":{"content":"' in data or b'"text":"' in data:
            self._written.one()
        if b"[DONE]" in data:
            self._ended.set()

    def is_closing(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Nothing to close."""

    def pause_reading(self) -> None:
        """Nothing to read."""

    def resume_reading(self) -> None:
        """Nothing to read."""


async def _streams(engine: AsyncEngine, words: WordEngine, written: Written, case: str, count: int, tokens: int) -> None:
    """Returns when `count` streams of `tokens` events have run."""
    app = create_app(engine, ServerConfig(served_names=("m",)))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
    config.load()
    state = ServerState()
    path, body = CASES[case]
    data = json.dumps({"model": "m", "max_tokens": tokens, "ignore_eos": True, "stream": True} | body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    ends = [asyncio.Event() for _ in range(count)]
    words.gather(count)
    protocols = [config.http_protocol_class(config=config, server_state=state, app_state={}) for _ in ends]  # type: ignore[call-arg]
    for protocol, end in zip(protocols, ends, strict=True):
        protocol.connection_made(Swallow(written, end))
        protocol.data_received(head + data)
    async with asyncio.timeout(60):
        while words.is_gathering:
            await asyncio.sleep(0.001)
    for end in ends:
        await end.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--profile", action="store_true", help="print where the time of the loop's thread goes, and no figures")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    rows = Rows(args.json)
    for case in CASES:
        written = Written()
        words = WordEngine(written)
        engine = AsyncEngine(words)  # type: ignore[arg-type]
        profile = cProfile.Profile()
        with asyncio.Runner(loop_factory=uvicorn.Config(None).get_loop_factory()) as runner:  # type: ignore[arg-type]
            if args.profile:
                profile.enable()
            runner.run(_streams(engine, words, written, case, args.streams, args.tokens))
            profile.disable()
            engine.stop()
        if args.profile:
            print(case)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
            continue
        seconds = np.diff(written.marks)
        median, best = (np.percentile(seconds, (50, 5)) / args.streams * 1e6).tolist()
        rows.add(case=case, streams=args.streams, events=args.streams * len(seconds), us_an_event=median, us_quiet=best)
    rows.close(COLUMNS)


if __name__ == "__main__":
    main()
