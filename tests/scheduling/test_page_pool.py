"""The page pool against a model of it: plain sets of who holds what."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmjax.scheduling.page_pool import NULL_PAGE, OutOfPagesError, PagePool


def test_pages_are_handed_out_in_order_and_come_back_in_the_order_given():
    pool = PagePool(num_pages=6, page_size=16)
    assert pool.allocate(3) == [1, 2, 3]
    pool.free([2, 1])
    assert pool.allocate(4) == [4, 5, 2, 1]
    assert (pool.num_free, pool.num_used, pool.capacity) == (0, 5, 5)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens, pages):
    assert PagePool(2, 16).pages_for(tokens) == pages


def test_allocation_is_all_or_nothing():
    pool = PagePool(num_pages=4, page_size=16)
    pool.allocate(1)
    with pytest.raises(OutOfPagesError, match="3 pages asked, 2 of 3 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    assert pool.allocate(0) == []


def test_a_shared_page_is_free_only_when_every_holder_gave_it_up():
    pool = PagePool(num_pages=3, page_size=16)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.free(pages)
    assert (pool.num_free, pool.holders(pages[0])) == (1, 1)
    pool.free(pages)
    assert (pool.num_free, pool.holders(pages[0])) == (2, 0)


def test_double_free_and_touching_the_null_page_are_bugs():
    pool = PagePool(num_pages=3, page_size=16)
    pages = pool.allocate(1)
    pool.free(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.free(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.share(pages)
    with pytest.raises(AssertionError):
        pool.free([NULL_PAGE])
    pool.check_integrity()


def test_pages_with_a_key_go_last_and_the_longest_unused_first():
    pool = PagePool(num_pages=6, page_size=16)
    pages = pool.allocate(4)
    for page in (1, 2, 3):
        pool.commit(page, b"%d" % page)
    pool.free(pages)
    assert (pool.num_free, pool.num_kept) == (5, 3)
    found = pool.find(b"1")
    assert found == 1
    pool.share([found])
    pool.free([found])  # used again: now the last to go
    assert pool.allocate(4) == [5, 4, 2, 3]
    assert [pool.find(b"%d" % page) for page in (1, 2, 3)] == [1, None, None]


def test_the_first_page_of_a_content_stays_the_one_that_is_found():
    pool = PagePool(num_pages=4, page_size=16)
    first, second = pool.allocate(2)
    pool.commit(first, b"same")
    pool.commit(second, b"same")
    assert (pool.find(b"same"), pool.has_key(second)) == (first, False)
    pool.free([first, second])
    pool.forget_all()
    assert pool.find(b"same") is None
    assert pool.num_kept == 0
    assert pool.num_free == 3


def test_condemned_pages_are_told_once_when_the_last_holder_gives_them_up():
    pool = PagePool(num_pages=5, page_size=16)
    pages = pool.allocate(3)
    pool.commit(pages[0], b"key")
    pool.share(pages[:1])
    pool.condemn(pages[:2])
    assert pool.find(b"key") is None
    assert pool.take_dirty() == []
    pool.free(pages)
    assert pool.take_dirty() == [pages[1]]
    pool.free(pages[:1])
    assert (pool.take_dirty(), pool.take_dirty()) == ([pages[0]], [])


DAMAGE = [
    lambda p: p._free.append(1),
    lambda p: p._free.append(0),
    lambda p: p._free.pop(),
    lambda p: p._key_of.update({1: b"x"}),
    lambda p: p._kept.update({3: None}),
    lambda p: p._condemned.add(4),
    lambda p: p._dirty.append(1),
]


@pytest.mark.parametrize("spoil", DAMAGE)
def test_integrity_check_sees_damage(spoil):
    pool = PagePool(num_pages=5, page_size=16)
    pool.allocate(2)
    spoil(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages):
        self.pool = PagePool(num_pages, 16)
        self.holds: list[list[int]] = []  # one list a holder
        self.keys: dict[bytes, int] = {}  # what must be found
        self.bad: set[int] = set()  # condemned, held

    @rule(count=st.integers(0, 12))
    def allocate(self, count):
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(count)
            assert self.pool.num_free == free
            return
        pages = self.pool.allocate(count)
        taken = {page for hold in self.holds for page in hold}
        named = set(self.keys.values())
        if named & set(pages):
            assert self.pool.num_free == self.pool.num_kept, "a findable page was taken while others were free"
        self.keys = {key: page for key, page in self.keys.items() if page not in pages}
        assert len(pages) == len(set(pages)) == count
        assert not taken & set(pages)
        assert NULL_PAGE not in pages
        self.holds.append(pages)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.holds))
        self.pool.share(pages)
        self.holds.append(list(pages))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1))))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def commit(self, data, key):
        page = data.draw(st.sampled_from([page for hold in self.holds for page in hold] or [0]))
        if page and not self.pool.has_key(page) and page not in self.bad:
            self.pool.commit(page, key)
            self.keys.setdefault(key, page)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share_found(self, data):
        key = data.draw(st.sampled_from(sorted(self.keys)))
        page = self.pool.find(key)
        self.pool.share([page])
        self.holds.append([page])

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.keys.clear()

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def condemn(self, data):
        pages = data.draw(st.sampled_from(self.holds))
        self.pool.condemn(pages)
        self.bad |= set(pages)
        self.keys = {key: page for key, page in self.keys.items() if page not in pages}

    @invariant()
    def dirty_pages_are_told(self):
        if hasattr(self, "pool"):
            held = {page for hold in self.holds for page in hold}
            assert set(self.pool.take_dirty()) == self.bad - held
            self.bad &= held

    @invariant()
    def contents_are_found(self):
        if hasattr(self, "pool"):
            assert {key: self.pool.find(key) for key in self.keys} == self.keys
            held = {page for hold in self.holds for page in hold}
            assert self.pool.num_kept == len(set(self.keys.values()) - held)

    @invariant()
    def counts_agree(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            counts = Counter(page for hold in self.holds for page in hold)
            assert [self.pool.holders(page) for page in range(self.pool.num_pages)] == [
                counts[page] for page in range(self.pool.num_pages)
            ]
            assert self.pool.num_used == len(counts)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPoolMachine = PoolMachine.TestCase
