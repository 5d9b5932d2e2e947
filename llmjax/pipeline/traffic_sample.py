"""A sample of what a server's traffic log holds, in a file of its own, which does not change while the log goes on.

Knows how the log names its files (`llmjax.server.traffic_log`): one a process, numbered, and full ones renamed. Host only.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

from llmjax.errors import StoreError

NEWEST = 4
"""Of so many requests for each that is wanted, the newest ones, the sample is chosen."""


def traffic_files(path: Path) -> list[Path]:
    """Every file of the log at `path`, of all its processes, full ones too. Raises `StoreError`."""
    plain = not path.suffix or path.suffix[1:].isdecimal()
    stem, suffix = (path.name, "") if plain else (path.stem, path.suffix)
    number = r"-\d+" if plain else r"\.\d+"
    pattern = re.compile(rf"{re.escape(stem)}({number})?{re.escape(suffix)}(\.\d+)?")
    try:
        return sorted(one for one in path.parent.iterdir() if pattern.fullmatch(one.name) and one.is_file())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path.parent} cannot be read: {error.strerror or error}") from None


def write_sample(path: Path, target: Path, *, count: int, since: float, seed: int = 0) -> bool:
    """Write `count` lines of the log to `target`, in the order in which the requests came; False, and no file, when it has fewer.

    They are chosen by `seed` among the newest `NEWEST` times as many that came after `since` (Unix time). A line that is not
    one of the log's is left out. The file is its owner's alone, as the log's are. Raises `StoreError`.
    """
    newest: list[tuple[float, int, bytes]] = []
    order = itertools.count()
    try:
        for moment, line in _lines(path, since):
            entry = (moment, next(order), line)  # the number, so that lines of one moment need not be compared
            if len(newest) < NEWEST * count:
                heapq.heappush(newest, entry)
            else:
                heapq.heappushpop(newest, entry)
        if len(newest) < count:
            return False
        chosen = random.Random(seed).sample(sorted(newest), count)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(line for _, _, line in sorted(chosen))
    except OSError as error:
        raise StoreError(f"a sample of {path} cannot be made: {error.strerror or error}") from None
    return True


def _lines(path: Path, since: float) -> Iterator[tuple[float, bytes]]:
    """Time of arrival and text of each line after `since`."""
    for one in traffic_files(path):
        try:
            if one.stat().st_mtime < since:
                continue
            with open(one, "rb") as file:
                for line in file:
                    moment = _moment(line)
                    if moment is not None and moment > since:
                        yield moment, line
        except FileNotFoundError:
            continue  # renamed meanwhile: a request more or less


def _moment(line: bytes) -> float | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        return float(record["time"]) if "endpoint" in record and "output" in record else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
