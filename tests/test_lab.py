"""Run folders, their readers and writers, still charts and reports."""

import io
import json
import math
import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from wamlab.cli import main
from wamlab.errors import InputError
from wamlab.lab.chart import Bar, Line, bar_chart, line_chart, spread, stacked_chart
from wamlab.lab.environment import describe_environment, without_secrets
from wamlab.lab.folders import slug_of
from wamlab.lab.live import LiveChart
from wamlab.lab.loader_panel import loader_chart, newest_loader, watch_loader
from wamlab.lab.plots import analysis_figure, levels_chart, loss_chart, split_chart, strip_png
from wamlab.lab.records import encode_line, read_last
from wamlab.lab.report import flattened, summary_table, write_report
from wamlab.lab.run import Run, create_run, find_run, open_run, read_evaluations, read_metrics
from wamlab.lab.scale import nice_ticks, tick_text
from wamlab.lab.search import list_runs
from wamlab.lab.series import Columns, bucket_size, drawable, extremes, smoothed
from wamlab.lab.table import Table
from wamlab.lab.watch import Tail, follow, time_left_text, watch

CONFIG = {"train": {"num_steps": 100, "learning_rate": 1e-4}}
NOON = datetime(2026, 4, 1, 12, 0, 0)


def step_record(step: int) -> dict:
    """Return a record as the trainer writes it."""
    split_s = {"data": 0.01, "encode": 0.02, "forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    action = 0.5 / step
    return {
        "step": step, "loss": 3 * action, "video_loss": 2 * action, "action_loss": action, "gradient_norm": 1.0,
        "learning_rate": 1e-4, "num_samples": 8, "step_s": 0.15, "split_s": split_s, "memory_gib": 1.5,
        "samples_per_s": 8 / 0.15,
    }  # fmt: skip


def evaluation(step: int) -> dict:
    """Return an evaluation as the trainer writes it."""
    levels = {"0.1": 0.3 / step, "0.5": 0.2 / step, "0.9": 0.1 / step}
    return {"step": step, "held_out_loss": 2 / step, "held_out_loss_by_level": levels, "action_error": 0.1}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = create_run(tmp_path / "runs", "tiny", CONFIG, started=NOON)
    yield run
    if run.is_writer:
        run.finish("stopped")


@pytest.fixture
def told(run: Run) -> Run:
    """Return a run with a short history."""
    for step in range(1, 41):
        run.log(step_record(step))
    for step in (10, 40):
        run.log_evaluation(evaluation(step))
    return run


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


# --- the folder ---


def test_a_new_run_holds_all_it_was_given(run: Run) -> None:
    assert run.name == "2026-04-01-tiny-120000"
    assert run.config == CONFIG
    assert run.state == "running"
    assert run.status["pid"] == os.getpid()
    assert run.environment["packages"]["numpy"] == np.__version__
    assert {path.name for path in run.folder.iterdir()} >= {"checkpoints", "pictures", "metrics.jsonl", "lock"}


def test_records_come_back_as_they_were_written(told: Run) -> None:
    assert read_metrics(told)[0] == [step_record(step) for step in range(1, 41)]
    assert read_evaluations(told)[0] == evaluation(10)


def test_a_run_folder_that_exists_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match="exists: give another name"):
        create_run(run.folder.parent, "tiny", CONFIG, started=NOON)


@pytest.mark.parametrize("name", ["a/b", "..", "../x", "a\\b", "", " ", ".hidden", "a..b", "!!!", "x" * 100])
def test_run_names_that_leave_their_folder_or_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="name"):
        create_run(tmp_path / "runs", name, CONFIG)
    assert not (tmp_path / "runs").exists()


def test_a_missing_parent_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist: make it"):
        create_run(tmp_path / "nowhere" / "runs", "tiny", CONFIG)
    assert not list(tmp_path.iterdir())


def test_a_read_only_root_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    is_root = os.geteuid() == 0  # who may write everywhere: become nobody for a moment
    # ``nobody`` must get to the folder through pytest's private ones: go there first.
    here = Path.cwd()
    os.chdir(tmp_path)
    if is_root:
        os.seteuid(65534)
    try:
        with pytest.raises(InputError, match="cannot hold a run folder"):
            create_run(Path(), "tiny", CONFIG)
    finally:
        if is_root:
            os.seteuid(0)
        os.chdir(here)
        tmp_path.chmod(0o755)
    assert not list(tmp_path.iterdir())


def test_a_config_that_json_cannot_hold_names_the_key_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\['config'\]\['net'\] is a object"):
        create_run(tmp_path / "runs", "tiny", {"net": object()})
    assert not (tmp_path / "runs").exists()


def test_a_dataclass_is_a_config(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Tiny:
        size: int = 3
        path: Path = Path("a") / "b"

    with create_run(tmp_path, "tiny", Tiny()) as run:
        assert run.config == {"size": 3, "path": str(Path("a") / "b")}


def test_a_context_marks_how_it_ended(tmp_path: Path) -> None:
    with create_run(tmp_path, "fine", CONFIG) as fine:
        pass
    with pytest.raises(ZeroDivisionError), create_run(tmp_path, "broken", CONFIG) as broken:
        _ = 1 / 0
    with pytest.raises(KeyboardInterrupt), create_run(tmp_path, "cut", CONFIG) as cut:
        raise KeyboardInterrupt
    assert [r.state for r in (fine, broken, cut)] == ["finished", "failed", "stopped"]
    assert broken.status["error"] == "ZeroDivisionError: division by zero"


def test_a_finished_run_has_its_summary_and_takes_no_more(run: Run) -> None:
    run.finish("finished", {"loss": np.float32(0.5)})
    assert run.summary == {"loss": 0.5}
    with pytest.raises(InputError, match="open for reading"):
        run.log(step_record(1))


def test_a_run_whose_process_was_killed_is_lost(tmp_path: Path) -> None:
    code = (
        "import os, sys; from wamlab.lab.run import create_run; r = create_run(sys.argv[1], 'k', {});"
        " r.log({'step': 1}); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert find_run(tmp_path).state == "lost"
    with create_run(tmp_path, "k", {}, is_resumed=True) as resumed:  # the dead one's lock does not hold
        assert resumed.state == "running"
        assert resumed.status["num_resumes"] == 1


def test_pictures_are_png_files_with_plain_names(run: Run) -> None:
    png = strip_png([[np.zeros((8, 8, 3), np.uint8)]], ["real"])
    assert run.save_picture("step-1", png).read_bytes() == png
    with pytest.raises(InputError, match="not a PNG"):
        run.save_picture("step-2", b"GIF89a")
    with pytest.raises(InputError, match="no plain file name"):
        run.save_picture("../step", png)


def test_secrets_on_the_command_line_and_in_the_environment_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["train", "--hub-token", "s3cret", "--api_key=s3cret", "HF_TOKEN=s3cret", "--steps=3", "tokens.json"]
    hidden = ["train", "--hub-token", "***", "--api_key=***", "HF_TOKEN=***", "--steps=3", "tokens.json"]
    assert without_secrets(given) == hidden
    monkeypatch.setenv("SOME_SETTING", "s3cret")
    assert "s3cret" not in json.dumps(describe_environment())


# --- several processes ---


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = (
        "import sys; from wamlab.lab.run import create_run; r = create_run(sys.argv[1], 'k', {});"
        " print('ready', flush=True); sys.stdin.read(); r.finish()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout and first.stdin
        assert first.stdout.readline() == "ready\n"
        with pytest.raises(InputError, match=f"is being written by process {first.pid} on "):
            create_run(tmp_path, "k", {}, is_resumed=True)
        first.stdin.close()
    create_run(tmp_path, "k", {}, is_resumed=True).finish()


def test_a_run_still_open_in_this_process_says_so(run: Run) -> None:
    with pytest.raises(InputError, match="still open in this very process"):
        create_run(run.folder.parent, "tiny", CONFIG, is_resumed=True)


def test_a_reader_does_not_touch_the_lock(run: Run) -> None:
    assert open_run(run.folder).state == "running"
    run.log(step_record(1))
    assert len(read_metrics(run.folder)[0]) == 1


# --- lines ---


def test_a_half_written_last_line_is_left_for_the_next_look(told: Run) -> None:
    line = encode_line(step_record(41))
    with (told.folder / "metrics.jsonl").open("ab") as file:
        file.write(line[:30])
        file.flush()
        records, offset = read_metrics(told)
        assert len(records) == 40
        assert read_metrics(told, offset) == ([], offset)
        file.write(line[30:])
    assert read_metrics(told, offset)[0] == [step_record(41)]


@pytest.mark.parametrize(
    "damage", [b'{"step": 3, "lo\n', b"[1, 2]\n", b"\0\0\0\n", b'{"loss": 1}\n', b'{"step": "3"}\n']
)
def test_a_corrupt_line_is_left_out_by_viewers_and_refused_on_resume(run: Run, damage: bytes) -> None:
    run.log(step_record(1))
    offset = read_metrics(run)[1]
    run.log(step_record(2))
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    run.log(step_record(4))
    wrong = r"line 3 of .*metrics\.jsonl is not a JSON record with a step"
    for since, steps in ((0, [1, 2, 4]), (offset, [2, 4])):
        with pytest.warns(UserWarning, match=f"{wrong} .* and is left out"):
            assert [record["step"] for record in read_metrics(run, since)[0]] == steps
    with (run.folder / "metrics.jsonl").open("ab") as file:
        file.write(damage)
    assert list_runs(run.folder.parent)[0]["step"] == 4
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        assert "step" in summary_table(run) and write_report(run).exists()
    assert [text.count("(and 1 more)") for text in {str(warning.message) for warning in told}] == [1]
    run.finish("stopped")
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(
        InputError, match=r"line 3 of .*metrics\.jsonl \(and 1 more\) is not a JSON .*: mend or delete it"
    ):
        create_run(run.folder.parent, "tiny", CONFIG, is_resumed=True)
    assert before == {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def test_numbers_that_are_not_finite_become_gaps_in_strict_json(run: Run) -> None:
    run.log({"step": 1, "loss": math.nan, "norm": np.float32("inf"), "levels": np.array([1.0, np.nan])})
    line = (run.folder / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "norm": None, "levels": [1, None]}


def test_a_record_without_a_step_is_refused(run: Run) -> None:
    with pytest.raises(InputError, match="'step'"):
        run.log({"loss": 1.0})


def test_the_last_record_of_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"".join(encode_line(step_record(step)) for step in range(1, 2001)) + b'{"half')
    assert path.stat().st_size > 500_000
    assert read_last(path) == step_record(2000)


def test_resuming_forgets_later_records_and_keeps_them_in_history(told: Run) -> None:
    told.finish("stopped", {"loss": 1.0})
    with (told.folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 41, "lo')  # killed while writing
    tail = Tail(open_run(told.folder))
    assert tail.read() == ([step_record(step) for step in range(1, 41)], False)
    with create_run(told.folder.parent, "tiny", CONFIG | {"seed": 1}, is_resumed=True) as resumed:
        assert resumed.folder == told.folder
        assert resumed.summary is None
        resumed.truncate_metrics(20)
        resumed.log(step_record(21))
        assert [record["step"] for record in read_metrics(resumed)[0]] == list(range(1, 22))
        assert [record["step"] for record in read_evaluations(resumed)] == [10]
        kept = {path.name.split("-", 3)[3]: path for path in (resumed.folder / "history").iterdir()}
        assert len(kept["metrics.jsonl"].read_text().splitlines()) == 20
        assert json.loads(kept["config.json"].read_text()) == CONFIG
        assert resumed.config["seed"] == 1
    records, is_restarted = tail.read()
    assert is_restarted
    assert len(records) == 21


def test_resuming_what_is_not_there_names_what_is(run: Run) -> None:
    with pytest.raises(InputError, match=r"no run named 'tinny' .* there are 2026-04-01-tiny-120000"):
        create_run(run.folder.parent, "tinny", CONFIG, is_resumed=True)


# --- finding ---


def test_a_run_is_found_by_a_part_of_its_name(tmp_path: Path) -> None:
    for name in ("alpha", "alpha two", "beta"):
        create_run(tmp_path, name, CONFIG, started=NOON).finish()
    assert find_run(tmp_path, "beta").name == "2026-04-01-beta-120000"
    assert find_run(tmp_path, "2026-04-01-alpha-1").name == "2026-04-01-alpha-120000"
    with pytest.raises(InputError, match=r"2 runs in .* fit 'alpha'"):
        find_run(tmp_path, "alpha")
    with pytest.raises(InputError, match="there are 2026-04-01-beta-120000"):
        find_run(tmp_path, "betta")
    assert [row["run"] for row in list_runs(tmp_path)] == [
        f"2026-04-01-{n}-120000" for n in ("alpha", "alpha-two", "beta")
    ]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a run folder"):
        open_run(tmp_path)
    with pytest.raises(InputError, match="holds no runs"):
        find_run(tmp_path)


def test_names_in_other_scripts_make_folders() -> None:
    assert slug_of("Тест №1_b") == "тест-1-b"


# --- thinning ---


def test_thinning_keeps_every_buckets_extremes_in_their_order() -> None:
    values = np.random.default_rng(0).normal(size=1003)
    values[500], values[777] = 50.0, -50.0
    thin = extremes(values, 16).reshape(-1, 2)
    for bucket, pair in enumerate(thin):
        part = values[16 * bucket : 16 * bucket + 16]
        assert {part.min(), part.max()} == set(pair)
        assert np.flatnonzero(part == pair[0])[0] <= np.flatnonzero(part == pair[1])[0]


def test_thinning_leaves_gaps_only_where_nothing_is_known() -> None:
    values = np.array([np.nan, 1.0, np.nan, np.nan, 5.0, np.nan])
    np.testing.assert_array_equal(extremes(values, 2), [1, 1, np.nan, np.nan, 5, 5])


def test_drawing_in_parts_gives_what_drawing_at_once_gives() -> None:
    columns = Columns(step_record(step) for step in range(1, 1500))
    for size in (1, 4):
        whole = drawable(columns, size)
        first = 1200 // size
        part = drawable(columns, size, first)
        for name, values in part.items():
            np.testing.assert_allclose(values, whole[name][first * (1 if size == 1 else 2) :], err_msg=name)


def test_a_hundred_thousand_records_stay_few_rows() -> None:
    size = bucket_size(100_000, 1000)
    assert size == 128
    assert len(extremes(np.zeros(100_000), size)) == 1564


def test_smoothing_a_constant_changes_nothing_and_skips_gaps() -> None:
    np.testing.assert_allclose(smoothed(np.array([np.nan, 2.0, np.nan, 2.0])), [np.nan, 2, 2, 2])


def test_a_column_that_comes_late_has_gaps_before() -> None:
    columns = Columns([{"step": 1, "loss": 1.0}, {"step": 2, "loss": None, "samples_per_s": 3.0}])
    np.testing.assert_array_equal(columns["samples_per_s"], [np.nan, 3])
    np.testing.assert_array_equal(columns["loss"], [1, np.nan])


def test_messages_rebuild_in_a_view_what_the_kernel_would_draw() -> None:
    """A view keeps rows and appends rows, as chart.js does; whatever the batches, it must hold the whole."""
    sent: list[tuple[dict, np.ndarray]] = []

    class Recorded(LiveChart):
        def send(self, content: dict, buffers: list[bytes] | None = None) -> None:
            assert buffers
            sent.append((content, np.frombuffer(buffers[0], "<f8").reshape(len(content["names"]), -1)))

    chart = Recorded(max_buckets=64)
    records = [step_record(step) for step in range(1, 1001)]
    rng = random.Random(0)
    while records:
        count = rng.randint(1, 90)
        chart.show(records[:count], {"name": "x"}, [])
        del records[:count]
    view = np.empty((len(sent[0][0]["names"]), 0))
    for message, rows in sent:
        assert message["keep"] <= view.shape[1]
        view = np.concatenate([view[:, : message["keep"]], rows], axis=1)
    whole = drawable(Columns(step_record(step) for step in range(1, 1001)), bucket_size(1000, 64))
    np.testing.assert_allclose(view, np.stack(list(whole.values())))
    assert sum(message["keep"] == 0 for message, _ in sent) < 12  # else it is no appending
    chart.close()


# --- pictures ---


def test_charts_are_well_formed_and_show_every_curve(told: Run) -> None:
    records, evaluations = read_metrics(told)[0], read_evaluations(told)
    loss = loss_chart(records, evaluations)
    for name in ("total", "video", "action", "held-out"):
        assert name in loss.svg
    assert "data wait" in split_chart(records).svg
    bundle = told._repr_mimebundle_()
    for svg in (loss.svg, levels_chart(evaluations).svg, bundle["image/svg+xml"]):
        assert parsed(svg).tag.endswith("svg")
    assert bundle["text/plain"].startswith("2026-04-01-tiny-120000: running\nstep 40 of 100")


@pytest.mark.parametrize("values", [[], [np.nan], [0.0], [-1.0, -2.0], [1e-12, 1e12], [3.0, 3.0, 3.0], [0, np.nan, 5]])
@pytest.mark.parametrize("is_log", [False, True])
def test_charts_of_odd_values_are_well_formed_and_finite(values: list[float], is_log: bool) -> None:
    y = np.array(values, dtype=float)
    line = Line("<odd> & 'even'", "blue", np.arange(float(len(y))), y, raw=y)
    for chart in (line_chart([line], "t", is_log=is_log), stacked_chart([line], "t")):
        parsed(chart.svg)
        assert "nan" not in chart.body
        assert "inf" not in chart.body


def test_an_empty_run_still_shows_itself(run: Run) -> None:
    assert "nothing recorded yet" in run._repr_mimebundle_()["image/svg+xml"]
    assert "running" in summary_table(run)
    assert write_report(run).is_file()


def test_bars_are_as_long_as_their_values() -> None:
    chart = bar_chart([Bar("a", 1.0), Bar("b", 2.0, before=4.0)], "t")
    first, second = (float(rect.get("width", 0)) for rect in parsed(chart.svg).iter() if rect.tag.endswith("rect"))
    assert second == pytest.approx(2 * first, abs=0.2)


def test_ticks_are_round_and_inside() -> None:
    assert nice_ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert nice_ticks(-3, 12, 5) == [0, 5, 10]
    assert [tick_text(v) for v in (0, 0.001, 250, 2500, 20_000, 1.5e6)] == ["0", "0.001", "250", "2500", "20k", "1.5M"]


def test_labels_that_would_overlap_are_moved_apart() -> None:
    moved = spread([100, 101, 102, 200], 210)
    assert all(b - a >= 15 for a, b in pairwise(moved))
    assert max(moved) <= 210


def test_a_strip_shows_each_frame_where_its_labels_say() -> None:
    rows = [[np.full((4, 6, 3), 10 * (3 * j + i), np.uint8) for i in range(3)] for j in range(2)]
    picture = Image.open(io.BytesIO(strip_png(rows, ["real", "predicted"], ["1", "2", "3"])))
    pixels = np.array(picture)
    for j in range(2):
        for i in range(3):
            x = pixels.shape[1] - 150 * (3 - i) + 4 * (i != 2) - 4 * (i != 2) + 20
            assert (pixels[24 + 100 * j + 48, x, :3] == 10 * (3 * j + i)).all()


def test_a_strip_of_frames_of_two_sizes_is_refused() -> None:
    with pytest.raises(InputError, match="one size"):
        strip_png([[np.zeros((4, 4, 3), np.uint8), np.zeros((5, 4, 3), np.uint8)]], ["a"])


def test_the_analysis_figure_holds_all_curves_and_needs_no_widget(told: Run) -> None:
    figure = analysis_figure(read_metrics(told)[0])
    assert {trace.name for trace in figure.data} >= {"loss", "video_loss", "action_loss", "samples_per_s", "split/data"}
    assert type(figure).__name__ == "Figure"


def test_a_run_in_a_folder_that_takes_no_file_is_shown(
    told: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (told.folder / "report.html").mkdir()  # as unwritable as a read-only disk, also for root
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert main(["show", "--root", str(told.folder.parent)]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1].removeprefix("report: "))
    assert path.is_relative_to(tmp_path / "temporary") and told.name in path.read_text()


def test_a_report_is_whole_in_itself_and_escapes_what_users_wrote(tmp_path: Path) -> None:
    config = CONFIG | {"instruction": "<script>alert(1)</script>", "list": [{"a": 1}]}
    with create_run(tmp_path, "tiny", config) as run:
        run.log(step_record(1))
        run.log_evaluation(evaluation(1))
        run.save_picture("<b>", strip_png([[np.zeros((8, 8, 3), np.uint8)]], ["real"]))
        run.finish("failed", error="boom <img src=x>")
    page = write_report(run).read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<img src=x>" not in page
    assert 'alt="&lt;b&gt;" src="data:image/png;base64,' in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert 'name="viewport"' in page


def test_nested_configs_flatten_to_dotted_names() -> None:
    assert flattened({"a": {"b": [1, 2]}, "c": [{"d": 3}], "e": {}}) == {"a.b": [1, 2], "c.0.d": 3, "e": {}}


def test_tables_align_numbers_right_and_escape_html() -> None:
    table = Table([{"name": "<x>", "loss": 0.5}, {"name": "long name", "loss": None}])
    assert repr(table).splitlines()[2:] == ["<x>         0.5", "long name     –"]
    assert "&lt;x&gt;" in table._repr_html_()


# --- following ---


def test_following_prints_progress_and_returns_the_summary(tmp_path: Path) -> None:
    run = create_run(tmp_path, "tiny", CONFIG)

    def write() -> None:
        for step in range(1, 101):
            run.log(step_record(step))
        run.log_evaluation(evaluation(100))
        run.finish("finished", {"loss": 0.25})

    writer = threading.Thread(target=write)
    printed = io.StringIO()
    writer.start()
    assert follow(run.folder, every_s=0.01, poll_s=0.01, file=printed) == {"loss": 0.25}
    writer.join()
    text = printed.getvalue()
    assert "step 100/100  loss 0.0166" in text
    assert "evaluated at step 100: held_out_loss 0.02  action_error 0.1" in text
    assert text.splitlines()[-1].startswith("finished after")


def test_following_a_run_that_fails_raises_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad"), create_run(tmp_path, "tiny", CONFIG) as run:
        raise ValueError("bad batch")
    with pytest.raises(RuntimeError, match="run failed: ValueError: bad batch"):
        follow(run, file=io.StringIO())


def test_the_time_left_follows_the_step_time() -> None:
    assert time_left_text({"train": {"num_steps": 100}}, [step_record(40)]) == "9 s left"
    assert time_left_text({}, [step_record(40)]) == ""


def test_watching_outside_a_notebook_points_to_follow(run: Run) -> None:
    with pytest.raises(InputError, match="call follow"):
        watch(run)


def test_no_module_of_the_lab_imports_torch() -> None:
    import wamlab.lab

    folder = Path(wamlab.lab.__file__).parent
    names = [f"wamlab.lab.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


LOADER = {
    "stages": {
        "decode": {"item_ms": 12.0, "num_threads": 2, "ready": 1.5, "depth": 3},
        "clip": {"item_ms": 2.0, "num_threads": 1, "ready": 0.5, "depth": 2},
    },
    "bottleneck": "decode",
    "wait_fraction": 0.25,
    "num_skipped": 3,
    "cache": {"hit_rates": {"memory": 0.5}},
}


def test_the_loader_chart_names_the_slowest_stage(tmp_path):
    chart = loader_chart(LOADER)
    assert "decode 12 ms, clip 2 ms" in str(chart)
    assert "slowest stage: decode; training waited 25.0% of its time; memory: 50% of frames; 3 broken" in str(chart)
    assert chart.svg.count("fill-orange") > loader_chart(LOADER | {"bottleneck": "none"}).svg.count("fill-orange")
    assert "nothing recorded yet" in str(loader_chart(None))
    run = create_run(tmp_path, "read", {})
    assert newest_loader(run) is None
    run.log({"step": 1, "loader": LOADER})
    run.log({"step": 2})
    assert newest_loader(run) == LOADER
    with pytest.raises(InputError, match="can be watched in a notebook only"):
        watch_loader(run)
