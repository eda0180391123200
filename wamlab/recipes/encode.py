"""Encode a recipe's training windows and instructions into its feature store before a run; many may do it at once."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from wamlab.codec.features import FeatureReport, window_key
from wamlab.data.pipeline import Stage, close
from wamlab.errors import InputError
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import Recipe
from wamlab.recipes.features import list_variants, unique_windows
from wamlab.recipes.order import EncodeOrder, read_order

MAX_CHUNK_WINDOWS = 128  # neighbours that one process encodes at a time; they share decoded episodes

Chunk = list[list[int]]  # episode, first row and number of blocks of each window


def encode_features(bench: Workbench, *, num_processes: int = 1, is_verified_first: bool = False) -> FeatureReport:
    """Encode what the store of a recipe lacks, under a progress bar; return what it then holds.

    It goes on where an interrupted or killed one stopped. Several processes share the windows, on CUDA each with its
    own device as long as there are enough. Raises ``InputError`` for damaged features (``is_verified_first`` looks for
    them in the whole store) and a full disk, leaving finished features as they are.
    """
    if num_processes < 1:
        raise InputError(f"--processes is {num_processes}: give at least 1")
    reader, store = bench.readers[0], bench.store
    variants = list_variants(bench.recipe, reader)
    store.sweep()
    if is_verified_first:
        store.verify()
    store.add_instructions(reader.instructions)
    store.text.flush()
    windows = unique_windows(reader).tolist()
    size = min(MAX_CHUNK_WINDOWS, -(-len(windows) // (4 * num_processes)))
    chunks = [windows[start : start + size] for start in range(0, len(windows), size)]
    missing = {i: n for i, chunk in enumerate(chunks) if (n := sum(1 for _ in _todo(bench, chunk)))}
    total = len(windows) * len(variants)
    with tqdm(total=total, initial=total - sum(missing.values()), desc="encoding", unit="window") as bar:
        if num_processes == 1:
            for i, num_windows in missing.items():
                encode_chunk(bench, chunks[i])
                bar.update(num_windows)
        else:
            for i in _share(bench.recipe, {i: chunks[i] for i in missing}, num_processes):
                bar.update(missing[i])
    store.refresh()
    return store.report()


def encode_chunk(bench: Workbench, chunk: Chunk) -> None:
    """Encode what the store lacks of some windows and write it, reading frames ahead in threads."""
    reader, store = bench.readers[0], bench.store
    size, num_threads = bench.recipe.train.batch_size, bench.recipe.data.num_threads or 1
    seeds: dict[tuple[int, int, int], list[int]] = {}
    for episode, first_row, num_blocks, seed in _todo(bench, chunk):
        seeds.setdefault((episode, first_row, num_blocks), []).append(seed)
    reads = [(*window, missing) for window, missing in seeds.items()]
    parts = (reads[start : start + size] for start in range(0, len(reads), size))
    frames = Stage(
        "decode", iter(reads), lambda read: reader.read_frames(*read), num_threads=num_threads, depth=2 * size
    )
    try:
        for part in parts:
            canvases = [next(frames) for _ in part]
            keys = [window_key(e, row, n, seed) for e, row, n, missing in part for seed in missing]
            shown = [canvas for augmented in canvases for canvas in augmented]
            for start in range(0, len(keys), size):
                store.add_windows(keys[start : start + size], np.stack(shown[start : start + size]))
        store.windows.flush()
    finally:
        close([frames])
        reader.forget_frames()  # the next chunk is of other episodes


def _todo(bench: Workbench, chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """Yield windows and augmentation seeds that the store lacks."""
    variants = list_variants(bench.recipe, bench.readers[0])
    for episode, first_row, num_blocks in chunk:
        for seed in variants:
            if window_key(episode, first_row, num_blocks, seed) not in bench.store.windows:
                yield episode, first_row, num_blocks, seed


def _share(recipe: Recipe, chunks: dict[int, Chunk], num_processes: int) -> Iterator[int]:
    """Encode chunks in processes of their own; yield the number of each as it is done."""
    context = multiprocessing.get_context("spawn")
    num_started = context.Value("i", 0)
    num_threads = max(1, torch.get_num_threads() // num_processes)
    pool = ProcessPoolExecutor(num_processes, context, _begin, (recipe, num_started, num_threads))
    try:
        waiting = {pool.submit(_encode, chunk): i for i, chunk in chunks.items()}
        for future in as_completed(waiting):
            future.result()
            yield waiting[future]
    except BrokenProcessPool:
        raise InputError(
            "a process that encoded was ended from outside: run the same command again, it goes on where it stopped"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode_command(words: Sequence[str]) -> None:
    """Do what `wamlab encode` is told and print what the store then holds."""
    order = read_order(EncodeOrder, "encode", words)
    bench = Workbench(order.recipe)
    report = encode_features(bench, num_processes=order.processes, is_verified_first=order.verify)
    print(f"{bench.store.root} holds {report}")


_benches: list[Workbench] = []  # of a process that encodes: its own, one


def _begin(recipe: Recipe, num_started: Any, num_threads: int) -> None:
    """Prepare a process that encodes, and end it when its parent dies."""
    with num_started.get_lock():
        rank, num_started.value = num_started.value, num_started.value + 1
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    torch.set_num_threads(num_threads)
    if recipe.device in ("auto", "cuda") and torch.cuda.device_count() > 1:
        recipe = replace(recipe, device=f"cuda:{rank % torch.cuda.device_count()}")
    _benches.append(Workbench(recipe))


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)  # a killed parent collects nothing: finished shards are kept, the rest is encoded again


def _encode(chunk: Chunk) -> None:
    encode_chunk(_benches[0], chunk)
