"""`Lanes`: who waits, and in which order they are to be let in.

Owns the waiting requests. Knows no rows, pages or launches, and no clock: times are passed in, in monotonic seconds.

With one lane it is a queue, first come, first served. With several, each takes the requests up to its size (prompt and
expected output), and the order is

*In a lane*: by priority (lower first), then by arrival. A preempted request has its old place: it is the first of its priority.

*Between lanes*: deficit round robin over tokens (Shreedhar and Varghese, "Efficient fair queueing using deficit round robin",
1995): in each round a lane earns `QUANTUM` tokens for each unit of weight and spends the size of the requests it lets in. While
two lanes wait, the tokens let in divide by weight, to within a quantum and a request. An empty lane saves nothing. A request
that is let in out of turn (because the one whose turn it is does not fit, or because it is overdue) costs its lane as much,
but no lane owes more than one round, and none owes anything for what it let in while nobody else waited.

*Bound*: a lane that had none of its requests let in for `max_wait`, while one waited, is next, and nobody else is let in before
its head fits.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from llmjax.errors import QueueFullError
from llmjax.scheduling.lane_config import FIFO, LaneConfig
from llmjax.scheduling.output_lengths import OutputLengths
from llmjax.scheduling.request import Request, RequestState

QUANTUM = 512
"""Tokens a lane earns a round for each unit of its weight: a few short requests, a part of a long one."""

Key = tuple[int, int]


class Lanes:
    """The waiting requests.

    Args:
        configs: from the lane of the shortest requests to that of the longest, whose `max_tokens` is None.
        max_wait: seconds after which a lane that nobody was taken from is next; None only with a single lane.
    """

    def __init__(self, configs: Sequence[LaneConfig] = FIFO, max_wait: float | None = None) -> None:
        assert configs
        assert configs[-1].max_tokens is None, "the last lane takes what no other does"
        assert max_wait is not None or len(configs) == 1, "several lanes need a bound, or one can starve"
        self.configs = tuple(configs)
        self._lanes = [_Lane(config) for config in configs]
        self._max_wait = max_wait
        self._turn = len(configs) - 1  # the lane whose round it is; the first is next
        self._chunk_turns = [0] * len(configs)
        self._next_ticket = 0
        self._lengths = OutputLengths()
        self.num_preempted = 0
        """Waiting requests that had a row before."""

    def __len__(self) -> int:
        """Waiting requests."""
        return sum(len(lane.waiting) for lane in self._lanes)

    def __iter__(self) -> Iterator[Request]:
        """Them, lane by lane, each in its order."""
        for lane in self._lanes:
            yield from lane.waiting

    def counts(self) -> dict[str, int]:
        """Waiting requests by the name of their lane."""
        return {lane.config.name: len(lane.waiting) for lane in self._lanes}

    # Requests come and go

    def push(self, request: Request) -> None:
        """A fresh request waits from now on; sets its `lane`, `ticket` and `expected_tokens`.

        The choices of a prompt are let in or refused together, by the first one.

        Raises:
            QueueFullError: its lane is full.
        """
        prompt = request.num_prompt_tokens
        size = prompt + self._lengths.expect(prompt, request.limit)
        index = next(i for i, config in enumerate(self.configs) if config.max_tokens is None or size <= config.max_tokens)
        lane = self._lanes[index]
        depth = lane.config.depth
        if depth is not None and request.choice == 0 and len(lane.waiting) >= depth:
            raise QueueFullError(
                f"{len(lane.waiting)} requests wait in lane '{lane.config.name}', as many as may: try again later",
                lane.config.name,
            )
        request.lane, request.expected_tokens, request.ticket = index, size, self._next_ticket
        self._next_ticket += 1
        if not lane.waiting:
            lane.waits_since = max(lane.waits_since, request.arrival_time)
        lane.waiting.add(request)
        if lane.config.timeout is not None:
            lane.add_by_age(request)

    def push_front(self, request: Request, now: float) -> None:
        """A preempted request waits again, at its old place. It was paid for, and is let in for nothing."""
        lane = self._lanes[request.lane]
        if not lane.waiting:
            lane.waits_since = now
        lane.waiting.add(request)
        self.num_preempted += 1

    def remove(self, request: Request) -> None:
        """A waiting request has ended."""
        lane = self._lanes[request.lane]
        lane.waiting.remove(request)
        self.num_preempted -= request.state is RequestState.PREEMPTED
        if not lane.waiting:
            lane.deficit = 0

    def expired(self, now: float) -> list[Request]:
        """Requests that wait longer than their lane's timeout without ever having had a row. They are still in it."""
        found = []
        for lane in self._lanes:
            timeout, by_age = lane.config.timeout, lane.by_age
            while by_age and (by_age[0].state is not RequestState.WAITING or now - by_age[0].arrival_time > (timeout or 0)):
                request = by_age.popleft()
                if request.state is RequestState.WAITING:
                    found.append(request)
        return found

    def learn(self, request: Request) -> None:
        """A request has ended by itself: later ones like it are expected to give as much."""
        self._lengths.learn(request.num_prompt_tokens, request.limit, len(request.output_ids))

    # Who is next

    def candidates(self, now: float) -> Iterator[tuple[Request, bool]]:
        """Requests to let in, in the order to try them, and whether the request is overdue; then it is the only one.

        Changes nothing that matters: calling it again gives the same.
        """
        waiting = [lane for lane in self._lanes if lane.waiting]
        if len(waiting) < 2:
            for lane in waiting:
                yield lane.waiting.first, self._overdue(lane, now)
            return
        late = [lane for lane in waiting if self._overdue(lane, now)]
        if late:
            yield min(late, key=lambda lane: lane.waits_since).waiting.first, True
            return
        first = self._whose_turn()
        for lane in (first, *(lane for lane in waiting if lane is not first)):
            yield lane.waiting.first, False

    def take(self, request: Request, now: float) -> None:
        """Let a candidate in: its lane pays."""
        lane = self._lanes[request.lane]
        assert lane.waiting.first is request
        lane.waiting.remove(request)
        self.num_preempted -= request.state is RequestState.PREEMPTED
        lane.waits_since = now
        alone = all(other is lane or not other.waiting for other in self._lanes)
        floor = 0 if alone else -QUANTUM * lane.config.weight
        lane.deficit = max(lane.deficit - _cost(request), floor) if lane.waiting else 0

    def _overdue(self, lane: _Lane, now: float) -> bool:
        return self._max_wait is not None and now - lane.waits_since >= self._max_wait

    def _whose_turn(self) -> _Lane:
        """The lane whose credit pays for its head, when two or more wait. Rounds go on until there is one."""
        while True:
            lane = self._lanes[self._turn]
            if lane.waiting and _cost(lane.waiting.first) <= lane.deficit:
                return lane
            self._turn = (self._turn + 1) % len(self._lanes)
            lane = self._lanes[self._turn]
            if lane.waiting:
                lane.deficit += QUANTUM * lane.config.weight

    # How lanes share a launch

    def wanted(self, lane: int, rows: int, budget: int, cost: Callable[[Request], int]) -> int:
        """Tokens that the first `rows` waiting requests of a lane have to compute, by `cost`, or `budget` if that is less."""
        tokens = 0
        for request in self._lanes[lane].waiting:
            if rows == 0 or tokens >= budget:
                break
            tokens += cost(request)
            rows -= 1
        return min(tokens, budget)

    def share_out(self, wants: Sequence[int], budget: int) -> list[int]:
        """Divide a launch's tokens among lanes that want `wants`: by weight, and what one does not want goes to the others."""
        shares = [0] * len(wants)
        hungry = [index for index, want in enumerate(wants) if want > 0]
        while hungry:
            weight = sum(self.configs[index].weight for index in hungry)
            parts = {index: budget * self.configs[index].weight // weight for index in hungry}
            content = [index for index in hungry if wants[index] <= parts[index]]
            for index in content:
                shares[index] = wants[index]
                budget -= wants[index]
            if not content:
                over = budget - sum(parts.values())  # less than one for each
                for place, index in enumerate(hungry):
                    shares[index] = parts[index] + (place < over)
                break
            hungry = [index for index in hungry if index not in content]
        return shares

    def next_chunk(self, requests: Sequence[Request]) -> Request:
        """Whose chunk is next when a launch holds only one: lanes take turns by weight, in a lane the first of `requests`."""
        present = {request.lane for request in requests}
        if len(present) == 1:
            self._chunk_turns = [0] * len(self.configs)
            return requests[0]
        lane = min(present, key=lambda index: (self._chunk_turns[index] / self.configs[index].weight, index))
        self._chunk_turns[lane] += 1
        return next(request for request in requests if request.lane == lane)

    def check_integrity(self) -> None:
        """Assert that every request is in its own lane once, in order, and that no lane owes more than a round."""
        assert self.num_preempted == sum(request.state is RequestState.PREEMPTED for request in self)
        for index, lane in enumerate(self._lanes):
            waiting = list(lane.waiting)
            assert all(request.lane == index for request in waiting)
            keys = [_key(request) for request in waiting]
            assert keys == sorted(set(keys)), "out of order, or twice"
            assert lane.deficit >= -QUANTUM * lane.config.weight
            assert waiting or lane.deficit == 0
            fresh = {r.request_id for r in waiting if r.state is RequestState.WAITING}
            assert lane.config.timeout is None or fresh <= {r.request_id for r in lane.by_age}


class _Lane:
    """One lane's requests and account."""

    def __init__(self, config: LaneConfig) -> None:
        self.config = config
        self.waiting = _Ordered()
        self.by_age: deque[Request] = deque()  # by arrival, with a timeout; those that wait no more are dropped at the front
        self.deficit = 0  # tokens it may let in
        self.waits_since = 0.0  # since when its head could have been let in: its arrival, or the last time one was

    def add_by_age(self, request: Request) -> None:
        """Nearly always at the end: prompts that take longer to tokenise come a little later than those that arrived after."""
        place = len(self.by_age)
        while place and self.by_age[place - 1].arrival_time > request.arrival_time:
            place -= 1
        self.by_age.insert(place, request)


class _Ordered:
    """Requests sorted by priority and ticket. The usual ends, a new one last and the first removed, do not move the others."""

    def __init__(self) -> None:
        self._items: list[tuple[Key, Request]] = []
        self._start = 0  # those before it are gone

    def __len__(self) -> int:
        return len(self._items) - self._start

    def __iter__(self) -> Iterator[Request]:
        for index in range(self._start, len(self._items)):
            yield self._items[index][1]

    @property
    def first(self) -> Request:
        return self._items[self._start][1]

    def add(self, request: Request) -> None:
        bisect.insort(self._items, (_key(request), request), lo=self._start, key=_first)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._items, _key(request), lo=self._start, key=_first)
        assert self._items[index][1] is request
        if index == self._start:
            self._start += 1
            if 2 * self._start > len(self._items):
                del self._items[: self._start]
                self._start = 0
        else:
            del self._items[index]


def _first(item: tuple[Key, Request]) -> Key:
    return item[0]


def _key(request: Request) -> Key:
    return request.priority, request.ticket


def _cost(request: Request) -> int:
    return 0 if request.num_preemptions else request.expected_tokens
