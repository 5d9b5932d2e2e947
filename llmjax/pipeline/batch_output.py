"""The results of a batch on disk: JSON lines that only grow, and the state file beside them that says what they answer.

What makes a run repeatable after a kill at any moment:
- `<output>.state.json` (the input's digest and the settings) is complete before the first result is written.
- A result is one line, appended in one piece; a last line without its end, or that is no JSON, was torn and is cut.
- What is done is read from the results themselves, so there is nothing that could disagree with them.
- The output is locked while a run appends to it, so that two runs cannot double a result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from llmjax.errors import StoreError

STATE_VERSION = 1
Resume = Literal[True, False, "replace"]


@dataclasses.dataclass
class Done:
    """What the results of an earlier run cover: ids, and the numbers of lines whose record has no id."""

    ids: set[str] = dataclasses.field(default_factory=set)
    lines: set[int] = dataclasses.field(default_factory=set)

    def __len__(self) -> int:
        return len(self.ids) + len(self.lines)


class ResultFile:
    """A JSONL file open for appending, locked, every line whole. Raises `StoreError` for whatever the disk refuses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[bytes] = []
        with _disk(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise StoreError(f"{path} is being written by another run: wait for it, or choose another output") from None
        with _disk(path):
            self._size = os.fstat(self._fd).st_size

    @property
    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return self._size == 0

    def clear(self) -> None:
        """Remove all results."""
        self._cut(0)

    def recover(self, done: Done, id_field: str) -> None:
        """Cut a torn last line, and add what the whole ones cover to `done`."""
        with _disk(self.path), open(self.path, "rb") as file:
            good = 0
            for number, data in enumerate(file, 1):
                record = _record(data)
                if record is None:
                    if file.read(1):
                        raise StoreError(
                            f"{self.path}:{number} is not a result: mend or move the file, or start over with resume: replace"
                        )
                    break
                good += len(data)
                name, line = record.get(id_field), record.get("line")
                if isinstance(name, str):
                    done.ids.add(name)
                elif isinstance(line, int):
                    done.lines.add(line)
        if good < self._size:
            self._cut(good)

    def append(self, record: Mapping[str, Any]) -> None:
        """Hold a result until the next `sync`."""
        self._waiting.append(json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """Write what is held and wait until the disk has it. After an error the file ends with the last whole line it had."""
        data = b"".join(self._waiting)
        if not data:
            return
        try:
            with _disk(self.path):
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                os.fsync(self._fd)
        except StoreError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)
        self._waiting.clear()

    def close(self) -> None:
        """Unlock and close. Results that were not synced are dropped."""
        os.close(self._fd)

    def _cut(self, size: int) -> None:
        with _disk(self.path):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
            self._size = size


class BatchOutput:
    """Results, and failed lines in a file of their own if one is given. Opening it settles what `resume` says.

    Args:
        output, errors: where to write; without `errors`, failed lines are in the output too.
        resume: for an output that exists: True continues it, "replace" empties it, False is an error.
        state: the input's digest and every setting that the results depend on. On resuming they must be as they were.
        id_field: the field of a result that holds the caller's id.

    Attributes:
        done: what an earlier run has answered; empty unless resumed.
    """

    def __init__(self, output: Path, errors: Path | None, *, resume: Resume, state: Mapping[str, Any], id_field: str) -> None:
        if errors is not None and os.path.abspath(errors) == os.path.abspath(output):
            raise StoreError(f"output and errors are both {output}: name two files, or leave errors out")
        self.done = Done()
        self._files: list[ResultFile] = []
        try:
            for path in (output, errors) if errors is not None else (output,):
                self._files.append(ResultFile(path))
            self._settle(Path(f"{output}.state.json"), resume, _as_json({"version": STATE_VERSION, **state}), id_field)
        except BaseException:
            self.close()
            raise

    def add(self, record: Mapping[str, Any], *, failed: bool) -> None:
        """Hold a record until the next `sync`."""
        self._files[-1 if failed else 0].append(record)

    def sync(self) -> None:
        """Put everything added on the disk."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Unlock and close the files."""
        for file in self._files:
            file.close()

    def _settle(self, state_path: Path, resume: Resume, state: Mapping[str, Any], id_field: str) -> None:
        used = [file for file in self._files if not file.empty]
        if used and resume is False:
            raise StoreError(
                f"{used[0].path} exists: resume: true does what is missing, resume: replace starts over; or choose another output"
            )
        if used and resume is True:
            _check_state(state_path, used[0].path, state)
            for file in self._files:
                file.recover(self.done, id_field)
            return
        for file in used:
            file.clear()
        _write_state(state_path, state)


def _check_state(path: Path, output: Path, state: Mapping[str, Any]) -> None:
    try:
        old = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(
            f"{output} has no {path.name} beside it, so it cannot be resumed; start over with resume: replace"
        ) from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}); start over with resume: replace") from None
    changed = [name for name in state if not isinstance(old, dict) or old.get(name) != state[name]]
    if changed:
        raise StoreError(
            f"{output} was begun with another {' and '.join(changed)}: restore it to resume, or start over with resume: replace"
        )


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write aside, then rename: the state file is whole or absent."""
    aside = path.with_name(path.name + ".tmp")
    with _disk(path):
        try:
            with open(aside, "w", encoding="utf-8") as file:
                json.dump(state, file, ensure_ascii=False, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _as_json(state: dict[str, Any]) -> dict[str, Any]:
    """What comes back from the disk: lists for tuples, strings for keys."""
    return dict(json.loads(json.dumps(state)))


def _record(data: bytes) -> dict[str, Any] | None:
    if not data.endswith(b"\n"):
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from None
