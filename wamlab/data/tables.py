"""The rows of an episode as numpy columns, from the parquet file that holds them among others."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from jaxtyping import UInt8
from pyarrow.fs import LocalFileSystem

from wamlab.errors import InputError


def open_table(path: Path, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    """Open a parquet file; InputError when it is missing or none."""
    if not path.exists():
        raise InputError(f"{path} is missing although the metadata lists it")
    with _explained(path):
        return pq.ParquetFile(path, metadata=metadata)


@dataclass(frozen=True)
class Footer:
    """What a parquet file's end says, read once: its metadata and which row groups may hold what."""

    metadata: pq.FileMetaData
    fragment: ds.ParquetFileFragment

    def groups_of(self, episode_index: int) -> list[int]:
        """Return the row groups whose statistics do not exclude an episode.

        Asked of the dataset API: to look at statistics one by one ends the process where they are damaged (PyArrow 25).
        """
        if "episode_index" not in self.fragment.physical_schema.names:
            return [*range(self.metadata.num_row_groups)]
        fitting = self.fragment.subset(ds.field("episode_index") == episode_index)
        return [group.id for group in fitting.row_groups]


def read_footer(path: Path) -> Footer:
    """Read a parquet file's metadata; InputError when it is missing or no such file."""
    metadata = open_table(path).metadata
    with _explained(path):
        return Footer(metadata, ds.ParquetFileFormat().make_fragment(str(path), filesystem=LocalFileSystem()))


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise InputError for what PyArrow makes of a damaged file."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, OverflowError, UnicodeDecodeError, MemoryError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read {path}: {error}") from error


def read_episode(path: Path, footer: Footer, episode_index: int, columns: Sequence[str]) -> pa.Table:
    """Read an episode's rows, touching only row groups whose statistics do not exclude it.

    One thread: callers read from many, and Arrow's pool does not survive a fork.
    """
    file = open_table(path, footer.metadata)
    names = list(dict.fromkeys([*columns, "episode_index"]))
    names = [name for name in names if name in file.schema_arrow.names]
    with _explained(path):
        table = file.read_row_groups(footer.groups_of(episode_index), columns=names, use_threads=False)
    if "episode_index" in names:
        is_wanted = table["episode_index"].to_numpy() == episode_index
        if not is_wanted.all():
            table = table.filter(pa.array(is_wanted))
    return table


def as_array(column: pa.ChunkedArray, where: str) -> np.ndarray:
    """Turn a column into float32 or int64 [t], [t, dim], or strings; InputError on gaps and ragged lists."""
    array = column.combine_chunks()
    widths: list[int] = []
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or _is_fixed(array.type):
        rows = len(array)
        if array.null_count:
            raise InputError(f"{where} has empty rows")
        flat = array.flatten()
        if (rows and len(flat) % rows) or (not _is_fixed(array.type) and _is_ragged(array)):
            raise InputError(f"{where} has rows of different lengths")
        widths.append(len(flat) // rows if rows else 0)
        array = flat
    if array.null_count:
        raise InputError(f"{where} has empty rows")
    shape = (len(column), int(np.prod(widths))) if widths else (len(column),)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return np.array(array.to_pylist(), dtype=object).reshape(shape)
    if pa.types.is_floating(array.type):
        return array.to_numpy(zero_copy_only=False).astype(np.float32).reshape(shape)
    if pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        return array.to_numpy(zero_copy_only=False).astype(np.int64).reshape(shape)
    raise InputError(f"{where} holds {array.type}, need numbers or strings")


def _is_fixed(kind: pa.DataType) -> bool:
    return pa.types.is_fixed_size_list(kind)


def _is_ragged(array: pa.ListArray) -> bool:
    return len(np.unique(np.diff(array.offsets.to_numpy()))) > 1


def decode_images(column: pa.ChunkedArray, where: str, rows: Sequence[int]) -> UInt8[np.ndarray, "n h w 3"]:
    """Decode the PNG or JPEG bytes of an image column, whose cells are of the given rows of its table."""
    from PIL import Image  # only datasets with images in their tables need it

    images = []
    for row, cell in zip(rows, column.to_pylist(), strict=True):
        data = cell.get("bytes") if isinstance(cell, dict) else cell
        if not data:
            raise InputError(f"{where} has no image bytes in row {row}")
        try:
            with Image.open(io.BytesIO(data)) as image:
                images.append(np.asarray(image.convert("RGB")))
        except OSError as error:
            raise InputError(f"{where} has a damaged image in row {row}: {error}") from error
    if len({image.shape for image in images}) > 1:
        raise InputError(f"{where} has images of different sizes")
    return np.stack(images)
