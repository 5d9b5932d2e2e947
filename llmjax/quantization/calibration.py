"""`Calibration`: what a calibration collected, as numpy arrays that are saved and read again. Host only; runs no model."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmjax.errors import StoreError
from llmjax.quantization.log_bins import NUM_BINS
from llmjax.quantization.observers import Observer

_FORMAT = 1
_ABOUT = "about"
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)
"""What reading an archive with wrong bytes raises."""


@dataclasses.dataclass(frozen=True)
class LinearStatistics:
    """What went into one linear.

    Attributes:
        tensor: over all values.
        token: over each token's largest magnitude.
        channel_absmax: float32 [in], exact, updated in place. A histogram a channel would take thousands of times its memory,
            and no scheme has a scale for each input channel: smoothing needs these alone.
    """

    tensor: Observer
    token: Observer
    channel_absmax: np.ndarray

    @classmethod
    def empty(cls, channels: int) -> LinearStatistics:
        """Of a linear that has seen nothing."""
        return cls(Observer("tensor"), Observer("token"), np.zeros(channels, np.float32))


@dataclasses.dataclass
class Calibration:
    """Statistics of a model's activations over some samples. Grows while samples are run.

    Attributes:
        identity: digest of what it is made of: model, samples, settings.
        linears: by name, as in "layers.0.attention.qkv".
        lengths: int64 [NUM_BINS], a histogram of the samples' lengths in tokens as given, before any was cut.
        samples, tokens: that were run.
        cut: samples longer than the sequence length, of which only the beginning was run.
        empty: samples without a token, left out.
    """

    identity: str
    linears: dict[str, LinearStatistics]
    lengths: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    samples: int = 0
    tokens: int = 0
    cut: int = 0
    empty: int = 0

    def save(self, path: Path) -> None:
        """Replace the file by this in one step: it is never there in part. Raises `StoreError`."""
        arrays: dict[str, Any] = {"lengths": self.lengths}
        for name, linear in self.linears.items():
            for part, value in _parts(linear).items():
                arrays[f"{name}/{part}"] = value
        numbers = {name: getattr(self, name) for name in ("identity", "samples", "tokens", "cut", "empty")}
        about = json.dumps({"format": _FORMAT, "linears": list(self.linears)} | numbers)
        arrays[_ABOUT] = np.frombuffer(about.encode(), np.uint8)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            try:
                with open(aside, "xb") as file:
                    np.savez_compressed(file, **arrays)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(aside)
                raise
        except OSError as error:
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from None

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """The calibration in a file. Raises `StoreError` when it cannot be read, is damaged, or is of another format."""
        try:
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            about = json.loads(arrays[_ABOUT].tobytes())
            if about["format"] != _FORMAT:
                raise StoreError(f"{path} has format {about['format']}, and this llmjax reads {_FORMAT}: calibrate again")
            linears = {name: _statistics(arrays, name) for name in about["linears"]}
            numbers = {name: about[name] for name in ("identity", "samples", "tokens", "cut", "empty")}
            return cls(linears=linears, lengths=arrays["lengths"].astype(np.int64), **numbers)
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
        except _DAMAGE as error:
            raise StoreError(
                f"{path} is damaged or no calibration ({type(error).__name__}): delete it, calibrate again"
            ) from None


def _parts(linear: LinearStatistics) -> dict[str, np.ndarray]:
    observers = {"tensor": linear.tensor, "token": linear.token}
    parts = {f"{name}.{part}": value for name, observer in observers.items() for part, value in observer.arrays().items()}
    return parts | {"channel_absmax": linear.channel_absmax}


def _statistics(arrays: Mapping[str, np.ndarray], name: str) -> LinearStatistics:
    def observer(granularity: Any) -> Observer:
        return Observer.restored(granularity, {part: arrays[f"{name}/{granularity}.{part}"] for part in ("counts", "absmax")})

    return LinearStatistics(observer("tensor"), observer("token"), arrays[f"{name}/channel_absmax"].astype(np.float32))
