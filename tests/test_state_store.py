"""The state store: budgets hold, what is needed last leaves first, a killed writer leaves whole states only."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from wamlab.errors import InputError
from wamlab.rl.segments import Segment, noise_generator, segment_from_tensors, segment_to_tensors
from wamlab.rl.store import DeviceTier, FolderTier, StoreConfig, TieredStore, content_name


def state_of(value: float | int, num_bytes: int = 400) -> dict[str, Tensor]:
    return {"latents": torch.full((num_bytes // 4,), float(value))}


def three_tiers(folder: Path, first_bytes: int = 900, second_bytes: int = 2000) -> TieredStore:
    return TieredStore(
        [
            DeviceTier(first_bytes),
            FolderTier(folder / "shared", second_bytes, is_flushed=False),
            FolderTier(folder / "disk", float("inf")),
        ]
    )


def test_states_come_back_bit_for_bit_from_every_tier(tmp_path: Path) -> None:
    store = three_tiers(tmp_path)
    states = {f"s{i}": {"a": torch.randn(100), "b": torch.arange(i + 1).bool()} for i in range(12)}
    for key, state in states.items():
        store.put(key, state)
    assert all(tier.sizes() for tier in store.tiers)  # all three are in use
    assert set(store) == set(states)
    for key, state in states.items():
        found = store.get(key)
        assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
        for tier in store.tiers:
            assert sum(tier.sizes().values()) <= tier.budget_bytes
    assert set(store) == set(states)
    assert store.counts.stall_s > 0 and sum(store.counts.hits.values()) == 12


def test_what_is_needed_last_leaves_first_not_what_was_used_last(tmp_path: Path) -> None:
    store = three_tiers(tmp_path)
    store.put("soon", state_of(1))
    store.put("late", state_of(2))
    store.get("late")  # used last: would stay if age decided
    store.expect(["soon", "late"])
    store.put("now", state_of(3))
    assert store.tiers[0].sizes().keys() == {"soon", "now"}


def test_pinned_states_stay(tmp_path: Path) -> None:
    store = three_tiers(tmp_path)
    for key in ("a", "b"):
        store.put(key, state_of(0))
        store.pinned.add(key)
    store.put("c", state_of(0))
    assert store.tiers[0].sizes().keys() == {"a", "b"} and "c" in store.tiers[1].sizes()


def test_prefetch_brings_the_soonest_and_displaces_only_what_is_needed_later(tmp_path: Path) -> None:
    store = three_tiers(tmp_path)
    for i in range(6):
        store.put(f"s{i}", state_of(i))
    order = ["s0", "s1", "s5", "s4", "s3", "s2"]
    store.expect(order)
    store.prefetch(6)
    assert store.tiers[0].sizes().keys() == {"s0", "s1"}
    before_s = store.counts.stall_s
    store.get("s0")
    assert store.counts.stall_s == before_s  # it was there already


def test_what_fits_nowhere_and_what_is_unknown_is_told(tmp_path: Path) -> None:
    store = TieredStore([DeviceTier(100), FolderTier(tmp_path / "disk", 100)])
    with pytest.raises(InputError, match="no tier of the store has room"):
        store.put("big", state_of(0))
    with pytest.raises(KeyError):
        store.get("never")
    with pytest.raises(InputError, match="cannot name"):
        store.put("../up", state_of(0, 8), first_tier=1)
    with pytest.raises(InputError, match="at least one tier"):
        StoreConfig().open()


def test_equal_content_has_one_name() -> None:
    state = {"a": torch.arange(4.0), "b": torch.zeros(2, dtype=torch.bfloat16)}
    assert content_name(state) == content_name({name: state[name].clone() for name in ("b", "a")})
    assert content_name(state) != content_name(state | {"a": torch.arange(4.0) + 1})
    assert content_name(state) != content_name(state | {"a": torch.arange(4.0)[None]})


def test_a_killed_writer_leaves_whole_states_only(tmp_path: Path) -> None:
    code = (
        "import sys, torch, itertools; from pathlib import Path; from wamlab.rl.store import FolderTier\n"
        "tier = FolderTier(Path(sys.argv[1]), float('inf'))\n"
        "for i in itertools.count():\n"
        "    tier.write(f's{i % 3}', {'a': torch.full((250_000,), float(i))}); print(i, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(4):
        process.stdout.readline()
    time.sleep(0.003)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = StoreConfig(disk_folder=tmp_path).open()
    assert set(store) == {"s0", "s1", "s2"}
    for key in store:
        values = store.get(key)["a"]
        assert len(values) == 250_000 and (values == values[0]).all()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = StoreConfig(disk_folder=tmp_path).open()
    (tmp_path / "s.safetensors").write_bytes(b"not a state")
    with pytest.raises(InputError, match=r"s\.safetensors is damaged"):
        store.get("s")


def test_a_segment_survives_the_store_bit_for_bit(tmp_path: Path) -> None:
    segment = Segment(
        iteration=3, group=1, member=2, num_segments=2, num_chunks=9, num_ticks=70, policy_version=5, sampler="sde-4",
        is_done=False, is_success=False, snapshot={"state": [0.1, 1e-300, 1 / 3], "seed": 2**70}, memory={},
        chunks={"actions": np.random.default_rng(0).random((9, 8, 4)), "num_ticks": np.full(9, 8)},
    )  # fmt: skip
    store = StoreConfig(disk_folder=tmp_path).open()
    store.put(segment.name, segment_to_tensors(segment))
    found = segment_from_tensors(store.get(segment.name), segment.name)
    assert found.snapshot == segment.snapshot and found.key == (1, 2) and found.memory == {}
    assert found.chunks.keys() == segment.chunks.keys()
    assert all(found.chunks[name].tobytes() == segment.chunks[name].tobytes() for name in segment.chunks)
    with pytest.raises(InputError, match="no whole episode segment"):
        segment_from_tensors({"other": torch.zeros(1)}, "it")


def test_noise_depends_on_its_key_alone() -> None:
    key = (7, 1, 2, 3, 4)
    drawn = noise_generator(key, 5).standard_normal(1000)
    assert (drawn == noise_generator(np.array(key, np.uint64), 5).standard_normal(1000)).all()
    others = [(*key[:i], key[i] + 1, *key[i + 1 :]) for i in range(5)]
    for other in [noise_generator(k, 5) for k in others] + [noise_generator(key, 6), noise_generator(key, 4)]:
        assert abs(np.corrcoef(drawn, other.standard_normal(1000))[0, 1]) < 0.15
