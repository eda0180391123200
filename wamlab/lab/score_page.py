"""The score of a run as one page: success and films, error curves, real against predicted frames, checkpoints."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from wamlab.errors import explained_damage
from wamlab.lab.chart import Bar, Chart, Line, bar_chart, line_chart
from wamlab.lab.records import read_json, write_whole
from wamlab.lab.report import page_html
from wamlab.lab.table import Table, short

RESULT, PAGE = "score.json", "score.html"
FEEDS = {  # name in the score -> what a person reads, colour
    "history": ("real frames seen", "blue"),
    "newest frame": ("newest frame alone", "purple"),
    "own frames": ("own frames fed back", "orange"),
    "mean": ("mean action", "grey"),
    "repeat": ("repeat last", "green"),
    "copy": ("copy block's first", "grey"),
    "copy first": ("copy first", "green"),
}
MAX_ROWS = 12  # of the table of tasks
STYLE = """
video{width:100%;border-radius:6px;border:1px solid var(--line)}
.films{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,290px),1fr));gap:16px}
.films figcaption,.note{color:var(--soft);font-size:13px}
.films b.failure{color:var(--orange)} .films b.success{color:var(--green)}
.wide figure{margin:0 0 14px}
"""
Score = Mapping[str, Any]


def write_score_page(folder: Path) -> Path:
    """Write ``score.html`` beside the ``score.json`` of a run folder, whole in itself, and return its path."""
    path = folder / PAGE
    with explained_damage(folder / RESULT, "score the run again"):
        page = score_html(read_json(folder / RESULT), folder)
    write_whole(path, page)
    return path


def score_html(score: Score, folder: Path) -> str:
    """Return the page as an HTML document; films and pictures are read below ``folder`` and put inside."""
    window = f"{score['num_clips']} held-out episodes, one clip each, {score['num_blocks']} blocks of "
    window += f"{score['actions_per_block']} ticks; ranges and bands are 95 % bootstrap intervals over episodes"
    body = [
        f"<header><h1>{escape(score['run'])}, step {score['step']:,}</h1></header>",
        f'<div class="soft">{escape(window)}</div>',
        f'<div class="figures">{"".join(_tile(*tile) for tile in tiles(score))}</div>',
        *_closed_loop(score, folder),
        "<h2>Open loop: actions</h2>",
        _chart(tick_chart(score)),
        _note(history_note(score)),
        '<div class="pair">' + _scroll(error_table(score)) + _scroll(joint_table(score)) + "</div>",
        "<h2>Open loop: video</h2>",
        '<div class="pair">' + "".join(f"<div>{c.svg}</div>" for c in frame_charts(score)) + "</div>",
        _note(
            "Drift: with its own frames fed back the network never sees a real frame after the first; "
            "states are the recorded ones. Copying repeats the frame before each block, or the first one throughout."
        ),
        *_pictures(folder),
        "<h2>Flow loss by noise level</h2>",
        _chart(level_chart(score)),
        "<h2>By embodiment and task</h2>",
        _scroll(Table(group_rows(score["by_embodiment"]))),
        "<p></p>",
        _scroll(Table(group_rows(score["by_task"])[:MAX_ROWS])),
        _note(f"The {min(MAX_ROWS, len(score['by_task']))} of {len(score['by_task'])} tasks with most episodes."),
        *_checkpoints(score),
    ]
    return page_html(f"score of {score['run']}", "".join(body), STYLE)


def score_text(folder: Path) -> str:
    """Return the key figures of a scored run as aligned text."""
    with explained_damage(folder / RESULT, "score the run again"):
        score = read_json(folder / RESULT)
        rows = [{"figure": name, "value": value, "against": remark} for name, value, remark in tiles(score)]
        return f"{score['run']}, step {score['step']:,}\n\n{Table(rows)}"


def tiles(score: Score) -> list[tuple[str, str, str]]:
    """Return the key figures as (name, value, remark)."""
    actions, video = score["actions"], score["video"]
    found = []
    if played := score.get("closed_loop"):
        for mode, figures in played["modes"].items():
            found.append((f"success, {mode}", f"{figures['success']['rate']:.0%}", rate_text(figures["success"])))
        for mode, word in (("synchronous", "latency"), ("asynchronous", "latency, ahead")):
            timing = played["latency"][mode]
            remark = f"p99 {timing['latency_ms']['p99']:.0f}, pause {timing['pause_ms']:.0f} ms"
            found.append((word, f"{timing['latency_ms']['p50']:.0f} ms", remark))
    error = actions["history"]["all"]
    found.append(("action error", short(error["value"]), f"{span_text(error)}"))
    baseline = min(("mean", "repeat"), key=lambda name: actions[name]["all"]["value"])
    found.append((f"error of {FEEDS[baseline][0]}", short(actions[baseline]["all"]["value"]), "the best trivial one"))
    psnr, ssim = video["history"]["psnr_db"], video["history"]["ssim"]
    found.append(("video PSNR", f"{psnr['value']:.1f} dB", f"copying {video['copy']['psnr_db']['value']:.1f} dB"))
    found.append(("video SSIM", f"{ssim['value']:.3f}", f"copying {video['copy']['ssim']['value']:.3f}"))
    if "lpips" in score:
        found.append(("LPIPS", short(score["lpips"]), "lower is closer"))
    return found


def history_note(score: Score) -> str:
    """Say how far back the policy sees."""
    if score["has_history"]:
        return f"The network sees up to {score['max_blocks']} blocks; 'newest frame alone' begins anew at every block."
    return "This network sees one block: it has no history, so with and without are the same."


def tick_chart(score: Score) -> Chart:
    """Draw the action error over the horizon, for every feed against the trivial baselines."""
    lines = []
    for name in ("history", "newest frame", "own frames", "mean", "repeat"):
        if name in score["actions"]:
            lines.append(_line(name, score["actions"][name]["by_tick"], 1, has_band=name in ("history", "own frames")))
    title = "mean absolute action error (range of actions: 2)"
    return line_chart(lines, title, x_label="tick of the horizon", has_zero=True)


def frame_charts(score: Score) -> list[Chart]:
    """Draw PSNR and SSIM over the horizon."""
    charts = []
    for key, title in (("psnr_db_by_frame", "PSNR, dB"), ("ssim_by_frame", "SSIM")):
        names = ("history", "newest frame", "own frames", "copy", "copy first")
        lines = [
            _line(name, score["video"][name][key], 1, has_band=name in ("history", "own frames"))
            for name in names
            if name in score["video"]
        ]
        charts.append(line_chart(lines, title, width=440, height=230, x_label="frame of the horizon"))
    return charts


def level_chart(score: Score) -> Chart:
    """Draw the held-out flow loss at each noise level."""
    levels = {level: span for level, span in score["loss_by_level"].items() if level != "mean"}
    bars = [Bar(f"{level}", span["value"]) for level, span in sorted(levels.items(), key=lambda item: float(item[0]))]
    mean = score["loss_by_level"]["mean"]
    return bar_chart(bars, f"held-out flow loss by noise level; mean {short(mean['value'])} ({span_text(mean)})")


def error_table(score: Score) -> Table:
    """Return every feed's and baseline's action error with its interval."""
    rows = [
        {"predicted from": FEEDS.get(name, (name, ""))[0], "error": figures["all"]["value"],
         "95 %": span_text(figures["all"])}
        for name, figures in score["actions"].items()
    ]  # fmt: skip
    return Table(rows)


def joint_table(score: Score) -> Table:
    """Return the action error of each joint, beside the baselines'."""
    actions = score["actions"]
    rows = []
    for joint, span in enumerate(actions["history"]["by_joint"]):
        if span["value"] is not None:
            row = {"joint": str(joint), "error": span["value"], "95 %": span_text(span)}
            rows.append(row | {name: actions[name]["by_joint"][joint]["value"] for name in ("mean", "repeat")})
    return Table(rows)


def group_rows(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of tasks or embodiments, those with most episodes first."""
    ordered = sorted(groups, key=lambda group: (-group["num_episodes"], group["name"]))
    return [
        {
            "of": group["name"], "episodes": group["num_episodes"], "action error": group["action_error"]["value"],
            "95 %": span_text(group["action_error"]), "mean action": group["action_error_mean"],
            "repeat": group["action_error_repeat"], "PSNR dB": group["psnr_db"]["value"],
        }
        for group in ordered
    ]  # fmt: skip


def swing_chart(score: Score) -> Chart:
    """Draw the figures of all evaluations of training, each over its last value."""
    evaluations = score["swing"]["evaluations"]
    lines = []
    for key, label, color in (("action_error", "action error", "blue"), ("held_out_loss", "held-out loss", "purple")):
        known = [(e["step"], e[key]) for e in evaluations if e.get(key)]
        if len(known) > 1:
            steps, values = np.array(known, dtype=float).T
            lines.append(Line(label, color, steps, values / values[-1], is_dotted=True))
    return line_chart(lines, "evaluations during training, over the last one", height=220, is_log=True)


def rate_text(success: Mapping[str, Any]) -> str:
    """Return a success rate's interval and number of episodes."""
    return f"{success['low']:.0%} to {success['high']:.0%} of {success['num_episodes']}"


def span_text(span: Mapping[str, Any]) -> str:
    """Return an interval's ends; a dash where one episode gives none."""
    if span["num_episodes"] < 2:
        return "–"
    return f"{short(span['low'])} to {short(span['high'])}"


def _closed_loop(score: Score, folder: Path) -> list[str]:
    played = score.get("closed_loop")
    if not played:
        return []
    rows = []
    for mode, figures in played["modes"].items():
        timing = played["latency"][mode]
        for task in figures["by_task"]:
            ticks = task["ticks_to_success"]
            latency = timing["latency_ms"]
            rows.append(
                {
                    "task": task["task"], "execution": mode, "success": f"{task['rate']:.0%}", "95 %": rate_text(task),
                    "ticks to success": "–" if ticks is None else f"{ticks[1]:.0f} ({ticks[0]:.0f} to {ticks[2]:.0f})",
                    "latency p50 / p90 / p99 ms": " / ".join(f"{latency[p]:.0f}" for p in ("p50", "p90", "p99")),
                    "pause a chunk ms": timing["pause_ms"],
                }
            )  # fmt: skip
    timing, executed = played["latency"], played["modes"]["synchronous"]["num_executed"]
    note = (
        f"{executed} ticks of each chunk are executed, {timing['chunk_ms']:.0f} ms; intervals are Wilson's. "
        "Every execution plays the same episodes with the same noise; a finished one is asked and stepped no more. "
        "Chunks are planned from the newest frame. Asynchronously the next chunk is computed while the last plays: "
        "from the real frame that began it and the network's own frames since. Latency is one robot's, over "
        f"{timing['num_calls']} calls; median (quartiles) of the time to success."
    )
    section = ["<h2>Closed loop</h2>", _scroll(Table(rows)), _note(note)]
    if films := played["films"]:
        section += ['<div class="films">', *(_film(film, folder) for film in films), "</div>"]
    return section


def _film(film: Mapping[str, Any], folder: Path) -> str:
    word = "success" if film["is_success"] else "failure"
    path = folder / film["file"]
    if path.suffix != ".mp4" or not path.resolve().is_relative_to(folder.resolve()):  # pages are shown to others
        raise ValueError(f"{film['file']} is no film of the run")
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<figure><video controls muted loop playsinline preload="metadata" src="data:video/mp4;base64,{data}"></video>'
        f'<figcaption><b class="{word}">{word}</b> · {escape(film["instruction"])} · seed {film["seed"]:d} · '
        f"{film['ticks']:d} ticks</figcaption></figure>"
    )


def _checkpoints(score: Score) -> list[str]:
    rows = [
        {"step": c["step"], "averaged": c["has_ema"], "held-out loss": c["loss"]["value"], "95 %": span_text(c["loss"])}
        for c in score["checkpoints"]
    ]
    played = {c["step"]: c for c in score.get("closed_loop", {}).get("by_checkpoint", [])}
    for row in rows:
        if row["step"] in played:
            success = played[row["step"]]
            row |= {"success": f"{success['rate']:.0%}", "of": rate_text(success)}
        row["chosen"] = "chosen" if row["step"] == score["step"] else ""
    swing = score["swing"]
    moves = ", ".join(
        f"{name} by up to {swing[key]:.1%}"
        for key, name in (("action_error", "action error"), ("held_out_loss", "held-out loss"))
        if swing.get(key) is not None
    )
    note = "Chosen by the flow loss of averaged weights on other held-out episodes, never by success. "
    if moves:
        note += f"From one evaluation to the next in the later half of training: {moves}."
    return ["<h2>Checkpoints</h2>", _scroll(Table(rows)), _note(note), _chart(swing_chart(score))]


def _line(name: str, spans: Sequence[Mapping[str, Any]], first: int, *, has_band: bool) -> Line:
    label, color = FEEDS[name]
    value, low, high = (
        np.array([np.nan if span[key] is None else span[key] for span in spans]) for key in ("value", "low", "high")
    )
    return Line(label, color, first + np.arange(len(spans), dtype=float), value, band=(low, high) if has_band else None)


def _pictures(folder: Path) -> list[str]:
    figures = [
        f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"></figure>'
        for path in sorted((folder / "score").glob("strip_*.png"))
        if path.resolve().is_relative_to(folder.resolve())
    ]
    return ['<div class="wide">', *figures, "</div>"] if figures else []


def _tile(name: str, value: str, remark: str) -> str:
    return f"<div><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(remark)}</span></div>"


def _chart(chart: Chart) -> str:
    return f'<div class="scroll chart">{chart.svg}</div>'


def _scroll(table: Table) -> str:
    return f'<div class="scroll figures-table">{table._repr_html_()}</div>'


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'
