"""`HeldPages`: how requests come by their pages, and when they lose them although launches are still running.

Owns the pages of ended requests until the last launch that may touch them has been read, and when each page was taken. Decides
nothing: who gets pages is the scheduler's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmjax.scheduling.page_map import PageUse, page_uses
from llmjax.scheduling.page_pool import PagePool
from llmjax.scheduling.request import Request


class HeldPages:
    """The pages of `pool` that requests hold."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._releases: list[tuple[int, list[int], Request]] = []  # (step id, pages to free once its result was read, whose)
        self._taken_at = [0] * pool.num_pages  # by page: the step that took it last, to be written

    def take(self, request: Request, num_tokens: int, step_id: int, *, all_new: bool = False) -> Sequence[tuple[int, int]]:
        """Pages for `num_tokens` tokens of a request in all, for launch `step_id`.

        Returns:
            the new ones as (index, page); with `all_new` all of the row.
        """
        held = len(request.pages)
        pages = self._pool.allocate(max(0, self._pool.pages_for(num_tokens) - held))
        for page in pages:
            self._taken_at[page] = step_id
        request.pages += pages
        return list(enumerate(request.pages)) if all_new else list(enumerate(pages, held))

    def give_back(self, request: Request, oldest: int | None) -> None:
        """A request loses its pages: at once if no launch from step `oldest` on (None: nothing is in flight) may touch them, else
        when the last of these has been read."""
        if oldest is not None and request.last_step >= oldest:
            self._releases.append((request.last_step, request.pages, request))
        else:
            self._pool.free(request.pages[::-1])
        request.pages = []

    def release_until(self, step_id: int) -> None:
        """Free the pages no launch after `step_id` can touch."""
        for last_step, pages, _ in self._releases:
            if last_step <= step_id:
                self._pool.free(pages[::-1])
        self._releases = [release for release in self._releases if release[0] > step_id]

    def condemn(self, request: Request) -> None:
        """The request's logits were not finite: its pages may hold NaN, be it running or ended with a launch still in flight."""
        self._pool.condemn(request.pages)
        for _, pages, owner in self._releases:
            if owner is request:
                self._pool.condemn(pages)

    def uses(self, running: Sequence[Request], step_id: int) -> list[PageUse]:
        """Every page that is held, or that the prefix cache finds, before launch `step_id`."""
        owners: dict[int, list[str]] = {}
        held = [(r.request_id, r.pages) for r in running] + [(r.request_id, pages) for _, pages, r in self._releases]
        for request_id, pages in held:
            for page in pages:
                owners.setdefault(page, []).append(request_id)
        return page_uses(self._pool, owners, [step_id - step for step in self._taken_at])

    def check_integrity(self, running: Sequence[Request], launches: set[int]) -> None:
        """Assert that the pool and the requests know of the same pages; `launches` are in flight."""
        self._pool.check_integrity()
        held = Counter(page for r in running for page in r.pages)
        held.update(page for _, pages, _ in self._releases for page in pages)
        assert len(held) == self._pool.num_used, "pages are held that no request and no pending release knows"
        assert all(self._pool.holders(page) == count for page, count in held.items())
        assert all(last_step in launches for last_step, _, _ in self._releases), "a release waits for a launch that is over"
