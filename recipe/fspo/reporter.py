"""What a trainer of this recipe says and writes beside verl's metrics: under plain verl, beside verl's checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omegaconf import DictConfig

from fspo.files import write_json
from fspo.records import append_records

#: What the training has measured, in JSON.
NOTES_FILE: Final = "fspo.json"


class Reporter:
    """Prints, and writes into ``trainer.default_local_dir``.

    The runner's has the same methods and writes into its run folder.
    """

    def __init__(self, config: DictConfig) -> None:
        #: Folder of the table of responses and of all other records.
        self.folder = Path(config.trainer.default_local_dir)
        self._facts: dict[str, Any] = {}

    def say(self, text: str) -> None:
        """Tell the person who watches."""
        print(text, flush=True)

    def note(self, **facts: Any) -> None:
        """Keep facts that are known only once the training is under way."""
        self._facts |= facts
        with self.writing(self.folder / NOTES_FILE) as path:
            write_json(path, self._facts, allow_nan=True)

    def append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Append records to one of the folder's files, a line each."""
        with self.writing(self.folder / name) as path:
            append_records(path, records)

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[Path]:
        """Around a write to this path, whose error may be explained."""
        yield path
