"""The live chart's numbers: what is sent, how files are read in pieces, how little of a process watching takes."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wamlab.errors import InputError
from wamlab.lab.control import read_wish
from wamlab.lab.feed import SHARE, WAIT_S, Feed, buttons_for
from wamlab.lab.live import LiveChart
from wamlab.lab.run import Run, create_run
from wamlab.lab.series import PERCENTILES, RECENT_STEPS, Columns, drawable, percentiles
from wamlab.lab.tail import Tail


def step_record(step: int, **more: Any) -> dict:
    return {"step": step, "loss": 1 / step, "step_s": 0.01 * (1 + step % 7), "mfu": 0.4, "memory_gib": 1.5} | more


class Sent:
    """Stands where a notebook's front end is: puts together what a chart sends, as the browser does."""

    def __init__(self, chart: LiveChart) -> None:
        self.rows: dict[str, np.ndarray] = {}
        self.num_bytes: list[int] = []
        chart.send = self.receive  # type: ignore[method-assign]

    def receive(self, message: dict, buffers: list[bytes]) -> None:
        names, keep = message["names"], message["keep"]
        new = dict(zip(names, np.frombuffer(buffers[0]).reshape(len(names), -1), strict=True))
        before = self.rows if keep else {name: np.empty(0) for name in names}
        self.rows = {name: np.concatenate([before[name][:keep], new[name]]) for name in names}
        self.num_bytes.append(len(buffers[0]))


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = create_run(tmp_path / "runs", "watched", {"train": {"num_steps": 100}})
    yield run
    if run.is_writer:
        run.finish("stopped")


@pytest.mark.parametrize("num_records", [5, 64, 300, 1000])
def test_a_chart_that_grew_holds_what_one_drawn_at_once_holds(num_records: int) -> None:
    chart = LiveChart(max_buckets=50)
    sent = Sent(chart)
    records = [step_record(step) for step in range(1, num_records + 1)]
    for start in range(0, num_records, 7):
        chart.show(records[start : start + 7], {"name": "x"}, [])
    columns = Columns(records)
    size = next(2**power for power in range(20) if 2**power * 50 >= num_records)
    wanted = drawable(columns, size)
    assert sent.rows.keys() == wanted.keys() >= PERCENTILES.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(sent.rows[name], values, atol=1e-12, err_msg=name)


def test_a_view_that_opens_late_gets_everything_and_later_only_what_is_new() -> None:
    chart = LiveChart()
    sent = Sent(chart)
    chart.show([step_record(step) for step in range(1, 501)], {"name": "x"}, [])
    chart._answer(chart, {"kind": "ready"}, [])
    assert len(sent.rows["step"]) == 500
    chart.show([step_record(501)], {"name": "x"}, [])
    assert len(sent.rows["step"]) == 501
    assert sent.num_bytes[-1] < sent.num_bytes[-2] / 100


def test_percentiles_are_those_of_recent_steps() -> None:
    values = np.random.default_rng(0).gamma(2.0, size=1000)
    found = percentiles(values, 1)
    for row, share in zip(found, PERCENTILES.values(), strict=True):
        for end in (1, 2, 57, 100, 640, 1000):
            seen = values[max(0, end - RECENT_STEPS) : end]
            assert row[end - 1] == np.percentile(seen, share, method="inverted_cdf")


def test_percentiles_of_a_large_bucket_are_of_all_its_steps_and_gaps_count_for_nothing() -> None:
    values = np.arange(1000.0)
    values[5::10] = np.nan
    found = percentiles(values, 500)
    known = values[500:][~np.isnan(values[500:])]
    assert found.shape == (3, 2)
    assert found[0, 1] == np.percentile(known, 50, method="inverted_cdf")
    assert np.isnan(percentiles(np.full(10, np.nan), 1)).all()


def test_a_long_file_is_read_in_pieces_that_lose_nothing(run: Run) -> None:
    for step in range(1, 301):
        run.log(step_record(step))
    tail, steps, num_readings = Tail(run, num_bytes=2000), [], 0
    while not num_readings or tail.has_more:
        records, is_restarted = tail.read()
        assert not is_restarted
        steps += [record["step"] for record in records]
        num_readings += 1
    assert steps == list(range(1, 301))
    assert num_readings > 10
    assert tail.read() == ([], False)


def test_a_line_longer_than_a_piece_is_read_all_the_same(run: Run) -> None:
    run.log(step_record(1, note="x" * 5000))
    records, _ = Tail(run, num_bytes=1000).read()
    assert [record["step"] for record in records] == [1]


class Slow:
    """A view that takes its time, as a chart of a slow machine would."""

    def __init__(self) -> None:
        self.num_updates = 0

    def show(self, records: Any, head: Any, evaluations: Any) -> None:
        spend(0.002)
        self.num_updates += 1

    def forget(self) -> None: ...


def spend(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


def test_watching_takes_a_bounded_share_of_its_process_on_a_machine_however_busy(run: Run) -> None:
    """2 ms of an update would be a third of a process that polls every 4 ms; the next one waits for work to be done."""
    view = Slow()
    feed = Feed(run, view, poll_s=0.004)
    thread = threading.Thread(target=feed.run_until_end)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    thread.start()
    step = 0
    while time.process_time() - start_cpu_s < 2.0:
        spend(0.02)
        run.log(step_record(step := step + 1))
    worked_s, wall_s = time.process_time() - start_cpu_s, time.monotonic() - start_s
    feed.end()
    thread.join()
    assert view.num_updates >= 4
    # An update comes when the work is done or after WAIT_S at the latest.
    assert feed.spent_s < 2 * SHARE * worked_s + 0.0035 * wall_s / WAIT_S


def test_a_frozen_feed_shows_nothing_until_it_goes_on(run: Run) -> None:
    view = Slow()
    feed = Feed(run, view)
    feed.freeze()
    thread = threading.Thread(target=feed.run_until_end)
    thread.start()
    run.log(step_record(1))
    time.sleep(0.3)
    assert view.num_updates == 0
    feed.go_on()
    run.finish()
    thread.join(10)
    assert feed.num_records == 1


def test_a_button_asks_the_run_through_its_folder(run: Run) -> None:
    from wamlab.lab.control import ask

    asked = []
    chart = LiveChart(on_wish=lambda wish: (asked.append(wish), ask(run, wish)))
    chart._answer(chart, {"kind": "ask", "wish": "pause"}, [])
    assert asked == ["pause"] and read_wish(run.folder) == "pause"
    assert [wish for wish, _, _ in buttons_for("running")] == ["pause", "stop"]
    assert [wish for wish, _, _ in buttons_for("paused")] == ["go on", "stop"]
    assert buttons_for("finished") == []
    run.finish()
    with pytest.raises(InputError, match="only a running run"):
        ask(run, "pause")
