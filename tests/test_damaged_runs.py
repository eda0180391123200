"""Damaged run folders, odd words and refused files: one sentence each, and nothing is lost or left half-written."""

import errno
import json
import re
import resource
import shutil
import signal
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import nbformat
import pytest

from wamlab.cli import main
from wamlab.errors import InputError, advice_for
from wamlab.lab import archive, lock
from wamlab.lab.records import plain, write_whole
from wamlab.lab.run import Run, create_run, find_run, open_run, read_metrics
from wamlab.recipes.comparing import ParityOrder, compare_runs
from wamlab.recipes.config import recipe_from_dict, tiny
from wamlab.recipes.submit import SubmitOrder, write_job

NEST = "[" * 100_000  # deeper than a reader may go
STATUS = '{"state": "finished", "started": "2026-04-01T00:00:00+00:00", "heartbeat": "2026-04-01T00:00:00+00:00"}'


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two finished runs."""
    root = tmp_path_factory.mktemp("written")
    for day, name in enumerate(("first", "second"), 1):
        with create_run(root, name, {"name": name}, started=datetime(2026, 4, day)) as run:
            run.log({"step": 1, "loss": 2.0, "samples_per_s": 3.0})
            run.log_evaluation({"step": 1, "held_out_loss": 2.0})
    return root


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    """Return a copy of these runs to do anything with."""
    return Path(shutil.copytree(written, tmp_path / "runs"))


@pytest.fixture
def run(runs: Path) -> Run:
    return open_run(next(runs.glob("*first*")))


DAMAGE = [
    *(("status.json", text) for text in ("", "{}", "[1]", NEST, '{"state": 3}', '{"state": "lost"}')),
    *(("status.json", STATUS.replace("finished", text)) for text in ("running", 'running", "pid": "7", "host": "h')),
    ("status.json", STATUS.replace("}", ', "ended": "noon"}')),
    ("status.json", STATUS.replace("}", ', "num_resumes": []}')),
    *(("config.json", text) for text in ("", "[]", NEST)),
    *(("environment.json", text) for text in ("", "{}", '{"packages": 3}', '{"git": []}', '{"git": {"a": 3}}')),
    *(("metrics.jsonl", text) for text in ('{"step": 1, "loss": "a"}\n', '{"step": 1, "loss": [2]}\n', NEST + "\n")),
    ("metrics.jsonl", '{"step": 1, "split_s": 3}\n{"step": -1}\n{"step": 1' + "0" * 30 + "}\n"),
    ("metrics.jsonl", '{"step": 1, "split_s": {"data": {}}}\n{"step": 1' + "0" * 5000 + "}\n"),
    ("evaluations.jsonl", '{"step": 1, "held_out_loss": "a"}\n{"step": 1, "held_out_loss_by_level": {"high": 1}}\n'),
    ("summary.json", "[]"),
]


@pytest.mark.filterwarnings("ignore:.*is not a JSON record with a step and numbers")
@pytest.mark.parametrize(("name", "text"), DAMAGE, ids=[f"{name}-{text[:40]}" for name, text in DAMAGE])
def test_a_damaged_file_gets_a_sentence_from_every_command_and_hides_no_other_run(
    runs: Path, run: Run, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.folder / name).write_text(text)
    root = ["--root", str(runs)]
    assert main(["runs", *root]) == 0
    assert "second" in (listed := capsys.readouterr().out) and "first" in listed
    page = str(runs.parent / "page.html")
    for words in (["show", "first"], ["runs", "compare", "first", "second", "--out", page], ["runs", "stop", "first"]):
        status = main([*words, *root])
        said = capsys.readouterr().err.strip()
        assert status in (0, 2) and (status == 0 or (said.startswith("wamlab: ") and "\n" not in said))
    if name == "status.json":
        with pytest.raises(InputError, match="restore it from a copy"):
            create_run(runs, "first", {"name": "changed"}, is_resumed=True)
        assert json.loads((run.folder / "config.json").read_text()) == {"name": "first"}
    assert main(["runs", "rm", "first", "--yes", *root]) == 0
    assert [path.name for path in runs.iterdir()] == [next(runs.glob("*second*")).name]


def test_records_whose_figures_are_no_numbers_are_left_out_with_a_warning(run: Run) -> None:
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": "a"}\n{"step": 2, "loss": null, "note": "a"}\n')
    with pytest.warns(UserWarning, match="line 1 of .* is not a JSON record with a step and numbers"):
        assert [record["step"] for record in read_metrics(run)[0]] == [2]


def test_a_folder_where_a_file_should_be_is_damage_of_one_run(
    runs: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.folder / "metrics.jsonl").unlink()
    (run.folder / "metrics.jsonl").mkdir()
    assert main(["runs", "--root", str(runs)]) == 0
    assert "damaged" in (listed := capsys.readouterr().out) and "second" in listed


def test_a_removal_that_is_interrupted_leaves_no_half_run_and_the_next_clears_it(
    runs: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.rmtree

    def interrupted(folder: Path, **options: bool) -> None:
        if folder.exists():
            (folder / "config.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(archive.shutil, "rmtree", interrupted)
    assert main(["runs", "rm", "first", "--yes", "--root", str(runs)]) == 130
    assert len(list(runs.glob("[!.]*"))) == 1
    monkeypatch.setattr(archive.shutil, "rmtree", whole)
    assert main(["runs", "rm", "second", "--yes", "--root", str(runs)]) == 0
    assert not list(runs.iterdir())


def test_a_run_behind_a_link_is_exported_whole_and_never_removed(
    runs: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    linked = runs.parent / "linked"
    linked.mkdir()
    (linked / run.name).symlink_to(run.folder)
    assert main(["runs", "rm", "first", "--yes", "--root", str(linked)]) == 2
    assert "is a link to" in capsys.readouterr().err and run.folder.is_dir()
    (run.folder / "around").symlink_to(".")
    (run.folder / "secrets").symlink_to("/etc")
    packed = runs.parent / "packed.tar.gz"
    assert main(["runs", "export", "first", "--root", str(linked), "--out", str(packed), "--whole"]) == 0
    assert "around, secrets" in capsys.readouterr().out
    with tarfile.open(packed) as archived:
        inner = {name.removeprefix(f"{run.name}/") for name in archived.getnames()}
    assert {"metrics.jsonl", "config.json"} <= inner and not {"around", "secrets"} & inner


def test_paths_that_cannot_be_written_get_a_sentence_and_leave_nothing(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(runs.parent.rglob("*"))
    for out in ("", str(runs), str(runs / "nowhere" / "x"), str(runs / ("x" * 300)), "/dev/null/x"):
        for words in (["compare", "first", "second"], ["export", "first"]):
            assert main(["runs", *words, "--root", str(runs), "--out", out]) == 2
            said = capsys.readouterr().err
            assert said.startswith("wamlab: ") and ": " in said.removeprefix("wamlab: ") and "\n" not in said.strip()
    assert sorted(runs.parent.rglob("*")) == before


@contextmanager
def files_below(num_bytes: int) -> Iterator[None]:
    """Let no file grow above a size, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_no_part_of_an_archive_or_a_page(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(runs.parent.rglob("*"))
    root, out = ["--root", str(runs)], ["--out", str(runs.parent / "out")]
    with files_below(1000):
        statuses = [
            main(["runs", "export", "first", *root, *out]), main(["runs", "compare", "first", "second", *root, *out]),
        ]  # fmt: skip
    assert statuses == [2, 2] and capsys.readouterr().err.count("cannot be written (File too large)") == 2
    assert sorted(runs.parent.rglob("*")) == before


def test_an_interrupt_while_a_file_is_written_leaves_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "page.html", "words")
    assert not list(tmp_path.iterdir())


def test_what_the_system_refuses_comes_with_what_to_do() -> None:
    assert "free space" in advice_for(OSError(errno.ENOSPC, "full")) and "rights" in advice_for(PermissionError(13, ""))
    assert advice_for(OSError("of no number"))


def test_a_job_file_takes_no_orders_from_options_and_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = tmp_path / "jobs"
    for option in ("time", "partition", "account", "accelerator"):
        with pytest.raises(InputError, match=f"submit.{option} is .*give one such as"):
            replace(SubmitOrder(), **{option: "a\n#SBATCH --exclusive"})
    with pytest.raises(InputError, match="give words of one line"):
        write_job("skypilot", SubmitOrder(jobs=jobs), ["tiny", "--data.root", "a\nrun: b"])
    assert not list(tmp_path.iterdir())
    file = write_job("slurm", SubmitOrder(jobs=jobs), ["tiny"])
    file.write_text(changed := file.read_text() + "# by hand\n")
    assert main(["submit", "slurm", "tiny", "--jobs", str(jobs)]) == 2
    assert "--replace" in capsys.readouterr().err and file.read_text() == changed
    write_job("slurm", SubmitOrder(jobs=jobs, replace=True), ["tiny"])
    assert file.read_text() != changed
    with pytest.raises(SystemExit) as ended:
        main(["submit", "slurm", "--help"])
    assert ended.value.code == 0 and "--nodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change", [{"data": 3}, {"data": {"num_threads": "x"}}, {"model": []}, {"name": 3}, {"train": {"has_bf16": "no"}}]
)
def test_a_config_with_a_value_of_another_kind_is_refused_with_its_name(change: dict) -> None:
    config = plain(asdict(tiny()))
    for name, value in change.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    with pytest.raises(InputError, match=rf"config\.{next(iter(change))}.* is .*, no .*: restore it from a copy"):
        recipe_from_dict(config)
    assert recipe_from_dict(plain(asdict(tiny()))) == tiny()


def test_runs_without_losses_to_compare_are_refused_before_anything_is_measured(run: Run, runs: Path) -> None:
    other = open_run(next(runs.glob("*second*")))
    for text, said in (('{"step": 1}\n', "no two common training steps"), ('{"step": 1, "loss": -1}\n', "above 0")):
        for folder in (run.folder, other.folder):
            (folder / "metrics.jsonl").write_text(2 * text)
        with pytest.raises(InputError, match=said):
            compare_runs([run], [other], ParityOrder())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: 3\nrecipe: tiny\n", "name is 3, not a word"),
        ("name: a\nrecipe: [tiny]\n", "recipe is .* not a word"),
        ("name: a\nrecipe: nope\n", 'no recipe "nope"'),
        ("name: a\nrecipe: tiny\nbudget: {minutes: soon}\n", "budget.minutes is 'soon', not a number"),
        ("name: a\nrecipe: tiny\ngrid: {1: [2]}\n", "varies 1: name fields"),
        ("name: a\nrecipe: tiny\nlist: [{no.such: 1}]\n", "no field no.such to vary"),
        ("name: a\nrecipe: tiny\nbase: {runs: elsewhere}\n", "no field runs to vary"),
        ("\udcff\udcfe", "is no YAML"),
    ],
)
def test_an_odd_sweep_is_refused_before_anything_is_trained(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert main(["sweep", str(file), "--runs", str(tmp_path / "runs")]) == 2
    assert re.search(said, capsys.readouterr().err) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("x = = 3", [], "line 1 of the cell tagged parameters .* is no Python"),
        ("%matplotlib inline\nx: int = 3", ["--kernel", "nowhere"], 'there is no kernel "nowhere"'),
        ("x: int = 3", [], "names no kernel"),
        ("x: int = 3", ["--kernel", "python3", "--cell-timeout-s", "0"], "--cell-timeout-s is 0"),
    ],
)
def test_an_odd_notebook_is_refused_before_there_is_a_run(
    tmp_path: Path, source: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "odd.ipynb")
    assert main(["run", str(tmp_path / "odd.ipynb"), "--runs", str(tmp_path / "runs"), *options]) == 2
    assert re.search(said, capsys.readouterr().err) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("import os; os._exit(3)", [], "the kernel died in a cell"),
        ("import time; time.sleep(60)", ["--cell-timeout-s", "1"], "a cell took more than 1 s"),
    ],
)
def test_a_notebook_that_cannot_go_on_ends_as_a_failed_run(
    tmp_path: Path, source: str, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [nbformat.v4.new_code_cell(source)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "odd.ipynb")
    words = ["run", str(tmp_path / "odd.ipynb"), "--runs", str(tmp_path / "runs"), "--kernel", "python3", *options]
    assert main(words) == 1
    assert said in capsys.readouterr().out
    failed = find_run(tmp_path / "runs")
    assert failed.state == "failed" and said in failed.status["error"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_can_be_cleared_of_runs_and_a_locked_one_is_left_as_it_was(
    runs: Path, run: Run, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(lock.json, "dump", refused)
    status = main(["runs", "rm", "first", "--yes", "--root", str(runs)])
    if number == errno.ENOSPC:
        assert status == 0 and not run.folder.exists()
    else:
        assert status == 2 and "only be read" in capsys.readouterr().err
        assert run.folder.exists() and not (run.folder / "lock").exists()
