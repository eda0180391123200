"""The panels' numbers and words, without a browser: fronts, timelines, clips, datasets, comparisons."""

import io
import itertools
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from wamlab.data.lerobot import open_dataset
from wamlab.data.write import write_dataset
from wamlab.errors import InputError
from wamlab.lab.clip_viewer import ClipViewer, actions_chart, encode_frame
from wamlab.lab.comparison import Comparison
from wamlab.lab.comparison_panel import ComparisonPanel
from wamlab.lab.dataset_browser import DatasetBrowser, data_url, dataset_chart
from wamlab.lab.launch import Launched
from wamlab.lab.picker import Picker
from wamlab.lab.rollout_panel import RolloutPanel, explain_iteration, gantt_chart, length_map, summarize_iteration
from wamlab.lab.run import Run, create_run
from wamlab.lab.run_panel import BUTTONS, RunPanel
from wamlab.lab.tuner_front import TunerFront, front_chart, front_of, plan_picture
from wamlab.recipes.panels import browse_dataset, rollout_panel, tuner_panel
from wamlab.recipes.tune import Tuned
from wamlab.rl.length_models import LENGTH_MODELS, draw_lengths
from wamlab.rl.rules import RULES
from wamlab.rl.service import SERVICES
from wamlab.rl.simulate import simulate
from wamlab.sim.experts import play_episodes
from wamlab.speed.choice import StepChoice
from wamlab.speed.recompute_plan import RecomputePlan


def bar(worker: int, key: tuple[int, int], start_s: float, end_s: float, chunks: int = 1) -> dict:
    return {
        "worker": worker, "group": key[0], "member": key[1], "start_s": start_s, "end_s": end_s, "chunks": chunks,
    }  # fmt: skip


def choice(memory_gib: float, step_s: float, **more: object) -> dict:
    return {"memory_gib": memory_gib, "step_s": step_s, "runs": [("full", 2), ("keep", 4)], **more}


def items_of(svg: str) -> list[int]:
    root = ElementTree.fromstring(svg)
    return [int(e.attrib["data-item"]) for e in root.iter() if "data-item" in e.attrib]


# --- the tuner's front ---


def test_the_front_holds_what_no_choice_beats_in_both() -> None:
    rng = np.random.default_rng(0)
    choices = [choice(*rng.uniform(1, 10, 2)) for _ in range(60)]
    front = front_of(choices)
    for i, c in enumerate(choices):
        is_beaten = any(
            o["memory_gib"] <= c["memory_gib"] and o["step_s"] <= c["step_s"] and o is not c for o in choices
        )
        assert (i in front) != is_beaten


def test_the_front_begins_at_the_fastest_choice_that_fits_and_shows_its_command() -> None:
    choices = [choice(10, 3.0, command="a"), choice(20, 2.0, command="run <b>"), choice(40, 1.0, command="c")]
    front = TunerFront(list(reversed(choices)), limit_gib=24)
    assert front.choice == choices[1]
    assert "run &lt;b&gt;" in front._detail(1) and "2 full, 4 keep" in front._detail(1)
    front._answer(front, {"kind": "pick", "item": 0}, [])
    assert front.choice == choices[0]
    assert TunerFront(choices, limit_gib=5).choice is None
    assert items_of(front_chart(choices).svg) == [0, 1, 2]


def test_a_plan_is_drawn_block_by_block() -> None:
    drawn = ElementTree.fromstring(plan_picture([("full", 3), ("keep", 2), ("unheard of", 1)]).svg)
    rects = [e.attrib["class"] for e in drawn.iter() if e.tag.endswith("rect")]
    assert rects[:6] == ["fill-grey"] * 3 + ["fill-blue"] * 2 + ["fill-green"]


def test_choices_without_a_figure_and_empty_fronts_are_refused() -> None:
    with pytest.raises(InputError, match="choice 1 has no step_s"):
        front_chart([choice(1, 1), choice(1, 1) | {"step_s": None}])
    with pytest.raises(InputError, match="at least one choice"):
        TunerFront([])


# --- rollouts ---


def test_an_iteration_adds_up() -> None:
    bars = [bar(0, (0, 0), 5, 9, 4), bar(0, (0, 1), 6, 10, 4), bar(1, (1, 0), 5, 7, 2), bar(1, (1, 0), 8, 25, 17)]
    found = summarize_iteration(bars)
    assert (found.num_workers, found.num_episodes, found.makespan_s) == (2, 3, 20)
    assert found.busy_s == (5, 19)  # side by side counts once
    assert found.utilisation == 24 / 40
    assert (found.longest, found.longest_chunks, found.last) == ((1, 0), 19, (1, 0))
    assert found.least_s == 19
    assert summarize_iteration(bars, 3).busy_s == (5, 19, 0)


@pytest.mark.parametrize(
    ("bars", "words"),
    [
        ([bar(0, (0, 0), 0, 10), bar(1, (0, 1), 0, 10)], "would be more than 3 % faster"),
        ([bar(0, (0, 0), 5, 10), bar(1, (0, 1), 0, 2)], "Starting the longest episode first"),
        ([bar(0, (0, i), 2 * i, 2 * i + 2) for i in range(4)] + [bar(1, (1, 0), 0, 1)], "Equal shares would save"),
    ],
)
def test_the_explanation_names_what_holds_an_iteration_up(bars: list[dict], words: str) -> None:
    assert words in explain_iteration(bars)
    assert gantt_chart(bars).text == explain_iteration(bars)


def test_bars_that_overlap_on_a_worker_lie_in_lanes_of_their_own() -> None:
    bars = [bar(0, (0, i), i, i + 3) for i in range(6)]
    root = ElementTree.fromstring(gantt_chart(bars).svg)
    drawn = [e.attrib for e in root.iter() if "data-item" in e.attrib]
    boxes = [tuple(float(a[name]) for name in ("x", "y", "width", "height")) for a in drawn]
    for (x, y, w, h), (x2, y2, w2, h2) in itertools.combinations(boxes, 2):
        assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_a_chosen_bar_tells_of_all_pieces_of_its_episode() -> None:
    panel = RolloutPanel([bar(0, (0, 0), 0, 2, 2), bar(1, (0, 0), 3, 6, 3), bar(0, (0, 1), 2, 4, 2)])
    panel.pick(0)
    assert "5 chunks in 2 pieces, moved to another worker 1 times" in panel._detail(0)
    assert "2 to 5 chunks" in length_map(panel.bars).text


@pytest.mark.parametrize(
    ("bars", "words"),
    [
        ([], "without a bar"),
        ([bar(0, (0, 0), 2, 1)], "before it starts"),
        ([bar(0, (0, 0), 0, 1) | {"chunks": None}], "bar 0 has no chunks"),
        ([bar(7, (0, 0), 0, 1)], "workers count from 0"),
    ],
)
def test_bars_that_make_no_sense_are_refused(bars: list[dict], words: str) -> None:
    with pytest.raises(InputError, match=words):
        summarize_iteration(bars, 2)


# --- clips ---


def film(num_frames: int = 5, side: int = 16) -> np.ndarray:
    return np.random.default_rng(num_frames).integers(0, 256, (num_frames, side, side, 3)).astype(np.uint8)


def test_a_small_clip_travels_pixel_for_pixel_and_leaves_no_state() -> None:
    views, predicted = {"wrist": film(), "left": film()[::-1]}, {"left": film()}
    viewer = ClipViewer(views, predicted, actions=np.zeros((10, 3)), fps=5)
    message, frames = viewer.content()
    assert len(frames) == 15
    for place in message["places"]:
        wanted = {"real": views, "predicted": predicted}[place["row"]][message["views"][place["view"]]]
        for i, frame in enumerate(wanted):
            np.testing.assert_array_equal(np.array(Image.open(io.BytesIO(frames[place["first"] + i]))), frame)
    state = {name: value for name, value in viewer.get_state().items() if name not in ("_esm", "_css")}
    assert len(str(state)) < 2000
    assert viewer.still().png.startswith(b"\x89PNG")
    assert len(repr(viewer.still())) < 200


def test_large_frames_are_compressed() -> None:
    frame = np.full((200, 300, 3), 90, np.uint8)
    assert encode_frame(frame).startswith(b"\xff\xd8\xff")
    assert encode_frame(frame[:100, :100]).startswith(b"\x89PNG")


def test_clips_of_different_lengths_and_wrong_kinds_are_refused() -> None:
    with pytest.raises(InputError, match="4, 5 frames"):
        ClipViewer({"a": film(5)}, {"a": film(4)})
    with pytest.raises(InputError, match="no real ones"):
        ClipViewer({"a": film(5)}, {"b": film(5)})
    with pytest.raises(InputError, match="at least one view"):
        ClipViewer({})
    with pytest.raises(InputError, match="frames a second"):
        ClipViewer({"a": film(5)}, fps=0)
    with pytest.raises(InputError, match="do not fit"):
        actions_chart(np.zeros((4, 2)), np.zeros((5, 2)))
    with pytest.raises(InputError, match="3 names"):
        actions_chart(np.zeros((4, 2)), names=["x", "y", "z"])


# --- datasets ---


EPISODES = [{"episode": i, "task": ("open", "<i>close</i>")[i % 2], "seconds": 1.0 + i} for i in range(6)]


def test_episodes_are_read_when_they_are_looked_at_and_text_is_escaped() -> None:
    asked = []

    def thumbnails(place: int) -> list[bytes]:
        asked.append(place)
        return [encode_frame(film()[0])]

    browser = DatasetBrowser(EPISODES, thumbnails)
    assert asked == []
    browser._answer(browser, {"kind": "ready"}, [])
    browser.pick(3)
    assert asked == [0, 3]
    assert "<i>" not in browser.index and "<i>" not in browser._detail(3)
    assert "data:image/png;base64," in browser._detail(3)
    text = dataset_chart(EPISODES).text
    assert "6 episodes of 2 tasks" in text and "lasts 1 to 6 s" in text


def test_what_is_no_dataset_or_picture_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to browse"):
        DatasetBrowser([])
    with pytest.raises(InputError, match="place 1 has no task"):
        DatasetBrowser([EPISODES[0], {"episode": 1, "seconds": 2.0}])
    with pytest.raises(InputError, match="no PNG"):
        data_url(b"GIF89a")


def test_what_a_view_asks_for_out_of_range_is_refused() -> None:
    browser = DatasetBrowser(EPISODES)
    for item in (-1, 6):
        with pytest.raises(InputError, match="there are 6"):
            browser.pick(item)
    browser._answer(browser, {"kind": "pick", "item": "2"}, [])
    assert browser.chosen == 0
    with pytest.raises(InputError, match="cannot be chosen"):
        Picker("x", "", 2, str, dataset_chart(EPISODES), chosen=2)


# --- runs ---


def make_run(root: Path, name: str, rate: float) -> Run:
    run = create_run(root, name, {"train": {"num_steps": 10, "learning_rate": rate}})
    for step in range(1, 11):
        run.log({"step": step, "loss": rate / step, "step_s": 0.1, "samples_per_s": 10.0, "memory_gib": 1.0})
    run.log_evaluation({"step": 10, "held_out_loss": rate})
    run.finish()
    return run


def test_a_comparison_shows_differences_first_and_only_curves_that_there_are(tmp_path: Path) -> None:
    runs = (make_run(tmp_path / "runs", "slow", 1e-4), make_run(tmp_path / "runs", "fast", 1e-3))
    panel = ComparisonPanel(Comparison(runs), verdict="equivalent: <1 % apart")
    assert panel.index.index("&lt;1 %") < panel.index.index("train.learning_rate") < panel.index.index("wl-tabs")
    assert "held-out loss" in panel.index and "show MFU" not in panel.index
    assert panel.chart(0).text.count("→") == 2
    for number in range(panel.num_items):
        assert "nothing recorded" not in panel.chart(number).text
    assert panel.still().text.startswith("equivalent")


def test_every_state_of_a_launched_run_has_its_buttons(tmp_path: Path) -> None:
    known = {"running", "paused", "finished", "failed", "stopped", "lost", "starting"}
    assert known <= BUTTONS.keys()
    assert Launched(None, None, make_run(tmp_path / "runs", "x", 1e-3)).state in BUTTONS
    with pytest.raises(InputError, match="needs a notebook"):
        RunPanel("tiny")


# --- panels of what other rooms made ---


def test_simulated_rollouts_are_shown_with_all_their_chunks() -> None:
    drawn = draw_lengths(LENGTH_MODELS["LIBERO-10"], 4, 4, seed=0)
    timeline = simulate(drawn, RULES["context"], SERVICES["balanced"], num_workers=3, seed=0)
    lengths = {(group, member): int(n) for group, row in enumerate(drawn.lengths) for member, n in enumerate(row)}
    panel = rollout_panel(timeline, lengths)
    found = summarize_iteration(panel.bars, 3)
    assert found.num_episodes == 16
    assert found.makespan_s == pytest.approx(timeline.makespan_s)
    assert sum(bar["chunks"] for bar in panel.bars) == sum(lengths.values())


def test_a_recorded_dataset_is_browsed_with_frames_of_its_cameras(tmp_path: Path) -> None:
    write_dataset(play_episodes(("reach",), 3, seed=0, size=32), tmp_path / "recorded")
    browser = browse_dataset(tmp_path / "recorded")
    assert browser.num_items == 3 and "recorded: 3 episodes" in browser.title
    shown = browser._detail(2)
    assert shown.count("<img") == 3 * len(open_dataset(tmp_path / "recorded").cameras)


def test_a_tuned_front_shows_each_choice_with_its_command() -> None:
    plans = [RecomputePlan.uniform("full", 4), RecomputePlan.read("2 full, 2 keep")]
    front = tuple(StepChoice(2, 4, plan, 2**30 * (i + 1), 2.0 - i) for i, plan in enumerate(plans))
    tuned = Tuned("tiny", "cpu", int(1.5 * 2**30), front[0], front, None, {}, {}, {}, True)
    panel = tuner_panel(tuned)
    assert panel.choice is not None and panel.choice["label"] == "4 full"
    assert "--speed.recompute &quot;2 full, 2 keep&quot; --train.num-micro-batches 4" in panel._detail(1)
