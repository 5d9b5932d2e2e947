"""What all tests share: one compile cache, kept between runs; logging as nobody has set it up; no deadlines."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import jax
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a busy machine is no failure


@pytest.fixture(scope="session", autouse=True)
def _compile_cache(request: pytest.FixtureRequest) -> None:
    """The same tiny programs are compiled by many tests; XLA takes seconds for each."""
    folder = request.config.cache.mkdir("xla")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    if "slow" not in request.config.option.markexpr.replace("not slow", ""):
        jax.config.update("jax_disable_most_optimizations", True)  # compiles a third faster; the slow tests run what users run


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    """What a command line sets up writes to the stream of its own test, which is closed in the next one."""
    logger = logging.getLogger("llmjax")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
