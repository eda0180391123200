"""What a file of a run gained since the last look, in pieces that hold nobody up."""

from __future__ import annotations

from wamlab.lab.records import Record, read_lines
from wamlab.lab.run import Run

PIECE_BYTES = 1 << 20  # about 3,000 step records, decoded in some 20 ms


class Tail:
    """Reads what one of a run's files gained since the last look, and notices when it was cut back."""

    def __init__(self, run: Run, name: str = "metrics.jsonl", *, num_bytes: int = -1) -> None:
        self._path = run.folder / name
        self._num_bytes = num_bytes
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self.has_more = False  # whether the last reading stopped at ``num_bytes``

    def read(self) -> tuple[list[Record], bool]:
        """Return new records, and whether they replace all earlier ones (the run was resumed)."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self.has_more = False
            return [], False
        identity = (found.st_dev, found.st_ino)
        is_restarted = self._identity not in (None, identity) or found.st_size < self._offset
        self._identity = identity
        since = 0 if is_restarted else self._offset
        if since == found.st_size and not is_restarted:
            self.has_more = False
            return [], False
        records, self._offset = read_lines(self._path, since, num_bytes=self._num_bytes)
        self.has_more = 0 < self._num_bytes <= found.st_size - since
        return records, is_restarted
