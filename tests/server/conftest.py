"""The scripted model behind a server, made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes_text import plain_byte_tokenizer
from scripted_model import Scripted
from served import TEMPLATE, Served


@pytest.fixture(scope="session")
def scripted() -> Scripted:
    return Scripted(plain_byte_tokenizer(chat_templates={"default": TEMPLATE}), kv_cache_bytes=64 * 1024)


@pytest.fixture
def served(scripted: Scripted) -> Iterator[Served]:
    """A server whose engine is left without requests and without pages in use."""
    one = Served(scripted.engine)
    yield one
    one.stop()
    engine = scripted.engine
    while engine.has_unfinished:
        engine.step()
    engine.scheduler.check_integrity()
    assert engine.pool.num_used == 0
