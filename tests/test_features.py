"""The feature store: what is read equals what is encoded, whatever kills, fills or damages it on the way.

``WAMLAB_KILL_POINTS=20`` kills an encoding process at so many random moments instead of two.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from wamlab.cli import main
from wamlab.codec.clips import ClipEncoder
from wamlab.codec.feature_files import RecordFolder
from wamlab.codec.features import FeatureStore
from wamlab.codec.text import HashTextEncoder
from wamlab.codec.video import DctCodec, DctConfig
from wamlab.data.lerobot import RobotDataset
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.run import read_metrics
from wamlab.recipes.build import Workbench
from wamlab.recipes.config import FeatureConfig, Recipe, tiny
from wamlab.recipes.encode import encode_features
from wamlab.recipes.features import unique_windows
from wamlab.recipes.fit import fit, start_run
from wamlab.sim.experts import play_episodes
from wamlab.speed.clock import Clock

KILL_POINTS = int(os.environ.get("WAMLAB_KILL_POINTS", "2"))
VARIANTS = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "reach"
    return write_dataset(play_episodes(("reach",), 6, seed=0, size=32), root)


def recipe_of(dataset: Path, root: Path, mode: str = "online", num_variants: int = VARIANTS) -> Recipe:
    """Return ``tiny`` cut to a second of training, with crops and colours, in small files."""
    recipe = tiny()
    return replace(
        recipe,
        name="small",
        data=replace(recipe.data, root=dataset, held_out_fraction=0.25),
        robot=replace(recipe.robot, view_height_px=32, view_width_px=32, crop_fraction=0.9, has_color_jitter=True),
        model=replace(recipe.model, dim=32, layers=1, heads=2, ffn_dim=64, mlp_dim=32),
        train=replace(recipe.train, num_steps=8, batch_size=4),
        evaluation=replace(recipe.evaluation, every=8, num_clips=2, noise_levels=(0.5,)),
        features=FeatureConfig(mode, root, num_variants, shard_mib=0.1),
    )


@pytest.fixture(scope="module")
def store(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    """Encode everything without any interruption; tests only read it."""
    bench = Workbench(recipe_of(dataset, tmp_path_factory.mktemp("features")))
    encode_features(bench)
    return reopened(bench.store)


def reopened(store: FeatureStore) -> FeatureStore:
    """Return the store as another process finds it."""
    again = FeatureStore(store.root, store.encoder, store.windows.about["transform"])
    assert again.windows.folder == store.windows.folder
    return again


def assert_equal(store: FeatureStore, expected: FeatureStore) -> None:
    """Compare every record, check every hash, and find nothing half-written."""
    for folder, whole in ((store.windows, expected.windows), (store.text, expected.text)):
        folder.verify()
        assert folder._index.keys() == whole._index.keys()
        for key in folder._index:
            record, right = folder.read(key), whole.read(key)
            assert record.keys() == right.keys()
            assert all(torch.equal(record[name], right[name]) for name in record)
        names = {path.name for path in folder.folder.iterdir()}
        assert all(name.endswith((".bin", ".json")) for name in names)


def losses(recipe: Recipe, runs: Path) -> list[tuple[float, float]]:
    bench = Workbench(recipe)
    with start_run(bench, runs) as run:
        for _ in fit(bench, run):
            pass
    return [(record["loss"], record["gradient_norm"]) for record in read_metrics(run)[0]]


def fail(*_: object, **__: object) -> None:
    raise AssertionError("an encoder ran, or video was decoded")


def test_cached_training_is_online_training_bit_for_bit(dataset: Path, store: FeatureStore, tmp_path: Path) -> None:
    online = losses(recipe_of(dataset, store.root), tmp_path / "online")
    assert len(set(online)) == 8
    assert losses(recipe_of(dataset, store.root, "cached"), tmp_path / "cached") == online
    with pytest.warns(UserWarning, match="encoded now and kept") as told:
        filled = losses(recipe_of(dataset, tmp_path / "features", "cached-if-present"), tmp_path / "filled")
    assert filled == online
    assert len(told) == 1


def test_cached_windows_need_no_encoder_and_no_video(
    dataset: Path, store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over more than one epoch, whichever augmentation an epoch draws."""
    bench = Workbench(recipe_of(dataset, store.root, "cached"))
    num_steps = 2 * bench.readers[0].num_samples // 4
    online = islice(Workbench(recipe_of(dataset, store.root)).examples(Clock()), num_steps)
    expected = [example.batch for example in online]
    for kind, name in ((DctCodec, "encode_video"), (HashTextEncoder, "_encode"), (RobotDataset, "frames")):
        monkeypatch.setattr(kind, name, fail)
    for example, right in zip(bench.examples(Clock()), expected, strict=False):
        for name in ("latents", "condition", "text", "actions", "action_mask", "state"):
            assert torch.equal(getattr(example.batch, name), getattr(right, name))
    report = bench.store.report()
    assert report.hit_rate == 1
    assert report.num_hits >= 4 * num_steps
    assert report.num_windows == VARIANTS * len(unique_windows(bench.readers[0]))


def test_a_run_fills_the_store_for_the_next_epoch(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(dataset, tmp_path / "features", "cached-if-present", num_variants=1)
    bench = Workbench(recipe)
    epoch = -(-bench.readers[0].num_samples // 4)
    with pytest.warns(UserWarning, match="lacks some windows"):
        examples = bench.examples(Clock())
        list(islice(examples, epoch))
    monkeypatch.setattr(DctCodec, "encode_video", fail)
    list(islice(examples, epoch))
    examples.close()
    assert reopened(bench.store).report().num_windows == len(unique_windows(bench.readers[0]))
    list(islice(Workbench(replace(recipe, features=replace(recipe.features, mode="cached"))).examples(Clock()), 2))


def test_the_augmentation_seed_chooses_among_the_variants(dataset: Path, tmp_path: Path) -> None:
    reader = Workbench(recipe_of(dataset, tmp_path)).readers[0]
    clips = [reader.read(3, seed) for seed in range(4)]
    assert [clip.augmentation_seed for clip in clips] == [0, 1, 0, 1]
    assert (clips[0].frames == clips[2].frames).all()
    assert (clips[0].frames != clips[1].frames).any()
    blind = reader.read(3, 1, has_frames=False)
    assert len(blind.frames) == 0
    assert (blind.actions == clips[1].actions).all()
    plain = replace(reader.robot, crop_fraction=1.0, has_color_jitter=False)
    bench = Workbench(replace(recipe_of(dataset, tmp_path, num_variants=0), robot=plain))
    assert bench.readers[0].read(3, 7).augmentation_seed == 0  # nothing is drawn, so one version is enough


def test_a_store_serves_another_split_and_never_another_encoder_or_transform(
    dataset: Path, store: FeatureStore, tmp_path: Path
) -> None:
    recipe = recipe_of(dataset, store.root, "cached")
    fewer = replace(recipe, data=replace(recipe.data, held_out_fraction=0.5))
    assert Workbench(fewer).source[0].num_samples < Workbench(recipe).source[0].num_samples
    whole = Workbench(replace(recipe, features=replace(recipe.features, mode="online")))
    others = [
        replace(whole.recipe, robot=replace(recipe.robot, crop_fraction=0.8)),
        replace(whole.recipe, robot=replace(recipe.robot, has_color_jitter=False)),
        replace(whole.recipe, condition="grey", has_relative_video=False),
        replace(whole.recipe, has_relative_video=False),
        replace(whole.recipe, data=replace(recipe.data, root=copy_with_more(dataset, tmp_path))),
        replace(
            whole.recipe, video=DctConfig(channels=20), model=replace(recipe.model, latent_channels=20)
        ),
    ]  # fmt: skip
    assert len(whole.store.windows) == len(store.windows)
    for other in others:
        bench = Workbench(other)
        assert len(bench.store.windows) == 0
        assert len(bench.store.text) == len(store.text)  # instructions do not depend on the video
    text = replace(recipe.text, max_tokens=20)
    assert not len(Workbench(replace(whole.recipe, text=text, model=replace(recipe.model, text_len=20))).store.text)


def copy_with_more(dataset: Path, tmp_path: Path) -> Path:
    """Write a dataset that begins like the other one."""
    return write_dataset(play_episodes(("reach",), 7, seed=0, size=32), tmp_path / "more")


def test_what_is_missing_is_one_sentence(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(InputError, match=r"lacks \d+ windows or instructions .*`wamlab encode small`"):
        start_run(Workbench(recipe_of(dataset, tmp_path / "none", "cached")), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    with pytest.raises(InputError, match=r"give features.num_variants of at least 1"):
        _ = Workbench(recipe_of(dataset, tmp_path, "cached-if-present", num_variants=0)).source
    with pytest.raises(InputError, match=r"features\.mode is"):
        FeatureConfig(mode="chached")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file.*cannot take more features"):
        encode_features(Workbench(recipe_of(dataset, tmp_path / "file")))
    with pytest.raises(InputError, match="--processes"):
        encode_features(Workbench(recipe_of(dataset, tmp_path)), num_processes=0)
    assert main(["encode"]) == 2
    assert "name a recipe to encode" in capsys.readouterr().err


def test_damage_names_the_file_and_deleting_it_is_the_cure(dataset: Path, store: FeatureStore, tmp_path: Path) -> None:
    bench = Workbench(recipe_of(dataset, tmp_path / "features", "cached"))
    encode_features(bench)
    shards = sorted(bench.store.windows.folder.glob("*.bin"))
    flipped, short = shards[:2]
    data = bytearray(flipped.read_bytes())
    data[len(data) // 3] ^= 4
    flipped.write_bytes(data)
    short.write_bytes(short.read_bytes()[:-16])
    for damaged in (flipped, short):
        with pytest.raises(InputError, match=rf"{damaged.name} .*: delete that file and run `wamlab encode` again"):
            read_all(reopened(bench.store).windows)
        with pytest.raises(InputError, match=damaged.name):
            encode_features(Workbench(bench.recipe), is_verified_first=True)
        damaged.unlink()
    with pytest.raises(InputError, match="lacks"):
        _ = Workbench(bench.recipe).source
    encode_features(Workbench(bench.recipe))
    assert_equal(reopened(bench.store), store)
    entry = shards[2].with_suffix(".json")
    for text in ("{", "[]", json.dumps({"format": "wamlab-features-1"})):
        entry.write_text(text)
        with pytest.raises(InputError, match=rf"{entry.name} .*delete that file"):
            reopened(bench.store)


def read_all(folder: RecordFolder) -> None:
    for key in folder._index:
        folder.read(key)


def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(
    dataset: Path, store: FeatureStore, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = recipe_of(dataset, tmp_path / "features")
    options = [f"--data.root={dataset}", f"--features.root={tmp_path / 'cli'}", "--features.shard-mib=0.1"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # text fits, windows do not
    try:
        with pytest.raises(InputError, match=r"cannot take more features .*: free space"):
            encode_features(Workbench(recipe))
        assert main(["encode", "tiny", *options]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free space or rights there" in capsys.readouterr().err
    bench = Workbench(recipe)
    assert [path.name for path in bench.store.windows.folder.glob("*")] in ([], ["about.json"])
    encode_features(bench)
    assert_equal(reopened(bench.store), store)


def command(dataset: Path, root: Path, num_processes: int = 1) -> list[str]:
    """Return the command that encodes ``recipe_of``."""
    words = ["encode", "tiny", f"--data.root={dataset}", "--data.held-out-fraction=0.25", f"--features.root={root}"]
    words += [f"--features.num-variants={VARIANTS}", "--features.shard-mib=0.1", f"--processes={num_processes}"]
    words += ["--robot.view-height-px=32", "--robot.view-width-px=32", "--robot.crop-fraction=0.9"]
    words += ["--robot.has-color-jitter", "--train.batch-size=4"]
    return [sys.executable, "-m", "wamlab.cli", *words]


def wait_for(is_true: Callable[[], object], process: subprocess.Popen) -> bool:
    """Wait as briefly as possible; False if the process ended before."""
    while not is_true():
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    return True


@pytest.mark.parametrize("point", range(KILL_POINTS))
def test_a_killed_encoding_goes_on_where_it_stopped(
    dataset: Path, store: FeatureStore, tmp_path: Path, point: int
) -> None:
    """SIGKILL when a random number of files is there, at a random moment after."""
    rng = random.Random(f"kill {point}")
    root, (folder, all_files) = tmp_path / "features", (store.windows.folder, list(store.windows.folder.iterdir()))
    windows = root / "windows" / folder.name
    wanted, delay_s = rng.randrange(len(all_files) - 4), rng.uniform(0, 0.01)
    process = subprocess.Popen(command(dataset, root), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_for(lambda: windows.is_dir() and len(os.listdir(windows)) >= wanted, process)  # noqa: PTH208 - fast
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    bench = Workbench(recipe_of(dataset, root))
    num_kept = len(bench.store.windows)
    print(f"point {point}: killed at {wanted} files + {delay_s * 1000:.1f} ms; {num_kept} of {len(store.windows)} kept")
    bench.store.verify()
    assert encode_features(bench).num_windows == len(store.windows)
    assert_equal(reopened(bench.store), store)


def test_three_processes_at_once_write_one_whole_store(dataset: Path, store: FeatureStore, tmp_path: Path) -> None:
    """Two of one command, and this one as soon as they write."""
    root = tmp_path / "features"
    bench = Workbench(recipe_of(dataset, root))
    assert len(bench.store.windows) == 0
    process = subprocess.Popen(command(dataset, root, 2), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert wait_for((root / "windows").is_dir, process)
    assert encode_features(bench).num_windows == len(store.windows)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert f"holds {len(store.windows)} windows" in output.decode()
    assert_equal(reopened(bench.store), store)


def test_processes_end_with_a_killed_parent(dataset: Path, tmp_path: Path) -> None:
    words = command(dataset, tmp_path / "features", num_processes=2)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not listed.exists():
        process.kill()
        process.wait()
        pytest.skip("this system does not list child processes")
    windows = tmp_path / "features" / "windows"
    assert wait_for(windows.is_dir, process)
    children = [int(pid) for pid in listed.read_text().split()]
    process.kill()
    process.wait()
    assert len(children) >= 2
    end_s = time.monotonic() + 20
    while (alive := [pid for pid in children if is_running(pid)]) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not alive


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class MeanColors:
    """A small image encoder: the mean colour of the four quarters of a frame, in bfloat16."""

    fingerprint = "mean-colors-1"

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        b, h, w, c = frames.shape
        return frames.float().reshape(b, 2, h // 2, 2, w // 2, c).mean((2, 4)).reshape(b, 4, c).bfloat16()


@pytest.mark.parametrize("condition", ["none", "grey"])
def test_image_tokens_and_conditions_are_kept(dataset: Path, tmp_path: Path, condition: str) -> None:
    reader = Workbench(recipe_of(dataset, tmp_path)).readers[0]
    encoder = ClipEncoder(DctCodec(), HashTextEncoder(), MeanColors(), condition=condition)
    clips = [reader.read(index, 0) for index in range(3)]
    store = FeatureStore(tmp_path, encoder, "any")
    store.add_windows([f"{i}" for i in range(3)], np.stack([clip.frames for clip in clips]))
    store.flush()
    records = [reopened(store).windows.read(f"{i}") for i in range(3)]
    batch = encoder.batch_of(clips, {name: torch.stack([r[name] for r in records]) for name in records[0]})
    expected = encoder(clips)
    assert batch.image is not None
    assert batch.image.dtype == torch.bfloat16
    for name in ("latents", "image", "condition"):
        made, right = getattr(batch, name), getattr(expected, name)
        assert made is right is None or torch.equal(made, right)  # pyright: ignore[reportArgumentType]


def test_instructions_are_kept_once_at_their_true_length(tmp_path: Path) -> None:
    encoder = ClipEncoder(DctCodec(), HashTextEncoder())
    store = FeatureStore(tmp_path, encoder, "any")
    instructions = ["push the red cube left", "stop", "", "stop"]
    store.add_instructions(instructions)
    store.flush()
    read = reopened(store)
    assert len(read.text) == 3
    assert read.text.read("stop")["text"].shape == (1, 64)
    assert torch.equal(read.read_text(instructions), encoder.encode_text(instructions))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read.text.read("")["text"].shape == (0, 64)
    with pytest.raises(InputError, match="cannot be stored"):
        store.text.add("numbers", {"text": torch.zeros(2, dtype=torch.int64)})
