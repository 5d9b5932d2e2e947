"""`Admission`: which requests can be served at all, which waiting one comes in next, and how lanes share the tokens of a launch.

Joins the order of the lanes with the room in rows and pages. Reads the pool and the lanes, and changes neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmjax.errors import ContextLengthError
from llmjax.scheduling.lanes import Lanes
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.policy import SchedulerConfig, full_launch, may_be_cut, reserves_full_length
from llmjax.scheduling.prefix_cache import PrefixCache
from llmjax.scheduling.request import Request

RESERVED = 16
"""Of several lanes, those beyond the first leave one row and one page in so many free: a burst of long requests must not hold
all of them when a short one comes."""


class Admission:
    """Decides over the waiting requests of `lanes`. Running requests and the number of free rows are passed in."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, lanes: Lanes, prefixes: PrefixCache | None) -> None:
        self._config = config
        self._prefixes = prefixes
        self._pool = pool
        self._lanes = lanes

    def fit(self, request: Request) -> None:
        """Lower the limit of a fresh request to what the whole pool can hold, and set its `full_pages`.

        Raises:
            ContextLengthError: the prompt and one new token need more pages than the pool has.
        """
        longest = self._pool.capacity * self._pool.page_size
        if request.num_prompt_tokens + 1 > longest:
            raise ContextLengthError(
                f"the prompt has {request.num_prompt_tokens} tokens and with one new token does not fit the page pool of "
                f"{longest} tokens ({self._pool.capacity} pages of {self._pool.page_size}): shorten it, or raise kv_cache_bytes",
                "prompt",
            )
        request.limit = request.num_left = min(request.limit, longest - request.num_prompt_tokens)
        # The last token is sampled but never computed.
        request.full_pages = self._pool.pages_for(request.num_prompt_tokens + max(0, request.limit - 1))

    def next(
        self, running: Sequence[Request], free_rows: int, now: float, *, left: Sequence[int] | None = None, promised: int = 0
    ) -> Request | None:
        """The waiting request that comes in next, if one can: a row is free, its pages are, less `promised` ones, and its lane
        has tokens `left`."""
        if free_rows:
            for request, overdue in self._lanes.candidates(now):
                if (left is None or left[request.lane] > 0) and self._fits(request, running, free_rows, overdue, promised):
                    return request
        return None

    def shares(
        self, prefilling: Sequence[Request], running: Sequence[Request], free_rows: int, budget: int, now: float
    ) -> list[int]:
        """A launch's tokens for prompts, by lane: `prefilling` have begun, and `free_rows` new ones may come in. `budget` is what
        decoding rows leave of the largest launch; see `full_launch` for smaller ones."""
        wanted = [0] * len(self._lanes.configs)
        for request in prefilling:
            wanted[request.lane] += min(self._config.prefill_chunk, request.num_prefill_tokens - request.num_computed_tokens)
        decoding = self._config.max_tokens_per_step - budget
        buckets = self._config.token_buckets
        if len(wanted) == 1 and not may_be_cut(decoding, buckets):
            return [budget]  # whatever is wanted: nobody else could have it
        for request, overdue in self._lanes.candidates(now) if free_rows else ():
            more = budget - wanted[request.lane]
            if more > 0 and self._fits(request, running, free_rows, overdue, promised=0):
                wanted[request.lane] += self._lanes.wanted(request.lane, free_rows, more, self._to_compute)
        if not any(wanted):
            return wanted
        budget = min(budget, full_launch(decoding, sum(wanted), buckets) - decoding)
        return self._lanes.share_out(wanted, budget) if len(wanted) > 1 else [budget]

    def _to_compute(self, request: Request) -> int:
        return request.num_tokens - (0 if self._prefixes is None else self._prefixes.num_found(request))

    def _fits(self, request: Request, running: Sequence[Request], free_rows: int, overdue: bool, promised: int) -> bool:
        """Whether the pool holds a waiting request with its reserve (see the scheduler's "No ping-pong"; where full
        lengths are reserved, every row's), and its lane leaves the first one its part."""
        free = self._pool.num_free - promised
        if request.lane > 0 and running and not overdue:
            if free_rows <= self._config.max_sequences // RESERVED:
                return False
            free -= self._pool.capacity // RESERVED
        known = self._pool.pages_for(request.num_tokens)
        taken = known if self._prefixes is None else known - self._prefixes.num_held(request)
        if taken > free:
            return False
        whole, per_row = reserves_full_length(self._config), 1 + request.num_preemptions
        if not whole and taken + per_row * (len(running) + 1) <= free:
            return True  # every row can grow by as much, whether it needs to or not
        growth = [r.full_pages - len(r.pages) for r in running]
        growth.append(request.full_pages - known)
        if not whole:
            growth = [pages if pages < per_row else per_row for pages in growth]
        return taken + sum(growth) <= free
