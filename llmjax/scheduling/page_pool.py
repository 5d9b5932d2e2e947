"""`PagePool`: which pages of the KV cache are free, how many holders each other one has, and which contents are findable.

Owns page *numbers*, and the keys that name their contents (`commit`, `find`); what a key is made of is `PrefixCache`'s. It must
not know requests, rows or launches: when a page may be given back although a launch is still running is the scheduler's business.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

NULL_PAGE = 0
"""Padding and ended rows write here. Never handed out, so whatever it holds is never read."""


class OutOfPagesError(RuntimeError):
    """`PagePool.allocate` was asked for more than is free. The scheduler looks at `num_free` first, so this is a bug."""


class PagePool:
    """Uniform pages `1 .. num_pages - 1` with reference counts; page 0 is the null page.

    A page is either free (count 0) or held (count of holders at least 1). A page may have a key, held or free: whoever asks
    for the key finds it, until a free one is handed out for something else. Free pages without a key go first, in
    the order they were given back; then those with one, the longest unused first. All calls cost O(1) a page, and the order
    depends on nothing but the calls made. Without keys the pool is a plain queue.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """`num_pages` is the cache's page count P with the null page, at least 2; `page_size` is tokens a page."""
        assert num_pages >= 2, "a pool needs the null page and one more"
        assert page_size >= 1
        self.num_pages = num_pages
        self.page_size = page_size
        self._free: deque[int] = deque(range(1, num_pages))  # without a key
        self._kept: OrderedDict[int, None] = OrderedDict()  # free with a key, least recently used first
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._condemned: set[int] = set()  # held, to be zeroed once they are free
        self._dirty: list[int] = []  # free, to be zeroed

    @property
    def capacity(self) -> int:
        """Pages that can be handed out: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages nobody holds, whether their content can be found or not."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages somebody holds; a shared page counts once."""
        return self.capacity - self.num_free

    @property
    def num_kept(self) -> int:
        """Free pages whose content can still be found."""
        return len(self._kept)

    @property
    def num_shared(self) -> int:
        """Pages that several hold."""
        return self.num_pages - self._holders.count(0) - self._holders.count(1)

    def uses(self) -> tuple[list[int], list[int]]:
        """How often each page is held, by number, and the numbers of those whose content can be found. For a person to see."""
        return list(self._holders), list(self._key_of)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens from the start of a page on."""
        return -(-num_tokens // self.page_size)

    def holders(self, page: int) -> int:
        """How often `page` is held; 0 when it is free."""
        return self._holders[page]

    def has_key(self, page: int) -> bool:
        """Whether the content of `page` can be found."""
        return page in self._key_of

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each then held once by the caller, to be written: their keys are gone.

        Raises:
            OutOfPagesError: fewer are free; nothing was taken.
        """
        if count > self.num_free:
            raise OutOfPagesError(f"{count} pages asked, {self.num_free} of {self.capacity} free")
        plain = min(count, len(self._free))
        pages = [self._free.popleft() for _ in range(plain)]
        for _ in range(count - plain):
            page, _ = self._kept.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            pages.append(page)
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Hold pages once more that somebody holds, or that were found by their key, to be read; each holder calls `free`."""
        for page in pages:
            if self._holders[page] == 0:
                assert page in self._kept, f"page {page} is shared but nobody holds it and it has no key"
                del self._kept[page]
            self._holders[page] += 1

    def free(self, pages: Sequence[int]) -> None:
        """Give up one hold on each page; those without a holder are free from now on, in the order given.

        Give a sequence's pages in reverse: its last page is of use only to those who find all before it.
        """
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is given back but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of:
                    self._kept[page] = None
                else:
                    self._free.append(page)
                    if page in self._condemned:
                        self._condemned.remove(page)
                        self._dirty.append(page)

    # Contents

    def commit(self, page: int, key: bytes) -> None:
        """Name the content of a held page, which nobody may write to any more. A key that already has a page keeps that one."""
        assert self._holders[page] > 0, f"page {page} is named but nobody holds it"
        assert page not in self._key_of, f"page {page} has a key already"
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def find(self, key: bytes) -> int | None:
        """The page with this content, held or free; `share` it before anything is allocated."""
        return self._page_of.get(key)

    def forget(self, pages: Sequence[int]) -> None:
        """The content of these pages is not to be found any more. Those without a key are passed over."""
        for page in pages:
            key = self._key_of.pop(page, None)
            if key is not None:
                del self._page_of[key]
                if page in self._kept:
                    del self._kept[page]
                    self._free.append(page)

    def forget_all(self) -> None:
        """No content is to be found any more."""
        self.forget(list(self._key_of))

    def condemn(self, pages: Sequence[int]) -> None:
        """What these held pages contain must not reach anyone: it is not found any more, and is zeroed when nobody holds it."""
        self.forget(pages)
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is condemned but nobody holds it"
            self._condemned.add(page)

    def take_dirty(self) -> list[int]:
        """Condemned pages that have become free since the last call: the caller zeroes them before the next launch."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def check_integrity(self) -> None:
        """Assert that every page but the null page is either free or held, never both and never neither; and that keys and
        pages name each other."""
        assert len(self._holders) == self.num_pages
        assert self._holders[NULL_PAGE] == 0, "the null page was handed out"
        free = {*self._free, *self._kept}
        assert len(free) == self.num_free, "a page is free twice"
        held = {page for page, holders in enumerate(self._holders) if holders > 0}
        assert all(holders >= 0 for holders in self._holders)
        assert not free & held, f"free and held at once: {sorted(free & held)}"
        assert free | held == set(range(1, self.num_pages)), "a page was lost, or the null page is free"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "keys and pages do not match"
        assert all(page in self._key_of for page in self._kept), "a page is kept but cannot be found"
        assert not any(page in self._key_of for page in self._free), "a page with a key is queued with those without"
        assert self._condemned <= held - self._key_of.keys(), "a condemned page is free, or can be found"
        assert free.issuperset(self._dirty), "a page was handed out before it was zeroed"
