"""A device, a model and a naive oracle in plain Python, to test the scheduler without JAX.

`FakeDevice` is written from the contract in `request.py` alone. It keeps, for every slot of the cache, what keys and values
depend on (the tokens up to there, the salt, the weights), and checks what it *reads* there before it computes a next token: a
page reused too early, filled wrongly or found by mistake fails the test. NaN is followed too: no page with it is handed out.

With speculation it takes as many drafts as chance has it, and leaves rejected ones in the slots behind; what a draft model's
cache holds is kept likewise, and a row that drafts must have all of its tokens there.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from llmjax.engine.config import EngineConfig
from llmjax.sampling_params import SamplingParams
from llmjax.scheduling.lane_config import FIFO, LaneConfig
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request, RequestState, ScheduledBatch, ScheduledRow, StepOutput
from llmjax.scheduling.scheduler import Scheduler
from llmjax.scheduling.speculation import Drafting, LaunchSeconds, Speculation
from llmjax.scheduling.speculation_config import SpeculationConfig

VOCAB = 11
NAN_ID = VOCAB  # a prompt token whose keys and values are NaN, and so are all after it
NAN = 0  # what a slot holds then
REJECTED = -1  # what it holds of a draft that was not taken
Tenant = tuple[str, int]  # request id and epoch: who lives in a device row


def next_token(seed: int, history: Sequence[int], num_output: int, banned: Sequence[int]) -> int | None:
    """The fake model: a hash of everything so far; `banned` ids are passed over. None stands for non-finite logits."""
    if seed % 7 == 3 and num_output == seed // 7 % 5:
        return None
    token = zlib.crc32(np.asarray([seed, *history], np.int64).tobytes()) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def solo(request: Request, limit: int) -> tuple[list[int], str]:
    """What the request must give, computed alone and naively: its tokens and finish reason."""
    tokens: list[int] = []
    if NAN_ID in request.prompt_ids:
        return [], "error"
    stops = (*request.eos_ids, *request.params.stop_ids)
    while len(tokens) < limit:
        early = len(tokens) < request.params.min_tokens
        token = next_token(request.seed, [*request.prompt_ids, *tokens], len(tokens), stops if early else ())
        if token is None:
            return tokens, "error"
        tokens.append(token)
        if token in stops:
            return tokens, "stop"
    return tokens, "length"


def make_request(
    request_id: str,
    prompt: int | list[int] = 5,
    limit: int = 8,
    *,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    eos_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    prompt_logprobs: int | None = None,
    salt: str | None = None,
) -> Request:
    """A request; `prompt` is its ids, or how many to make up."""
    ids = [(seed + 3 * i) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(
        max_tokens=None if limit == 0 else limit,
        min_tokens=min(min_tokens, limit),
        stop_token_ids=list(stop_ids),
        prompt_logprobs=0 if limit == 0 else prompt_logprobs,
        cache_salt=salt,
    )
    return Request(request_id=request_id, prompt_ids=ids, params=params, seed=seed, limit=limit, eos_ids=eos_ids)


@dataclasses.dataclass
class DeviceRow:
    """What the device keeps of a row. `active`: its last token is sampled, not yet computed. `ended`: it ignores launches."""

    tenant: Tenant
    seed: int
    num_prompt: int
    limit: int
    min_tokens: int
    stop_ids: tuple[int, ...]
    ids: list[int]
    content: list[int]  # what the slot of each of `ids` must hold; and one before the first
    table: list[int] = dataclasses.field(default_factory=list)
    num_output: int = 0
    last: int = -1
    active: bool = False
    ended: bool = False

    @property
    def length(self) -> int:
        """Tokens computed."""
        return len(self.ids)

    def append(self, token: int, generation: int) -> None:
        """One more token: what its keys and values depend on is all so far, and which weights computed it."""
        self.ids.append(token)
        before = self.content[-1]
        self.content.append(NAN if NAN in (before, token - NAN_ID) else hash((before, token, generation)) or 1)


class RandomSpeculation(Speculation):
    """Draws for each launch whether it drafts, and how many tokens each row."""

    def __init__(self, config: SpeculationConfig, seed: int) -> None:
        super().__init__(config, LaunchSeconds({}, {}))
        self.random = random.Random(seed)
        self.seen = [0, 0]
        self.ended_ids: list[str] = []

    def plan(self, decoding: Sequence[Request]) -> Drafting | None:
        assert decoding
        if self.random.random() < 0.3:
            return None
        length = self.random.choice(self._config.lengths)
        return Drafting(length, [self.random.randint(0, length) for _ in decoding])

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        assert not request.finished
        assert accepted <= proposed
        self.seen[0] += proposed
        self.seen[1] += accepted

    def ended(self, request: Request) -> None:
        self.ended_ids.append(request.request_id)


class FakeDevice:
    """Runs launches in order; their results are given out later, oldest first."""

    def __init__(self, config: EngineConfig, num_pages: int, page_size: int) -> None:
        self.config, self.num_pages, self.page_size = config, num_pages, page_size
        self.rows: dict[int, DeviceRow] = {}
        self.slots: dict[tuple[int, int], int] = {}  # (page, offset) -> content
        self.generation = 0  # of the weights
        self.writers: dict[int, Tenant] = {}  # page -> who it was handed out to
        self.launches: deque[tuple[StepOutput, dict[int, set[Tenant]]]] = deque()  # result, and the pages it may touch
        self.tokens_computed: dict[str, int] = {}
        self.draft_slots: dict[tuple[int, int], int] = {}  # (page, offset) -> the tokens that a draft model computed there
        self.random = random.Random(num_pages)

    def dispatch(self, batch: ScheduledBatch) -> None:
        """Check the launch against the contract, and run it."""
        config, rows = self.config, batch.rows
        assert rows
        assert len({row.row for row in rows}) == len(rows), "a row twice in a launch"
        assert all(0 <= row.row < config.max_sequences for row in rows)
        assert batch.kind == "speculate" or batch.num_tokens <= config.max_tokens_per_step
        assert batch.num_steps in ((1, config.decode_steps) if batch.kind == "decode" else (1,))
        if batch.kind == "speculate":
            assert config.speculative is not None
            assert batch.draft_length in config.speculative.lengths
        for page in batch.dirty_pages:
            assert not any(page in touched for _, touched in self.launches), "zeroed under a launch"
            for offset in range(self.page_size):
                self.slots.pop((page, offset), None)
                self.draft_slots.pop((page, offset), None)
        for row in rows:
            self._admit(row)
        shape = (batch.draft_length + 1 if batch.kind == "speculate" else batch.num_steps, len(rows))
        output = StepOutput(
            batch, np.full(shape, -1, np.int32), np.zeros(shape, np.float32), np.zeros(shape, np.int32), np.ones(shape, bool)
        )
        if batch.kind == "speculate":
            output.proposed, output.accepted = np.zeros((2, len(rows)), np.int32)
        for column, row in enumerate(rows):
            state = self.rows[row.row]
            was_ended = state.ended
            if batch.kind == "decode":
                self._decode(row, state, output, column)
            elif batch.kind == "speculate":
                self._speculate(row, state, output, column)
            else:
                self._extend(row, state, output, column)
            if not was_ended:
                name = state.tenant[0]
                self.tokens_computed[name] = self.tokens_computed.get(name, 0) + row.num_tokens
        touched: dict[int, set[Tenant]] = {}
        for state in (self.rows[row.row] for row in rows):
            for page in state.table:
                touched.setdefault(page, set()).add(state.tenant)
        self.launches.append((output, touched))

    def result(self) -> StepOutput:
        """The oldest result not yet given out."""
        return self.launches.popleft()[0]

    def _admit(self, row: ScheduledRow) -> None:
        request = row.request
        tenant = (request.request_id, row.epoch)
        if row.is_new:
            self.rows[row.row] = DeviceRow(
                tenant,
                request.seed,
                len(request.prompt_ids),
                request.limit,
                request.params.min_tokens,
                (*request.eos_ids, *request.params.stop_ids),
                ids=[],
                content=[hash(request.params.cache_salt) or 1],
            )
        state = self.rows[row.row]
        assert state.tenant == tenant, "the row belongs to another request: it was not reset"
        found = row.start // self.page_size if row.is_new else 0
        for index, page in row.new_pages:
            assert index == len(state.table)
            assert 1 <= page < self.num_pages, "not a page to write to"
            state.table.append(page)
            if index < found:
                continue
            for _, touched in self.launches:
                others = touched.get(page, set()) - {tenant}
                assert not others, f"page {page} reused while a launch of {others} may touch it"
            assert not any(self.slots.get((page, offset)) == NAN for offset in range(self.page_size)), "NaN was handed on"
            self.writers[page] = tenant
        if row.is_new:
            assert row.start == found * self.page_size, "only full pages can be found"
            assert row.start < len(request.prompt_ids) + len(request.output_ids), "nothing is left to compute"
            for token in (request.prompt_ids + request.output_ids)[: row.start]:
                state.append(token, self.generation)
            state.num_output = max(0, row.start - state.num_prompt)
            self._read(state)

    def _extend(self, row: ScheduledRow, state: DeviceRow, output: StepOutput, column: int) -> None:
        ids = list(row.token_ids)
        if state.ended:
            assert not ids, "known tokens for a row that has ended"
            return
        if state.active:
            self._check_start(row, state)
            assert row.num_tokens == 1
            assert not ids
            ids = [state.last]
        else:
            assert row.start == state.length
            assert row.num_tokens <= self.config.prefill_chunk
            assert len(ids) == row.num_tokens, "only the device's last token may be missing"
            state.num_output += sum(position >= state.num_prompt for position in range(row.start, row.start + len(ids)))
        for token in ids:
            self._write(state, token)
            self._draft_write(state, state.length - 1)
        assert row.samples in (0, 1)
        output.finite[0, column] = state.content[-1] != NAN
        if row.samples:
            self._sample(state, output, 0, column)

    def _decode(self, row: ScheduledRow, state: DeviceRow, output: StepOutput, column: int) -> None:
        assert not row.is_new
        assert row.num_tokens == row.samples <= output.batch.num_steps
        if state.ended:
            return
        assert state.active, "a decode launch needs the row's last sampled token"
        self._check_start(row, state)
        assert not row.token_ids
        for step in range(output.batch.num_steps):
            if not state.ended:
                assert step < row.samples, "the row goes on beyond what the host promised"
                self._write(state, state.last)
                self._sample(state, output, step, column)

    def _check_start(self, row: ScheduledRow, state: DeviceRow) -> None:
        assert row.start == state.length or (self.config.speculative is not None and row.start > state.length)

    def _speculate(self, row: ScheduledRow, state: DeviceRow, output: StepOutput, column: int) -> None:
        assert not row.is_new
        assert not row.token_ids
        assert row.samples == row.num_tokens == row.drafts + 1 <= output.batch.draft_length + 1
        if state.ended:
            return
        assert state.active
        self._check_start(row, state)
        assert self.config.speculative is not None
        assert self.config.speculative.method == "draft" or row.catch_up == (0, 0)
        for position in range(*row.catch_up):
            if position < state.length:
                self._draft_write(state, position)
        before = state.length
        hosts = row.request.stepwise  # the host made its drafts, perhaps fewer than it might have
        assert not hosts or row.catch_up == (0, 0)
        if row.drafts and not hosts and self.config.speculative.method == "draft":
            for position in range(before - 1):
                assert self._draft_slot(state, position) == hash(tuple(state.ids[: position + 1])), "the draft model has a hole"
        drafts = min(row.drafts, state.limit - state.num_output - 1)
        drafts = self.random.randint(0, drafts) if hosts else drafts
        right = self.random.randint(0, drafts)
        assert output.proposed is not None
        assert output.accepted is not None
        output.proposed[column] = drafts
        for offset in range(drafts + 1):
            page, place = divmod(before + offset, self.page_size)
            assert page < len(state.table), "no page for this draft"
            self.slots[state.table[page], place] = REJECTED
        for step in range(right + 1):
            if not state.ended:
                self._write(state, state.last)
                self._sample(state, output, step, column)
                output.accepted[column] += step < right and bool(output.finite[step, column])
        for position in range(max(before - 1, 0), min(state.length, before + (1 if hosts else max(drafts, 1)))):
            self._draft_write(state, position)

    def _draft_slot(self, state: DeviceRow, position: int) -> int | None:
        page, offset = divmod(position, self.page_size)
        return self.draft_slots.get((state.table[page], offset))

    def _draft_write(self, state: DeviceRow, position: int) -> None:
        page, offset = divmod(position, self.page_size)
        self.draft_slots[state.table[page], offset] = hash(tuple(state.ids[: position + 1]))

    def _write(self, state: DeviceRow, token: int) -> None:
        page, offset = divmod(state.length, self.page_size)
        assert page < len(state.table), "no page for this token"
        assert self.writers[state.table[page]] == state.tenant, "writes to a page that was found, or handed on"
        state.append(token, self.generation)
        self.slots[state.table[page], offset] = state.content[-1]

    def _read(self, state: DeviceRow) -> None:
        for position in range(state.length):
            page, offset = divmod(position, self.page_size)
            assert self.slots.get((state.table[page], offset)) == state.content[position + 1], "a slot holds something else"

    def _sample(self, state: DeviceRow, output: StepOutput, step: int, column: int) -> None:
        self._read(state)
        assert state.num_output < state.limit
        early = state.num_output < state.min_tokens
        banned = state.stop_ids if early else ()
        token = None if state.content[-1] == NAN else next_token(state.seed, state.ids, state.num_output, banned)
        if token is None:
            output.finite[step, column] = False
            page, offset = divmod(state.length - 1, self.page_size)
            self.slots[state.table[page], offset] = NAN
            state.ended, state.active = True, False
            return
        output.tokens[step, column] = token
        state.last, state.active = token, True
        state.num_output += 1
        state.ended = token in state.stop_ids or state.num_output == state.limit


class Simulation:
    """Scheduler, pool and fake device, with every invariant checked after every call."""

    def __init__(
        self,
        *,
        num_pages: int = 65,
        page_size: int = 16,
        max_sequences: int = 8,
        max_tokens_per_step: int = 64,
        token_buckets: tuple[int, ...] = (),
        prefill_chunk: int = 32,
        decode_steps: int = 1,
        ahead: int = 1,
        deterministic: bool = False,
        lanes: tuple[LaneConfig, ...] = FIFO,
        max_wait: float = 10.0,
        prefix_cache: bool = False,
        speculative: SpeculationConfig | None = None,
        speculation: Speculation | None = None,
        seed: int = 0,
    ) -> None:
        self.config = EngineConfig(
            max_sequences=max_sequences,
            max_tokens_per_step=max_tokens_per_step,
            token_buckets=token_buckets,
            prefill_chunk=prefill_chunk,
            decode_steps=decode_steps,
            deterministic=deterministic,
            lanes=lanes,
            max_wait=max_wait,
            prefix_cache=prefix_cache,
            speculative=speculative,
        )
        self.now = 0.0  # moved by the test
        self.pool = PagePool(num_pages, page_size)
        if speculation is None and speculative is not None:
            speculation = RandomSpeculation(speculative, seed)
        self.speculation = speculation
        self.scheduler = Scheduler(self.config, self.pool, self.speculation)
        self.device = FakeDevice(self.config, num_pages, page_size)
        self.ahead = ahead  # launches in flight beyond the one read next
        self.requests: list[Request] = []  # in order of arrival
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.streams: dict[str, list[int]] = {}  # what `update` reported
        self.batches: list[ScheduledBatch] = []

    def add(self, request: Request) -> Request:
        """Add a request, and note what it must give."""
        room = (self.pool.num_pages - 1) * self.pool.page_size - len(request.prompt_ids)
        expected = solo(request, min(request.limit, room))
        request.arrival_time = self.now
        self.scheduler.add(request)
        self.requests.append(request)
        self.expected[request.request_id] = expected
        self.streams[request.request_id] = []
        self.check()
        return request

    def expire(self) -> list[Request]:
        """End those that waited too long."""
        expired = self.scheduler.expire(self.now)
        self.check()
        return expired

    def launch(self, *, closed: bool = False) -> ScheduledBatch | None:
        """Schedule, and dispatch what comes."""
        batch = self.scheduler.schedule(self.now, closed=closed)
        if batch is not None:
            self.device.dispatch(batch)
            self.batches.append(batch)
        else:
            assert self.device.launches or not self.scheduler.has_unfinished, "stuck"
        self.check()
        return batch

    def read(self) -> None:
        """Read the oldest result, if there is one."""
        if self.device.launches:
            for update in self.scheduler.update(self.device.result()):
                stream = self.streams[update.request.request_id]
                stream += update.tokens
                assert stream == update.request.output_ids, "a gap or a repeat"
                assert update.finished == update.request.finished
            self.check()

    def new_weights(self) -> None:
        """What the engine does about them."""
        while self.device.launches:
            self.read()
        self.device.generation += 1
        self.scheduler.forget_prefixes()
        self.check()

    def step(self) -> None:
        """One turn of the engine's loop."""
        batch = self.launch()
        if batch is None or len(self.device.launches) > self.ahead:
            self.read()

    def drain(self, max_steps: int = 20_000) -> None:
        """Run until nothing is left, then check every output, and that everything was given back."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.device.launches:
                break
            self.step()
        else:
            raise AssertionError("the scheduler does not come to an end")
        assert self.pool.num_free == self.pool.capacity
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for request in self.requests:
            tokens, reason = self.expected[request.request_id]
            assert request.finished
            if request.finish_reason == "timeout":
                assert request.output_ids == []
            elif request.finish_reason == "abort":
                assert request.output_ids == tokens[: len(request.output_ids)]
            else:
                assert (request.output_ids, request.finish_reason) == (tokens, reason)
            stops_by_token = request.finish_reason == "stop"
            assert request.stop_token == (tokens[-1] if stops_by_token else None)

    def check(self) -> None:
        """The invariants that hold between any two calls."""
        self.scheduler.check_integrity()
        live = [r for r in self.requests if not r.finished]
        pages = [page for r in live for page in r.pages]
        assert self.config.prefix_cache or len(pages) == len(set(pages)), "a page with two owners"
        assert 0 not in pages
        for lane in {r.lane for r in live}:
            ordered = sorted((r for r in live if r.lane == lane), key=lambda r: (r.priority, r.ticket))
            if len({r.priority for r in ordered}) == 1:
                states = [r.state is RequestState.RUNNING for r in ordered]
                assert states == sorted(states, reverse=True), "a waiting request came before a running one of its lane"
        states = [r.state is RequestState.RUNNING for r in live]
        assert (sum(states), len(states)) == (
            self.scheduler.num_running,
            self.scheduler.num_running + self.scheduler.num_waiting,
        )
        for request in self.requests:
            if request.finished:
                assert (request.pages, request.row, request.num_in_flight) == ([], -1, 0)
