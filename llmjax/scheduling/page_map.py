"""Who holds which page, for a person who looks for where the memory went. Plain data; nothing is decided by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llmjax.scheduling.page_pool import PagePool


@dataclasses.dataclass(frozen=True, slots=True)
class PageUse:
    """A page that somebody holds, or that is free with a content that can still be found.

    Attributes:
        page: its number.
        owners: ids of the requests that hold it, each choice by itself ("id/choice"); several share a prefix. Requests that
            have ended hold their pages until the last launch that may touch them has been read.
        holders: the pool's count; not the number of owners only if there is a leak.
        age: launches since it was handed out to be written.
        findable: whether the prefix cache finds its content.
    """

    page: int
    owners: tuple[str, ...]
    holders: int
    age: int
    findable: bool

    @property
    def shared(self) -> bool:
        """Whether several requests read it."""
        return self.holders > 1

    def to_json(self) -> dict[str, Any]:
        """The attributes, fit for `json.dumps`."""
        return {
            "page": self.page,
            "owners": list(self.owners),
            "holders": self.holders,
            "age": self.age,
            "findable": self.findable,
        }


def page_uses(pool: PagePool, owners: Mapping[int, Sequence[str]], ages: Sequence[int]) -> list[PageUse]:
    """Every page that is held or can be found, by number. `owners` are those the scheduler knows, `ages` are by page."""
    return [
        PageUse(page, tuple(owners.get(page, ())), pool.holders(page), ages[page], pool.has_key(page))
        for page in range(1, pool.num_pages)
        if pool.holders(page) or pool.has_key(page)
    ]
