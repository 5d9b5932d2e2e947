"""Which implementation serves a shape on a device: measurements kept as data, one JSON file a device kind.

Owns the files beside this module (`nvidia_h200.json`), how they are read and written, and for which device a trace is. Must not
know what an operation computes, nor what the fields of a configuration mean. `bench/kernels.py --tune` writes the files.

A key is a flat mapping of a call's shape. Sizes that a program pads anyway are rounded up to the next tuned one, the rows
before the context:

- `tokens`, `queries`: nothing is known beyond the largest tuned value, so such a call has no entry;
- `rows`, `context`: what is right for the largest tuned value stays right beyond it, where no entry has as much of both (a few
  rows of a long context are divided otherwise than as many of a short one).

Every other field must be equal.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

import jax
from jax.sharding import AbstractDevice

Key = Mapping[str, int | str]

FOLDER = Path(__file__).parent

_BOUNDED = ("tokens", "queries")
_OPEN_ENDED = ("rows", "context")
_ROUNDED = (*_BOUNDED, *_OPEN_ENDED)  # one after the other: the contexts tuned for the rows that were found


class Entry(TypedDict):
    """What was measured for one shape.

    Attributes:
        key: the shape.
        implementation: the name of the fastest.
        config: fields of its configuration; empty for the reference.
        microseconds, xla_microseconds: device time of a call of the fastest and of the reference.
        bytes_per_second: bytes a call must move over `microseconds`.
        date, command: when and how it was measured.
    """

    key: dict[str, int | str]
    implementation: str
    config: dict[str, int | str | bool]
    microseconds: float
    xla_microseconds: float
    bytes_per_second: float
    date: str
    command: str


Table = Mapping[str, tuple[Entry, ...]]
"""Entries by the operation's name."""


def target() -> str | None:
    """Device kind the current trace is for: that of the abstract mesh in force if it names a device, else the default device's
    when it is a GPU. None on a CPU. Starts the backend unless a mesh answers."""
    device = _gpu()
    return None if device is None else device.device_kind


def cores() -> int | None:
    """Multiprocessors of the device that `target` finds; None on a CPU, and where it is not told."""
    device = _gpu()
    return device.num_cores if isinstance(device, AbstractDevice) else getattr(device, "core_count", None)


def _gpu() -> AbstractDevice | jax.Device | None:
    device: AbstractDevice | jax.Device | None = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        default = jax.config.jax_default_device
        device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return device if device.platform == "gpu" else None


def lookup(operation: str, key: Key) -> Entry | None:
    """The entry of an operation for a shape on `target()`; None on a CPU, on an untuned device and for an untuned shape."""
    return _find(entries(operation), key)


def entries(operation: str) -> tuple[Entry, ...]:
    """All entries of an operation on `target()`."""
    kind = target()
    return () if kind is None else load(path_of(kind)).get(operation, ())


def path_of(device_kind: str) -> Path:
    """Where the table of a device kind lies: "NVIDIA H200" has `nvidia_h200.json`."""
    return FOLDER / f"{device_kind.lower().replace(' ', '_').replace('/', '_')}.json"


@functools.cache
def load(path: Path) -> Table:
    """The table in a file; empty where there is none. Read once: a file does not change under a running process."""
    if not path.is_file():
        return {}
    return {name: tuple(found) for name, found in json.loads(path.read_text())["operations"].items()}


def save(path: Path, device_kind: str, new: Mapping[str, Iterable[Entry]]) -> None:
    """Puts entries into a file: one replaces the entry of its operation and key, all others stay as they are.

    The file is the same for the same entries, whatever their order: sorted, one line an entry.
    """
    load.cache_clear()
    table = {name: list(found) for name, found in load(path).items()}
    for name, found in new.items():
        replaced = {_sort_key(entry["key"]): entry for entry in (*table.get(name, ()), *found)}
        table[name] = [replaced[key] for key in sorted(replaced)]
    lines = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(entry, sort_keys=True)}" for entry in found) + "\n  ]"
        for name, found in sorted(table.items())
        if found
    ]
    text = f'{{\n "device": {json.dumps(device_kind)},\n "operations": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text)
    load.cache_clear()


def _find(found: Iterable[Entry], key: Key) -> Entry | None:
    exact = {name: value for name, value in key.items() if name not in _ROUNDED}
    left = [
        entry
        for entry in found
        if entry["key"].keys() == key.keys() and all(entry["key"][name] == value for name, value in exact.items())
    ]
    rounded = [name for name in _ROUNDED if name in key]
    left = [entry for entry in left if all(entry["key"][name] >= key[name] for name in rounded)] or left
    for name in rounded:
        sizes = sorted({entry["key"][name] for entry in left})
        fitting = [size for size in sizes if size >= key[name]] or (sizes[-1:] if name in _OPEN_ENDED else [])
        if not fitting:
            return None
        left = [entry for entry in left if entry["key"][name] == fitting[0]]
    return left[0] if left else None


def _sort_key(key: Key) -> tuple[tuple[str, str, int | str], ...]:
    return tuple((name, type(value).__name__, value) for name, value in sorted(key.items()))
