"""`PagePool`: which pages of the KV cache are free, and how many holders each other one has.

Owns page *numbers* only. It must not know requests, rows or launches: when a page may be given back although a launch is
still running is the scheduler's business. Prefix caching will add its lookup by content here; it needs nothing but `share`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

NULL_PAGE = 0
"""Padding and ended rows write here. Never handed out, so whatever it holds is never read."""


class OutOfPagesError(RuntimeError):
    """`PagePool.allocate` was asked for more than is free. The scheduler looks at `num_free` first, so this is a bug."""


class PagePool:
    """Uniform pages `1 .. num_pages - 1` with reference counts; page 0 is the null page.

    A page is either free (in the queue, count 0) or held (count of holders at least 1). The queue is first in, first out:
    both ends cost O(1), the order depends on nothing but the calls made, and the page that was given back longest ago is
    overwritten first, which is the order in which a prefix cache wants to lose its pages.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """`num_pages` is the cache's page count P with the null page, at least 2; `page_size` is tokens a page."""
        assert num_pages >= 2, "a pool needs the null page and one more"
        assert page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: deque[int] = deque(range(1, num_pages))
        self._holders = [0] * num_pages

    @property
    def capacity(self) -> int:
        """Pages that can be handed out: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages somebody holds; a shared page counts once."""
        return self.capacity - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens from the start of a page on."""
        return -(-num_tokens // self.page_size)

    def holders(self, page: int) -> int:
        """How often `page` is held; 0 when it is free."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each then held once by the caller.

        Raises:
            OutOfPagesError: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked, {len(self._free)} of {self.capacity} free")
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages that somebody already holds once more; each holder calls `free` for itself."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is shared but nobody holds it"
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page; those without a holder are free from now on, in the order given."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is given back but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Assert that every page but the null page is either free or held, never both and never neither."""
        assert len(self._holders) == self.num_pages
        assert self._holders[NULL_PAGE] == 0, "the null page was handed out"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free queue twice"
        held = {page for page, holders in enumerate(self._holders) if holders > 0}
        assert all(holders >= 0 for holders in self._holders)
        assert not free & held, f"free and held at once: {sorted(free & held)}"
        assert free | held == set(range(1, self.num_pages)), "a page was lost, or the null page is in the free queue"
