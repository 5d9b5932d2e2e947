"""What the scheduler costs the host each step, without a model: `schedule` and `update` of one launch, in microseconds of
the thread's own time.

    python -m bench.scheduler_cost --rows 256 --json out.json

Every row is taken and more requests wait, as under load; results come one launch late. `churn` has rows that end and requests
that come in at nearly every launch, `decode` only rows that go on. Mean and 99th percentile over the launches after the prompts,
of the run with the lowest mean of `--repeat`, because a processor that is shared has more than one speed. A launch of `--steps`
decode steps costs more than one of a single step, and each of its steps less. Python's garbage collector runs, but not over what
was there before the launches, as in the engine of a service.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from bench.rows import Rows
from llmjax.engine.config import EngineConfig
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.lane_config import FIFO, LaneConfig
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request, ScheduledBatch, StepOutput
from llmjax.scheduling.results import RequestUpdate
from llmjax.scheduling.scheduler import Scheduler

STOP = 7  # the token id that ends an output
LANES = (LaneConfig(name="short", max_tokens=640, weight=3), LaneConfig(name="long"))


class Loop:
    """The engine's loop over a device that answers at once: every row samples ones, and `STOP` with probability `stop_share`.

    Args:
        seed: of what the device draws.
    """

    def __init__(self, config: EngineConfig, num_pages: int, *, stop_share: float = 0.0, seed: int = 0) -> None:
        self.config = config
        self.pool = PagePool(num_pages, config.page_size)
        self.scheduler = Scheduler(config, self.pool)
        self.seconds: list[float] = []  # of `schedule` and `update` together, a launch
        self.now = 0.0  # moved by the caller
        self.launches = 0
        self._pending: deque[ScheduledBatch] = deque()
        self._stop_share = stop_share
        self._random = np.random.default_rng(seed)
        self._made = 0

    def add(self, prompt: int, limit: int, **options: int) -> Request:
        """Queue a request of `prompt` tokens."""
        self._made += 1
        params = SamplingParams(max_tokens=limit, stop_token_ids=[STOP])
        request = Request(str(self._made), [1] * prompt, params, seed=0, limit=limit, arrival_time=self.now, **options)
        self.scheduler.add(request)
        return request

    def step(self) -> list[RequestUpdate]:
        """Launch, and read the launch before. Empty when there was nothing to read."""
        started = time.thread_time()
        batch = self.scheduler.schedule(self.now)
        seconds = time.thread_time() - started
        updates: list[RequestUpdate] = []
        if batch is not None:
            self._pending.append(batch)
            self.launches += 1
        if self._pending and (batch is None or len(self._pending) > 1):
            output = self._result(self._pending.popleft())
            started = time.thread_time()
            updates = self.scheduler.update(output)
            seconds += time.thread_time() - started
        self.seconds.append(seconds)
        return updates

    def drain(self) -> Iterator[RequestUpdate]:
        """Step until nothing is left."""
        while self.scheduler.has_unfinished or self._pending:
            yield from self.step()

    def _result(self, batch: ScheduledBatch) -> StepOutput:
        shape = (batch.num_steps, len(batch.rows))
        tokens = np.ones(shape, np.int32)
        stops = self._random.random(shape[1]) < self._stop_share
        for column, row in enumerate(batch.rows):
            if row.samples < batch.num_steps:
                tokens[row.samples :, column] = -1
            if stops[column] and row.samples:
                tokens[0, column] = STOP
                tokens[1:, column] = -1
        zeros = np.zeros(shape, np.float32)
        return StepOutput(batch, tokens, zeros, zeros.astype(np.int32), np.ones(shape, bool))


def measure(rows: int, lanes: tuple[LaneConfig, ...], *, churn: bool, launches: int, steps: int = 1) -> list[float]:
    """Seconds of each launch with `rows` rows running and twice as many requests waiting."""
    config = EngineConfig(max_sequences=rows, max_tokens_per_step=2048, decode_steps=steps, lanes=lanes).resolved(
        gpu=True, model_max_context=8192
    )
    loop = Loop(config, num_pages=rows * 100)
    draw = random.Random(0)
    limits = (64, 512) if churn else (4 * launches * steps, 5 * launches * steps)
    for _ in range(3 * rows):
        loop.add(draw.choice((40, 200)), draw.randint(*limits))
    while loop.scheduler.num_running < rows:
        loop.step()
    for _ in range(rows // 8):  # prompts that have begun
        loop.step()
    gc.collect()
    gc.freeze()
    loop.seconds.clear()
    while len(loop.seconds) < launches:
        loop.step()
        while loop.scheduler.num_waiting < 2 * rows:
            loop.add(draw.choice((40, 200)), draw.randint(*limits))
    gc.unfreeze()
    return loop.seconds


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--launches", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1, help="decode steps of a launch, where several may be made")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    table = Rows(args.json)
    for rows in args.rows:
        for order, lanes in (("fifo", FIFO), ("lanes", LANES)):
            for churn in (False, True):
                runs = (measure(rows, lanes, churn=churn, launches=args.launches, steps=args.steps) for _ in range(args.repeat))
                seconds = 1e6 * np.array(min(runs, key=np.mean))
                table.add(
                    rows=rows, order=order, steps=args.steps, load="churn" if churn else "decode", mean_us=float(seconds.mean()),
                    p99_us=float(np.percentile(seconds, 99)),
                )  # fmt: skip
    table.close(("rows", "order", "load", "mean_us", "p99_us"))


if __name__ == "__main__":
    main()
