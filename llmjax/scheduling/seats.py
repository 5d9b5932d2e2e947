"""`Seats`: who has a row of the device batch. Decides nothing: who comes in, and who leaves, is the scheduler's business."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable

from llmjax.scheduling.request import Request, RequestState, ScheduledBatch


class Seats:
    """The device rows and the requests in them.

    Args:
        num_rows: rows of the batch.
        page_size: tokens a page.

    Attributes:
        taken: requests with a row, as they were let in; the same list for good, to be read.
    """

    def __init__(self, num_rows: int, page_size: int) -> None:
        self.num_rows = num_rows
        self.taken: list[Request] = []
        self._page_size = page_size
        self._free = list(range(num_rows))  # a heap: the lowest row first, so that few rows mean a small bucket

    @property
    def num_free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    def enter(self, request: Request) -> None:
        """Give a request a free row; it runs."""
        request.state = RequestState.RUNNING
        request.row = heapq.heappop(self._free)
        self.taken.append(request)

    def leave(self, request: Request) -> None:
        """Take its row from a request. It can be given out at once: the device resets a row for its new request."""
        self.taken.remove(request)
        heapq.heappush(self._free, request.row)
        request.row = -1

    def survey(self) -> tuple[list[Request], list[Request], int]:
        """What the requests with a row have to do next.

        Returns:
            those that decode (the device samples their next token from its own last one, and not all are promised yet), those
            with known tokens still to compute, and how many pages one step of the former takes. Stepwise ones whose last token
            has not been read are neither.
        """
        page_size = self._page_size
        decoding, prefilling, missing = [], [], 0
        for request in self.taken:
            computed = request.num_computed_tokens
            if computed < request.num_prefill_tokens:
                prefilling.append(request)
            elif request.num_left > 0 and not (request.stepwise and request.num_in_flight):
                decoding.append(request)
                missing += computed >= page_size * len(request.pages)
        return decoding, prefilling, missing

    def check_integrity(self, launches: Iterable[ScheduledBatch]) -> None:
        """Assert that every row is free or has one request, whose counts match what `launches`, all that are in flight, promise
        and what its pages hold."""
        assert sorted([request.row for request in self.taken] + self._free) == list(range(self.num_rows))
        promised = Counter[Request]()
        for batch in launches:
            promised.update({row.request: row.samples for row in batch.rows})
        for request in self.taken:
            assert request.state is RequestState.RUNNING
            assert request.num_in_flight == promised[request]
            assert len(request.output_ids) + request.num_in_flight + request.num_left == request.limit
            assert request.num_computed_tokens <= request.num_tokens + request.num_in_flight
            assert self._page_size * len(request.pages) >= max(request.num_computed_tokens, request.num_prefill_tokens)
