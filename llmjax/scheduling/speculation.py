"""`Speculation`: who drafts in the next launch, and how many tokens.

Owns what is known of acceptance and of what launches cost. Knows no pages, no device and no clock: it counts launches, rounds and
tokens, so that the same history always gives the same decisions. Three questions, from the narrowest to the widest:

*Is this request a reason to draft?* Not one longer than `max_length`, nor one of whose last drafts fewer than `min_acceptance`
were accepted (`RequestSpeculation` says after how many rounds).

*Does this launch speculate?* A round of k drafts takes one launch of `LaunchSeconds`, in which a row gives 1 + a + ... + a**k
tokens when its drafts are accepted with probability a, one after the other (Leviathan et al., "Fast inference from transformers
via speculative decoding", 2023), and one when it does not draft. It pays when all rows' tokens over its seconds are more than
those of plain steps. To begin takes a little more than to go on, so that noise does not switch. What does not pay, or was
switched off, is tried again for four launches (`PROBE`) after 64 plain ones, then after twice as many, up to 512; only then where
even perfect drafts would not pay. With more than `disable_above_batch` rows nobody drafts.

A request that is off for its acceptance drafts along in launches that are made for others, or to try: the program's shape is
static, so that it costs nothing, and shows whether the request is to be on again. Without others it decodes plainly.

*How many drafts?* Of the lengths there are programs for, the one that gives most tokens a second.

While launches speculate, a plain one is made now and then, so that its time is known too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from llmjax.scheduling.acceptance import AcceptanceRates
from llmjax.scheduling.launch_seconds import PLAIN
from llmjax.scheduling.launch_seconds import LaunchSeconds as LaunchSeconds
from llmjax.scheduling.request import Request
from llmjax.scheduling.request_speculation import OffReason, RequestSpeculation
from llmjax.scheduling.speculation_config import SpeculationConfig
from llmjax.scheduling.speculation_counts import SpeculationCounts

BEGINS_AT = 1.05
"""Times the tokens a second of plain steps that speculation must promise to begin; it goes on while it promises more than 1."""
OTHER_LENGTH_AT = 1.03
"""Times the present length's that another length must promise."""
BATCH_RETURNS_AT = 7 / 8
"""Of `disable_above_batch`: with more rows it is not taken up again, so that one more or less does not switch."""
STAYS_OFF = 16
"""Launches."""
FIRST_WAIT = 64
"""Plain launches before speculation is tried again; each try that leads to nothing doubles it."""
MAX_WAIT = 512
PROBE = 4
"""Launches of a try, at most."""
STEADY = 64
"""Launches that speculated in a row and make the next wait the first again."""
PLAIN_EVERY = 512
"""Launches that speculate, after which there are `PLAIN_LAUNCHES` for their time."""
PLAIN_LAUNCHES = 2
_FIRST_PLAIN = 32
_STEPS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Drafting:
    """The decision for one launch.

    Attributes:
        length: drafts that the program makes.
        drafts: of each row at most, 0 to `length`.
    """

    length: int
    drafts: list[int]


class Speculation:
    """Decides for an engine, launch by launch.

    Args:
        launch_seconds: of its programs; updated by `measured`.
        deterministic: what a request drafts depends on the request alone, and is not decided here: only counted.
        counts: to go on with, of at least as many tokens a round.

    Attributes:
        counts: what was drafted, accepted and switched so far.
        rates: acceptance lately.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        launch_seconds: LaunchSeconds,
        *,
        deterministic: bool = False,
        counts: SpeculationCounts | None = None,
    ) -> None:
        self._config = config
        self._seconds = launch_seconds
        self._adaptive = config.adaptive and not deterministic
        self._lengths = config.lengths
        self._more = [
            tuple(tokens_a_round(step / _STEPS, length) - 1 for length in self._lengths) for step in range(_STEPS + 1)
        ]  # tokens of a round beyond those of a plain step, by acceptance and length: `observe` is called often
        self.counts = counts if counts is not None else SpeculationCounts(config.tokens)
        self.rates = AcceptanceRates()
        self._launches = 0
        self._off: Literal["batch", "cost"] | None = None
        self._off_since = 0
        self._most_rows = config.disable_above_batch
        self._index = len(self._lengths) - 1  # the length in use
        self._last = 0  # launch that speculated last, or the end of the last probe
        self._in_a_row = 0  # launches that speculated, without a pause
        self._wait = FIRST_WAIT
        self._probe_left = 0
        self._until_plain = _FIRST_PLAIN

    @property
    def launch_seconds(self) -> LaunchSeconds:
        """What launches cost, as far as is known."""
        return self._seconds

    @property
    def off(self) -> Literal["batch", "cost"] | None:
        """Why launches do not speculate at present, whoever would like to; None while they may."""
        return self._off

    # -- before a launch

    def plan(self, decoding: Sequence[Request]) -> Drafting | None:
        """How many tokens each of these rows drafts in the next launch; None: nobody, it is a plain one. O(rows)."""
        if not self._adaptive:
            return self._plan_always(decoding)
        self._launches += 1
        if len(decoding) > self._most_rows:
            self._most_rows = max(1, int(BATCH_RETURNS_AT * self._config.disable_above_batch))
            self._turn_off("batch")
            return None
        self._most_rows = self._config.disable_above_batch
        most, totals = self._survey(decoding)
        drafting = any(most)
        gain = self._choose_length(len(decoding), totals)
        if drafting:
            self._judge(gain)
        if drafting and self._off is None:
            return self._speculate(decoding, most)
        return self._probe(decoding, most)

    def _survey(self, decoding: Sequence[Request]) -> tuple[list[int], list[float]]:
        """Drafts that each row may have, and the tokens to expect of all rows, for each length."""
        tokens, longest = self._config.tokens, self._config.max_length
        most = []
        totals = [float(len(decoding))] * len(self._lengths)
        for request in decoding:
            record = request.speculation
            if record is None:
                record = self._begin(request)
            if longest is not None and record.off in (None, "acceptance") and request.num_computed_tokens >= longest:
                self._switch_off(record, "length")
            drafts = max(0, min(tokens, request.num_left - 1)) if record.off is None else 0
            most.append(drafts)
            if drafts:  # fewer at its limit make no difference to the decision: few requests get there
                for index, more in enumerate(record.expected):
                    totals[index] += more
        return most, totals

    def _begin(self, request: Request) -> RequestSpeculation:
        record = RequestSpeculation(self.rates.prior(request.lane, request.prompt_class))
        request.speculation = record
        self._expect(record)
        return record

    def _expect(self, record: RequestSpeculation) -> None:
        record.expected = self._more[round(record.acceptance * _STEPS)]

    def _choose_length(self, rows: int, totals: Sequence[float]) -> float:
        """Sets the length; returns how many times the tokens a second of plain steps it promises."""
        seconds = self._seconds
        rates = [total / seconds.of(rows, length) for total, length in zip(totals, self._lengths, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > OTHER_LENGTH_AT * rates[self._index]:
            self._index = best
        return rates[self._index] * seconds.of(rows, PLAIN) / rows

    def _judge(self, gain: float) -> None:
        if self._off is None:
            if gain < 1.0:
                self._turn_off("cost")
        elif gain >= BEGINS_AT and self._launches - self._off_since >= STAYS_OFF:
            self.counts.switched("on", self._off)
            self._off = None

    def _turn_off(self, reason: Literal["batch", "cost"]) -> None:
        if self._off is None:
            self.counts.switched("off", reason)
            self._off_since = self._launches
        self._off = reason

    def _speculate(self, decoding: Sequence[Request], most: list[int]) -> Drafting | None:
        self._until_plain -= 1
        if self._until_plain < 0:
            if self._until_plain == -PLAIN_LAUNCHES:
                self._until_plain = PLAIN_EVERY
            return None
        self._in_a_row = self._in_a_row + 1 if self._last == self._launches - 1 else 1
        if self._in_a_row >= STEADY:
            self._wait = FIRST_WAIT
        self._last = self._launches
        self._probe_left = 0
        return self._drafting(decoding, most)

    def _probe(self, decoding: Sequence[Request], most: list[int]) -> Drafting | None:
        """A launch that speculates although nobody's drafts pay, every now and then, to see whether they would."""
        if not self._probe_left:
            plain = self._launches - self._last
            if plain < self._wait or (plain < MAX_WAIT and not self._could_pay(decoding, most)):
                return None
            self._probe_left, self._wait = PROBE, min(2 * self._wait, MAX_WAIT)
            for request in decoding:
                if request.speculation is not None and request.speculation.off is not None:
                    request.speculation.forget()
        self._last = self._launches
        self._probe_left -= 1
        return self._drafting(decoding, most)

    def _could_pay(self, decoding: Sequence[Request], most: Sequence[int]) -> bool:
        """Whether it would, were every draft accepted of those who may try."""
        rows = len(decoding)
        trying = sum(may > 0 or _may_draft_along(request) for request, may in zip(decoding, most, strict=True))
        best = max((rows + trying * length) / self._seconds.of(rows, length) for length in self._lengths)
        return best * self._seconds.of(rows, PLAIN) >= BEGINS_AT * rows

    def _drafting(self, decoding: Sequence[Request], most: list[int]) -> Drafting | None:
        length = self._lengths[self._index]
        drafts = [
            min(length, request.num_left - 1 if may == 0 and _may_draft_along(request) else may)
            for request, may in zip(decoding, most, strict=True)
        ]
        return Drafting(length, drafts) if any(drafts) else None

    def _plan_always(self, decoding: Sequence[Request]) -> Drafting | None:
        if len(decoding) > self._config.disable_above_batch:
            return None
        most, _ = self._survey(decoding)
        return Drafting(self._config.tokens, most) if any(most) else None

    # -- after a launch

    def observe(self, request: Request, proposed: int, accepted: int) -> None:
        """A round of a request that was to draft has been read: of `proposed` drafts `accepted` were."""
        record = request.speculation
        if record is None:
            record = self._begin(request)
        tested = record.read(proposed, accepted)
        self.counts.read(proposed, accepted)
        self.rates.add(request.lane, request.prompt_class, accepted, tested)
        if not self._adaptive:
            return
        self._expect(record)
        if record.off is None:
            if record.fails(self._config.min_acceptance):
                self._switch_off(record, "acceptance")
        elif record.off == "acceptance" and record.recovers(self._config.min_acceptance):
            record.switch_on()
            self.counts.switched("on", "acceptance")

    def _switch_off(self, record: RequestSpeculation, reason: OffReason) -> None:
        record.switch_off(reason)
        self.counts.switched("off", reason)

    def measured(self, kind: str, rows: int, length_or_steps: int, seconds: float, *, at_most: bool = False) -> None:
        """A launch of `kind` "decode" (so many steps) or "speculate" (so many drafts) with so many rows took so long; `at_most`:
        or less, because the device had waited for the host."""
        if kind == "decode":
            self._seconds.measured(rows, PLAIN, seconds / length_or_steps, at_most=at_most)
        else:
            self._seconds.measured(rows, length_or_steps, seconds, at_most=at_most)

    def ended(self, request: Request) -> None:
        """A request has ended, whatever ended it: its record says why it did not draft at last, if it was for all requests."""
        if request.speculation is None and self._off is not None and len(request.output_ids) > 1:
            request.speculation = RequestSpeculation(0.0)  # it decoded, and never could draft: too many did
        if request.speculation is not None:
            request.speculation.held = self._off


def tokens_a_round(acceptance: float, drafts: int) -> float:
    """Tokens that a row gives in a round, on average: those accepted before the first that is not, and the one behind."""
    if acceptance > 0.999:
        return 1.0 + drafts
    return (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance)


def _may_draft_along(request: Request) -> bool:
    record = request.speculation
    return record is not None and record.off == "acceptance" and request.num_left > 1
