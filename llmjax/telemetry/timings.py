"""Where the time of a request goes: five segments that share its life out without gap or overlap.

    arrival | ingress | queue | batch | compute | egress | last byte

ingress
    until it is enqueued: tokenising, checks.
queue
    until it has a row, and again whenever a preemption leaves it without one.
batch
    from the row to the launch it is first part of: building the launch and handing it to the device.
compute
    until the last token has been read on the host.
egress
    until the last output has been made and handed over.

Marks are integers in nanoseconds of one monotonic clock, so the segments sum to the whole exactly. Owns the arithmetic; reads
no clock and knows no requests.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Segment = Literal["ingress", "queue", "batch", "compute", "egress"]
SEGMENTS: tuple[Segment, ...] = ("ingress", "queue", "batch", "compute", "egress")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """The life of one finished request. All `_ns` are nanoseconds; `arrival_ns` is a point in monotonic time.

    Attributes:
        ingress_ns, queue_ns, batch_ns, compute_ns, egress_ns: the segments; their sum is `total_ns`.
        row_ns: from arrival to the row in which the first token was made, or would have been; None if it never had one.
        first_token_ns: from arrival to the first token on the host; None without a token.
        last_token_ns: from arrival to the last token on the host; None without a token.
        first_tokens: tokens that came with the first one: a launch of K steps brings up to K for each choice.
        prompt_tokens: of the prompt.
        cached_tokens: of these, those whose keys and values were found and not computed.
        output_tokens: sampled, of all choices.
        preemptions: how often a choice lost its row.
        chunks: launches that computed known tokens (of the prompt, or again after a preemption).
        steps: decode steps launched for its choices.
    """

    arrival_ns: int
    ingress_ns: int
    queue_ns: int
    batch_ns: int
    compute_ns: int
    egress_ns: int
    row_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    first_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    chunks: int = 0
    steps: int = 0

    @property
    def total_ns(self) -> int:
        """From arrival to the last byte."""
        return self.ingress_ns + self.queue_ns + self.batch_ns + self.compute_ns + self.egress_ns

    @property
    def end_ns(self) -> int:
        """The last byte, as a point in monotonic time."""
        return self.arrival_ns + self.total_ns

    def seconds(self, segment: Segment) -> float:
        """The length of one segment."""
        return float(getattr(self, f"{segment}_ns")) * 1e-9

    @property
    def until_row_ns(self) -> int:
        """From being queued to the row in which the first token was made. Without a row: all the time it waited."""
        return self.queue_ns if self.row_ns is None else self.row_ns - self.ingress_ns

    @property
    def prefill_ns(self) -> int:
        """From that row to the first token, or to the end of a request without one."""
        if self.row_ns is None:
            return 0
        return (self.total_ns - self.egress_ns if self.first_token_ns is None else self.first_token_ns) - self.row_ns

    @property
    def decode_ns(self) -> int:
        """From the first token to the last; preemptions in between count."""
        return 0 if self.first_token_ns is None or self.last_token_ns is None else self.last_token_ns - self.first_token_ns

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds a token, the first launch's left out: (last token - first token) / (tokens - those of the first launch).

        None when the first launch brought them all.
        """
        later = self.output_tokens - self.first_tokens
        if self.first_token_ns is None or self.last_token_ns is None or later <= 0:
            return None
        return (self.last_token_ns - self.first_token_ns) * 1e-9 / later


class RequestTimeline:
    """A request's life while it goes on: which segment it is in, and how long it has been in each.

    A prompt with n choices is one request here. It waits while no unfinished choice has a row.
    """

    __slots__ = (
        "_before_last",
        "_first_tokens",
        "_last_token",
        "_row",
        "_rows",
        "_segment",
        "_since",
        "_spent",
        "arrival_ns",
        "first_token_ns",
        "marks",
    )

    def __init__(self, arrival_ns: int) -> None:
        self.arrival_ns = self._since = arrival_ns
        self._segment: Segment = "ingress"
        self._spent: dict[Segment, int] = dict.fromkeys(SEGMENTS, 0)
        self.marks: list[tuple[Segment, int]] = [("ingress", arrival_ns)]
        """The segments so far, and when each began."""
        self.first_token_ns: int | None = None
        """When the first token was on the host."""
        self._rows = 0
        self._row: int | None = None
        self._last_token: int | None = None
        self._before_last: int | None = None  # of the launch before that of the last token
        self._first_tokens = 0

    def enqueued(self, now_ns: int) -> None:
        """The scheduler has it."""
        self._enter("queue", now_ns)

    def scheduled(self, now_ns: int) -> None:
        """A choice got a row."""
        self._rows += 1
        if self._segment == "queue":
            self._enter("batch", now_ns)
            if self.first_token_ns is None:
                self._row = now_ns

    def dispatched(self, now_ns: int) -> None:
        """A launch that a choice is new in has been handed to the device."""
        if self._segment == "batch":
            self._enter("compute", now_ns)

    def left_row(self, now_ns: int) -> None:
        """A choice was preempted, or ended. Without another row the request waits (or ends, with the next call)."""
        self._rows -= 1
        if self._rows == 0:
            self._enter("queue", now_ns)

    def tokens(self, count: int, now_ns: int) -> int | None:
        """`count` new tokens of a choice are on the host; those of one launch have one `now_ns`.

        Returns when those before them were (of any choice, of an earlier launch), None for the first ones.
        """
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
        if self._last_token != now_ns:
            self._before_last, self._last_token = self._last_token, now_ns
        if self.first_token_ns == now_ns:
            self._first_tokens += count
        return self._before_last

    def ended(self, now_ns: int) -> None:
        """Every choice has ended."""
        self._enter("egress", now_ns)

    def close(
        self,
        now_ns: int,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        preemptions: int,
        chunks: int,
        steps: int,
    ) -> Timings:
        """The last byte is out. Takes the counters of the finished request."""
        assert self._segment == "egress"
        self._leave(now_ns)
        return Timings(
            arrival_ns=self.arrival_ns,
            **{f"{segment}_ns": spent for segment, spent in self._spent.items()},
            row_ns=None if self._row is None else self._row - self.arrival_ns,
            first_token_ns=None if self.first_token_ns is None else self.first_token_ns - self.arrival_ns,
            last_token_ns=None if self._last_token is None else self._last_token - self.arrival_ns,
            first_tokens=self._first_tokens,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            preemptions=preemptions,
            chunks=chunks,
            steps=steps,
        )

    def _enter(self, segment: Segment, now_ns: int) -> None:
        self._leave(now_ns)
        self._segment = segment
        if self.marks[-1][1] == now_ns:
            self.marks.pop()  # it took no time
        self.marks.append((segment, now_ns))

    def _leave(self, now_ns: int) -> None:
        assert now_ns >= self._since, "a monotonic clock went back"
        self._spent[self._segment] += now_ns - self._since
        self._since = now_ns
