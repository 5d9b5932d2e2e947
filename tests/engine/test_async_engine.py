"""`AsyncEngine`: one engine thread, many readers. The engine is real where pages matter, and a fake where only threads do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fakes_engine import FakeEngine
from fakes_text import plain_byte_tokenizer
from scripted_model import Scripted, paced

from llmjax.engine.async_engine import AsyncEngine
from llmjax.engine.config import EngineConfig
from llmjax.engine.outputs import RequestOutput
from llmjax.errors import EngineError, QueueFullError, RequestError, UnavailableError
from llmjax.sampling_params import SamplingParams

LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted(plain_byte_tokenizer())


@contextlib.asynccontextmanager
async def running(engine: Any, **options: Any) -> AsyncIterator[AsyncEngine]:
    """The async engine, and nothing left in the engine afterwards."""
    async with AsyncEngine(engine, **options) as one:
        yield one
    while engine.has_unfinished:
        engine.step()
    if not isinstance(engine, FakeEngine):
        engine.scheduler.check_integrity()
        assert engine.pool.num_used == 0


class HeldEngine(FakeEngine):
    """A fake whose steps wait for `go`; `steps` counts those begun."""

    def __init__(self, **options: Any) -> None:
        super().__init__(EngineConfig(max_context=4096, max_sequences=2), **options)
        self.go = threading.Event()
        self.go.set()
        self.steps = 0
        self.broken = False

    def step(self) -> list[RequestOutput]:
        self.steps += 1
        assert self.go.wait(60)
        if self.broken:
            raise ValueError("boom")
        time.sleep(0.0005)  # others get a turn
        return super().step()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def test_many_readers_get_what_the_engine_alone_gives(scripted: Scripted) -> None:
    texts = ["".join(random.choices("abcdef é漢", k=random.randint(1, 30))) for _ in range(9)]
    scripted.script([random.randrange(97, 123) for _ in range(20)] * 5)
    params = SamplingParams(max_tokens=17, temperature=0, logprobs=1, prompt_logprobs=1, n=2)
    expected = []
    for text in texts:
        output, _ = scripted.run(params, text)
        expected.append(output)

    async def one(engine: AsyncEngine, text: str) -> tuple[RequestOutput, list[str], list[list[int]]]:
        pieces, ids = ["", ""], [[], []]  # type: list[str], list[list[int]]
        async for output in engine.generate(text, params):
            for index, choice in enumerate(output.outputs):
                pieces[index] += output.new_text[index]
                ids[index] += output.new_token_ids[index]
                assert choice.text == pieces[index]
                assert choice.token_ids == ids[index]
                assert choice.logprobs is not None
                assert [p.chosen.token_id for p in choice.logprobs] == ids[index]
            await asyncio.sleep(random.choice([0, 0, 0.005]))
        return output, pieces, ids

    async def main() -> None:
        async with running(scripted.engine) as engine:
            found = await asyncio.gather(*(one(engine, text) for text in texts))
        for (output, _, _), want in zip(found, expected, strict=True):
            assert output.finished
            assert output.prompt == want.prompt
            assert output.prompt_token_ids == want.prompt_token_ids
            assert output.prompt_logprobs is not None
            assert want.prompt_logprobs is not None
            scores = zip(output.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True)
            assert all(a is not None and b is not None and a.chosen.token_id == b.chosen.token_id for a, b in scores)
            for choice, wanted in zip(output.outputs, want.outputs, strict=True):
                assert (choice.text, choice.token_ids) == (wanted.text, wanted.token_ids)
                assert choice.finish_reason == wanted.finish_reason

    run(main)


def test_a_reader_that_sleeps_finds_everything_in_one_output() -> None:
    async def main() -> None:
        async with running(HeldEngine()) as engine:
            stream = await engine.submit("abc", SamplingParams(max_tokens=50))
            await until(lambda: not engine._streams)
            await engine.call(lambda: None)  # what was posted before has come
            outputs = [output async for output in stream]
            assert len(outputs) == 1, "what nobody has read is one part"
            assert outputs[0].new_token_ids == [outputs[0].outputs[0].token_ids]
            assert outputs[0].outputs[0].text == ("abc" * 20)[:50]
            assert engine.num_open == 0

    run(main)


@pytest.mark.parametrize("how", ["cancel", "break", "abort"])
def test_a_reader_that_goes_frees_queue_rows_and_pages(scripted: Scripted, how: str) -> None:
    """Of four rows all are taken and three requests wait: those that are given up leave at once, whatever they were doing."""
    scripted.script([98] * 120)
    engine = scripted.engine

    async def read(server: AsyncEngine, request_id: str, first: asyncio.Event) -> RequestOutput:
        generator = server.generate("a", LONG, request_id=request_id)
        outputs = []
        async for output in generator:
            outputs.append(output)
            first.set()
            if how == "break" and request_id != "kept":
                break
        await generator.aclose()  # type: ignore[attr-defined]
        return outputs[-1]

    async def main() -> None:
        async with running(engine) as server:
            with paced(engine) as at_full_speed:
                await act(server, at_full_speed)

    async def act(server: AsyncEngine, at_full_speed: threading.Event) -> None:
        events = {name: asyncio.Event() for name in ("kept", *map(str, range(6)))}
        tasks = {name: asyncio.create_task(read(server, name, event)) for name, event in events.items()}
        await asyncio.wait_for(events["0"].wait(), 60)
        for name, task in tasks.items():
            if name == "kept":
                continue
            if how == "cancel":
                task.cancel()
            elif how == "abort":
                server.abort(name)
        await until(lambda: server.num_open <= 1)
        at_full_speed.set()
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        kept = results[0]
        assert isinstance(kept, RequestOutput)
        assert kept.outputs[0].text == "b" * 100, "a neighbour is not touched"
        if how == "cancel":
            assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 6
        if how == "abort":
            reasons = [result.outputs[0].finish_reason for result in results if isinstance(result, RequestOutput)]
            assert reasons == ["length"] + ["abort"] * 6
        assert server.num_open == 0

    run(main)


def test_a_request_given_up_before_the_engine_saw_it_is_never_added() -> None:
    async def main() -> None:
        fake = HeldEngine()
        async with running(fake) as engine:
            fake.go.clear()
            first = await engine.submit("a", LONG)
            await until(lambda: fake.steps > 0)
            late = asyncio.create_task(engine.submit("b", LONG))
            await until(lambda: engine.num_open == 2)
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            fake.go.set()
            first.close()
            await engine.call(lambda: None)
            assert fake.added == 1

    run(main)


def test_what_is_wrong_is_told_before_the_first_output_and_harms_nobody() -> None:
    async def main() -> None:
        async with running(HeldEngine()) as engine:
            neighbour = await engine.submit("ok", SamplingParams(max_tokens=30))
            for prompt in ("", [999], "x" * 5000):
                with pytest.raises(RequestError) as caught:
                    await engine.submit(prompt, LONG)
                assert caught.value.param == "prompt"
            with pytest.raises(TypeError):
                await engine.submit(object(), LONG)  # type: ignore[arg-type]  # the fake's own fault, as a bug of ours would be
            outputs = [output async for output in neighbour]
            assert outputs[-1].outputs[0].text == "ok" * 15

    run(main)


def test_a_full_queue_refuses_and_choices_count() -> None:
    async def main() -> None:
        fake = HeldEngine()
        async with running(fake, max_waiting=3) as engine:
            fake.go.clear()
            held = [await engine.submit("a", LONG)]
            await until(lambda: fake.steps > 0)
            pending = [asyncio.create_task(engine.submit("a", SamplingParams(n=n, max_tokens=5))) for n in (3, 2, 1)]
            fake.go.set()
            results = await asyncio.gather(*pending, return_exceptions=True)
            kinds = [type(result).__name__ for result in results]
            assert kinds == ["RequestStream", "QueueFullError", "RequestStream"], "two rows and three places: 1 + 3 + 1"
            assert isinstance(results[1], QueueFullError)
            assert 1 <= engine.retry_after() <= 60
            for stream in held + [one for one in results if not isinstance(one, BaseException)]:
                stream.close()
            again = [output async for output in engine.generate("a", SamplingParams(n=5, max_tokens=2))]
            assert again[-1].finished, "places come back"

    run(main)


def test_the_engines_death_ends_every_stream_and_shows() -> None:
    async def main() -> None:
        fake = HeldEngine()
        async with AsyncEngine(fake) as engine:
            streams = [await engine.submit("a", LONG) for _ in range(3)]
            assert engine.health.ready
            fake.broken = True
            for stream in streams:
                with pytest.raises(EngineError, match="ValueError: boom"):
                    async for _ in stream:
                        pass
            assert engine.health.state == "dead"
            assert "boom" in engine.health.reason
            with pytest.raises(EngineError):
                await engine.submit("a", LONG)
            with pytest.raises(EngineError):
                await engine.call(lambda: None)

    run(main)


def test_a_stuck_step_ends_streams_in_time_and_passes() -> None:
    async def main() -> None:
        fake = HeldEngine()
        async with running(fake, watchdog=0.5) as engine:
            fake.go.clear()
            stream = await engine.submit("a", LONG)
            with pytest.raises(EngineError, match="stuck"):
                async for _ in stream:
                    pass
            assert engine.health.state == "stuck"
            with pytest.raises(UnavailableError):
                await engine.submit("a", LONG)
            fake.go.set()
            await until(lambda: engine.health.ready)
            assert [output async for output in engine.generate("a", SamplingParams(max_tokens=3))][-1].outputs[0].text == "aaa"
            assert not fake.has_unfinished, "the request that was ended does not run on"

    run(main)


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async def main() -> None:
        fake = HeldEngine()
        fake.go.clear()
        async with AsyncEngine(fake) as engine:
            reader = asyncio.create_task(_last(engine.generate("ab", SamplingParams(max_tokens=40))))
            await until(lambda: engine.num_open == 1)
            engine.close_doors()
            assert engine.health.state == "draining"
            with pytest.raises(UnavailableError, match="later"):
                await engine.submit("a", LONG)
            fake.go.set()
            assert await engine.drain(10)
            assert (await reader).outputs[0].text == "ab" * 20
        assert engine.health.state == "stopped"

    run(main)


def test_the_end_of_draining_is_an_error_for_what_still_runs() -> None:
    async def main() -> None:
        fake = HeldEngine()
        async with running(fake) as engine:
            stream = await engine.submit("a", SamplingParams(max_tokens=4000))
            assert not await engine.drain(0.05)
            with pytest.raises(UnavailableError, match="shutting down"):
                async for _ in stream:
                    pass

    run(main)


def test_calls_run_between_steps_and_tell_their_errors() -> None:
    async def main() -> None:
        async with running(HeldEngine()) as engine:
            assert await engine.call(threading.get_ident) != threading.get_ident()
            with pytest.raises(KeyError):
                await engine.call(lambda: {}["no"])
            assert await engine.call(lambda: 3) == 3

    run(main)


def test_a_loop_that_was_closed_does_not_keep_its_requests() -> None:
    """A program that ends without closing its streams: the next one's engine must not compute for nobody."""
    fake = HeldEngine()
    engine = AsyncEngine(fake)

    async def leave() -> None:
        await engine.submit("a", SamplingParams(max_tokens=4000))

    asyncio.run(leave())
    deadline = time.monotonic() + 10
    while fake.has_unfinished and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not fake.has_unfinished
    engine.stop()


async def _last(generator: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in generator]
    return outputs[-1]


def test_an_id_in_use_is_refused_until_its_last_output_is_out() -> None:
    """Also when it was aborted a moment ago: the old request's end must not reach the new one's reader."""

    async def main() -> None:
        fake = HeldEngine()
        async with running(fake) as engine:
            fake.go.clear()
            first = await engine.submit("a", LONG, request_id="x")
            await until(lambda: fake.steps > 0)  # held there: what is asked from here on waits in its queue
            engine.abort("x")
            again = asyncio.create_task(engine.submit("b", LONG, request_id="x"))
            await until(lambda: engine.num_open == 2)
            fake.go.set()
            with pytest.raises(RequestError, match="in use"):
                await again
            assert [output async for output in first][-1].outputs[0].finish_reason == "abort"
            await until(lambda: not fake.has_unfinished)
            last = [output async for output in engine.generate("b", SamplingParams(max_tokens=3), request_id="x")][-1]
            assert last.outputs[0].text == "bbb"

    run(main)


def test_a_stopped_engine_is_left_without_requests() -> None:
    async def main() -> None:
        fake = HeldEngine()
        async with AsyncEngine(fake) as engine:
            await engine.submit("a", LONG)
        assert not fake.has_unfinished

    run(main)
