"""Where states of episodes wait: on the device, in shared memory, on disk, each within its budget of bytes.

A state is a mapping of tensors under a name. Who needs room moves states down, those needed last first, as ``expect``
tells the order. Folders are shared by all processes that open them. A state is written beside its name and renamed, and
moved down before it is removed above, so a process that dies at any moment leaves whole states only.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from wamlab.errors import InputError

State = Mapping[str, Tensor]
ENDING = ".safetensors"


@runtime_checkable
class Tier(Protocol):
    """One place for states."""

    name: str
    budget_bytes: int | float

    def sizes(self) -> dict[str, int]: ...

    def read(self, key: str) -> State | None: ...

    def write(self, key: str, state: State) -> None: ...

    def remove(self, key: str) -> None: ...


def bytes_of(state: State) -> int:
    """Return the bytes of a state's tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def content_name(state: State) -> str:
    """Return a name made of the content, under which siblings share one copy, e.g. of their first frame."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class DeviceTier:
    """States as tensors on a device, or in this process's memory."""

    def __init__(self, budget_bytes: int | float, device: str = "cpu") -> None:
        self.name, self.budget_bytes, self.device = device, budget_bytes, device
        self._states: dict[str, State] = {}

    def sizes(self) -> dict[str, int]:
        return {key: bytes_of(state) for key, state in self._states.items()}

    def read(self, key: str) -> State | None:
        return self._states.get(key)

    def write(self, key: str, state: State) -> None:
        self._states[key] = {name: tensor.to(self.device) for name, tensor in state.items()}

    def remove(self, key: str) -> None:
        self._states.pop(key, None)


class FolderTier:
    """States as files: in shared memory (a folder of /dev/shm) or on a disk, where each is flushed before it counts."""

    def __init__(self, folder: Path, budget_bytes: int | float, *, is_flushed: bool = True) -> None:
        self.name, self.folder, self.budget_bytes = folder.name, folder, budget_bytes
        self.is_flushed = is_flushed
        folder.mkdir(parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        found = {}
        for entry in os.scandir(self.folder):
            if entry.name.endswith(ENDING):
                try:
                    found[entry.name.removesuffix(ENDING)] = entry.stat().st_size
                except FileNotFoundError:  # another process has just removed it
                    continue
        return found

    def read(self, key: str) -> State | None:
        path = self._path(key)
        try:
            return load_file(path)
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            raise InputError(f"{path} is damaged ({error}): remove it, and its episode begins anew") from error

    def write(self, key: str, state: State) -> None:
        path = self._path(key)
        # its name tells writers apart, and what a killed one left is never read
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        with unfinished.open("wb") as file:
            file.write(save({name: tensor.contiguous() for name, tensor in state.items()}))
            if self.is_flushed:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if not key or "/" in key or key.startswith("."):
            raise InputError(f'"{key}" cannot name a stored state: use letters, digits and dashes')
        return self.folder / f"{key}{ENDING}"


@dataclass
class StoreCounts:
    """What a store did in this process."""

    hits: Counter[str] = field(default_factory=Counter)  # by tier, when a state was asked for
    num_misses: int = 0
    moved_bytes: Counter[str] = field(default_factory=Counter)  # into each tier
    stall_s: float = 0.0  # spent reading from below the first tier when a state was asked for


class TieredStore:
    """Tiers from the fastest to the largest; the last one refuses what does not fit, others move states down."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        if not tiers:
            raise InputError("a store needs at least one tier")
        self.tiers = list(tiers)
        self.counts = StoreCounts()
        self.pinned: set[str] = set()  # never moved down
        self._place: dict[str, int] = {}  # position in the queue of those that will be needed

    def __contains__(self, key: str) -> bool:
        return any(key in tier.sizes() for tier in self.tiers)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for tier in self.tiers for key in tier.sizes()))

    def put(self, key: str, state: State, *, first_tier: int = 0) -> None:
        """Keep a state from ``first_tier`` down; raises InputError where no tier has room."""
        size = bytes_of(state)
        for level in range(first_tier, len(self.tiers)):
            if self._make_room(level, size, key):
                self.tiers[level].write(key, state)
                self.counts.moved_bytes[self.tiers[level].name] += size
                return
        raise InputError(f"no tier of the store has room for {size:,} bytes of {key}: raise its budgets")

    def get(self, key: str) -> State:
        """Return a state and keep it in the first tier from now on; raises KeyError where it is unknown."""
        start_s = time.perf_counter()
        for _ in range(2):  # another process may move it down between two looks
            for level, tier in enumerate(self.tiers):
                state = tier.read(key)
                if state is None:
                    continue
                self.counts.hits[tier.name] += 1
                if level:
                    state = self._raise_up(key, state, level)
                    self.counts.stall_s += time.perf_counter() - start_s
                return state
        self.counts.num_misses += 1
        raise KeyError(key)

    def remove(self, key: str) -> None:
        """Forget a state, wherever it is."""
        for tier in self.tiers:
            tier.remove(key)
        self.pinned.discard(key)

    def expect(self, keys: Sequence[str]) -> None:
        """Say which states will be needed next, soonest first; all others may leave first."""
        self._place = {key: place for place, key in enumerate(keys)}

    def prefetch(self, number: int) -> int:
        """Bring the soonest expected states into the first tier as long as they displace none needed sooner.

        Returns how many were brought.
        """
        num_brought = 0
        first = self.tiers[0].sizes()
        for key in sorted(self._place, key=self._place.__getitem__)[:number]:
            if key in first:
                continue
            for level, tier in enumerate(self.tiers[1:], start=1):
                state = tier.read(key)
                if state is not None:
                    self._raise_up(key, state, level)
                    num_brought += 1
                    break
        return num_brought

    def _raise_up(self, key: str, state: State, level: int) -> State:
        size = bytes_of(state)
        if not self._make_room(0, size, key):
            return state
        if level < len(self.tiers) - 1:  # a copy on disk stays: it is the checkpoint of what is in flight
            state = {name: tensor.clone() for name, tensor in state.items()}  # a mapped file would go with its name
            self.tiers[0].write(key, state)
            self.tiers[level].remove(key)
        else:
            self.tiers[0].write(key, state)
        self.counts.moved_bytes[self.tiers[0].name] += size
        return self.tiers[0].read(key) or state

    def _make_room(self, level: int, size: int, for_key: str) -> bool:
        """Move states down until there is room; leave all as they are, and say False, where there cannot be."""
        tier = self.tiers[level]
        if tier.budget_bytes == float("inf"):
            return True
        sizes = tier.sizes()
        free = tier.budget_bytes - sum(sizes.values()) + sizes.get(for_key, 0)
        if free >= size:
            return True
        if level == len(self.tiers) - 1:
            return False
        soonest = self._place.get(for_key, -1)  # one that is asked for now displaces any
        movable = [k for k in sizes if k != for_key and k not in self.pinned and self._need(k) > soonest]
        movable.sort(key=self._need, reverse=True)
        leaving = []
        while movable and free < size:
            leaving.append(movable.pop(0))
            free += sizes[leaving[-1]]
        if free < size:
            return False
        for key in leaving:
            state = tier.read(key)
            if state is not None:
                if not any(key in lower.sizes() for lower in self.tiers[level + 1 :]):
                    self.put(key, state, first_tier=level + 1)
                tier.remove(key)
        return True

    def _need(self, key: str) -> int | float:
        return self._place.get(key, float("inf"))


@dataclass(frozen=True)
class StoreConfig:
    """What any process needs to open the same store."""

    disk_folder: Path | None = None  # what is here survives a crash
    disk_bytes: int | float = float("inf")
    shared_folder: Path | None = None  # in shared memory, e.g. under /dev/shm; whoever made it removes it
    shared_bytes: int | float = float("inf")
    device: str | None = None  # keep states of this process's episodes on it
    device_bytes: int | float = 0

    def open(self) -> TieredStore:
        """Open the tiers that are configured, fastest first; raises InputError for none."""
        tiers: list[Tier] = []
        if self.device is not None:
            tiers.append(DeviceTier(self.device_bytes, self.device))
        if self.shared_folder is not None:
            tiers.append(FolderTier(self.shared_folder, self.shared_bytes, is_flushed=False))
        if self.disk_folder is not None:
            tiers.append(FolderTier(self.disk_folder, self.disk_bytes))
        return TieredStore(tiers)
