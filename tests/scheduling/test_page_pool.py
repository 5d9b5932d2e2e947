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


@pytest.mark.parametrize("spoil", [lambda p: p._free.append(1), lambda p: p._free.append(0), lambda p: p._free.pop()])
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

    @invariant()
    def counts_agree(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            counts = Counter(page for hold in self.holds for page in hold)
            assert [self.pool.holders(page) for page in range(self.pool.num_pages)] == [
                counts[page] for page in range(self.pool.num_pages)
            ]
            assert self.pool.num_used == len(counts)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
