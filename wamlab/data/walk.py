"""All rows of a dataset, one file after another and each read once, for whoever needs every episode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from wamlab.data.lerobot import RobotDataset
from wamlab.data.tables import open_table
from wamlab.errors import InputError

ROWS_AT_ONCE = 2**14


def walk_tables(
    dataset: RobotDataset, columns: Sequence[str], episodes: Sequence[int] | None = None
) -> Iterator[tuple[int, pa.Table]]:
    """Yield each episode and its rows, in the order of the files; columns that a file lacks are left out.

    Memory holds one episode and one batch of rows, whatever the row groups. Raises InputError for a table that is
    missing or damaged, and for an episode whose rows are not together or not as many as the list says.
    """
    found: dict[Path, dict[int, int]] = {}
    for episode in range(dataset.num_episodes) if episodes is None else sorted(episodes):
        path = dataset.table_path(episode)
        found.setdefault(path, {})[int(dataset.episode_index[episode])] = episode
    for path, listed in found.items():
        missing = dict(listed)
        for index, table in _episodes_of(path, columns):
            episode = next(iter(listed.values())) if index is None else listed.get(index)
            if episode is None:  # not asked for, or not listed
                continue
            if int(dataset.episode_index[episode]) not in missing:
                raise InputError(f"the rows of episode {episode} are in several places of {path}: sort them")
            if len(table) != (length := int(dataset.lengths[episode])):
                raise InputError(
                    f"episode {episode} has {len(table)} rows together in {path}, the episode list says {length}"
                )
            del missing[int(dataset.episode_index[episode])]
            yield episode, table
        if missing:
            raise InputError(f"{path} has no rows of episode {min(missing.values())}, which the episode list has there")


def _episodes_of(path: Path, columns: Sequence[str]) -> Iterator[tuple[int | None, pa.Table]]:
    """Yield runs of rows with the same episode_index; all rows under None where the file has no such column."""
    file = open_table(path)
    names = [name for name in dict.fromkeys([*columns, "episode_index"]) if name in file.schema_arrow.names]
    parts: list[pa.Table] = []
    current: int | None = None
    try:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=names, use_threads=False):
            table = pa.Table.from_batches([batch])
            index = table["episode_index"].to_numpy() if "episode_index" in names else np.zeros(len(table))
            borders = [0, *(np.flatnonzero(np.diff(index)) + 1).tolist(), len(table)]
            for start, end in pairwise(borders):
                if start == end:
                    continue
                number = int(index[start]) if "episode_index" in names else None
                if parts and number != current:
                    yield current, pa.concat_tables(parts)
                    parts = []
                current = number
                parts.append(table.slice(start, end - start))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    finally:
        file.close()
    if parts:
        yield current, pa.concat_tables(parts)
