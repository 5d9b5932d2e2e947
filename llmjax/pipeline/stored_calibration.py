"""`StoredCalibration`: what a `calibrate` stage leaves in the store: statistics, and the samples they are of. Host only."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmjax.errors import StoreError
from llmjax.pipeline.digest import write_whole

if TYPE_CHECKING:
    from llmjax.quantization.calibration import Calibration
    from llmjax.quantization.observers import Rule

STATISTICS = "calibration.npz"
_SAMPLES = "samples.npz"
_ABOUT = "about.json"


@dataclasses.dataclass(frozen=True)
class StoredCalibration:
    """A calibration that is read when it is wanted.

    Attributes:
        folder: of the stage's result.
        model_key: of the stage that gave the model.
        observer: the rule by which ranges are taken from the statistics.
        sequence_length: tokens of a sample at most.
        figures: counts for people.
    """

    folder: Path
    model_key: str
    observer: Rule
    sequence_length: int
    figures: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> StoredCalibration:
        """What `write` left in a folder. Raises `StoreError` for one that is damaged."""
        path = folder / _ABOUT
        try:
            return cls(folder, **json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{path} is damaged ({type(error).__name__}); delete {folder} to calibrate again") from None

    def write(self, statistics: Calibration, samples: Sequence[Sequence[int]]) -> None:
        """Fill the folder, which is there. Of samples what was run is kept, readable by their owner alone: they may be traffic.

        Raises `StoreError`.
        """
        import numpy as np

        statistics.save(self.folder / STATISTICS)
        cut = [list(sample[: self.sequence_length]) for sample in samples]
        lengths = np.asarray([len(sample) for sample in cut], np.int64)
        tokens = np.asarray([token for sample in cut for token in sample], np.int32)
        with open(os.open(self.folder / _SAMPLES, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            np.savez_compressed(file, tokens=tokens, lengths=lengths)
        about = {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}
        write_whole(self.folder / _ABOUT, json.dumps(about, indent=1) + "\n")

    def statistics(self) -> Calibration:
        """Of every linear's inputs. Raises `StoreError`."""
        from llmjax.quantization.calibration import Calibration

        return Calibration.load(self.folder / STATISTICS)

    def samples(self, count: int) -> list[list[int]]:
        """Token ids of the first so many samples. Raises `StoreError`."""
        import numpy as np

        path = self.folder / _SAMPLES
        try:
            with np.load(path, allow_pickle=False) as file:
                ends = np.cumsum(file["lengths"])
                return [part.tolist() for part in np.split(file["tokens"], ends)[: min(count, len(ends))]]
        except Exception as error:  # what numpy and zipfile raise for damaged files is not told
            raise StoreError(f"{path} cannot be read ({type(error).__name__}); delete {self.folder} to calibrate again") from None
