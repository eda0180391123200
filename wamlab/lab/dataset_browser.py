"""The episodes of a dataset: tasks, lengths, pictures; from plain values, so that it needs no reader of any format."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from wamlab.errors import InputError
from wamlab.lab.chart import Bar, Chart, bar_chart, placed, text_at
from wamlab.lab.picker import Picker, svg_of
from wamlab.lab.scale import tick_text
from wamlab.lab.table import Table, short

Episode = Mapping[str, Any]
Thumbnails = Callable[[int], Sequence[bytes]]
NUM_TASKS, NUM_BUCKETS = 8, 24
SIGNATURES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}


class DatasetBrowser(Picker):
    """Episodes in a notebook, to filter by words and to look into one by one."""

    def __init__(
        self, episodes: Sequence[Episode], thumbnails: Thumbnails | None = None, *, title: str = "Dataset"
    ) -> None:
        """Take a mapping an episode with ``episode`` (its number), ``task`` and ``seconds``; other values are shown.

        ``thumbnails`` returns the pictures of the episode at a place in the list as PNG, JPEG or WebP bytes, when it is
        looked at. Raises InputError for no episodes or one without these.
        """
        if not episodes:
            raise InputError("a dataset without episodes has nothing to browse")
        for place, episode in enumerate(episodes):
            if missing := [name for name in ("episode", "task", "seconds") if episode.get(name) is None]:
                raise InputError(f"the episode at place {place} has no {', '.join(missing)}")
        self.episodes, self._thumbnails = list(episodes), thumbnails
        summary = dataset_chart(episodes)
        rows = "".join(
            f'<div class="wl-row" data-item="{place}" data-label="{escape(_label(episode))}">'
            f"<span>{escape(str(episode['episode']))}</span><span>{escape(str(episode['task']))}</span>"
            f"<span>{episode['seconds']:.3g} s</span></div>"
            for place, episode in enumerate(episodes)
        )
        super().__init__(
            title, rows, len(episodes), self._describe, summary, chosen=0, has_filter=True, is_wide=False
        )  # fmt: skip
        self._summary = svg_of(summary)

    def _describe(self, item: int) -> str:
        episode = self.episodes[item]
        pictures = self._thumbnails(item) if self._thumbnails is not None else ()
        shown = "".join(
            f'<img alt="episode {escape(str(episode["episode"]))}, picture {number}" src="{data_url(picture)}">'
            for number, picture in enumerate(pictures)
        )
        facts = [{"of the episode": name, "": short(value)} for name, value in episode.items() if name != "task"]
        return (
            f'<div class="wl-thumbnails">{shown}</div><b>{escape(str(episode["task"]))}</b>'
            f"{Table(facts)._repr_html_()}<details><summary>all {len(self.episodes)} episodes</summary>"
            f"{self._summary}</details>"
        )


def dataset_chart(episodes: Sequence[Episode], *, width: int = 880) -> Chart:
    """Draw how many episodes each task has, the commonest ones by name, and how long episodes are."""
    counts = Counter(str(episode["task"]) for episode in episodes)
    common = counts.most_common(NUM_TASKS)
    bars = [Bar(name if len(name) <= 44 else f"{name[:43]}…", count) for name, count in common]
    if rest := len(counts) - len(common):
        bars.append(Bar(f"{rest} other tasks", sum(counts.values()) - sum(count for _, count in common)))
    tasks = bar_chart(bars, f"{len(episodes):,} episodes of {len(counts):,} tasks", width=width)
    seconds = np.array([float(episode["seconds"]) for episode in episodes])
    lengths = _histogram(seconds, width)
    total_s = float(seconds.sum())
    words = f"{total_s / 3600:.3g} h" if total_s >= 3600 else f"{total_s:.3g} s"
    text = f"{tasks.text}\n{words} in all; an episode lasts {seconds.min():.3g} to {seconds.max():.3g} s"
    top = tasks.height + 14
    return Chart(width, top + lengths.height, tasks.body + placed(lengths, 0, top), text)


def data_url(picture: bytes) -> str:
    """Return a picture as the address that HTML shows it by; raise InputError for bytes that are none."""
    for signature, kind in SIGNATURES.items():
        if picture.startswith(signature):
            return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    raise InputError("a thumbnail is no PNG, JPEG or WebP: give the bytes of one")


def _histogram(seconds: np.ndarray, width: int) -> Chart:
    low, high = float(seconds.min()), float(seconds.max())
    counts, edges = np.histogram(seconds, NUM_BUCKETS, (low, high if high > low else low + 1))
    step = width / NUM_BUCKETS
    body = [text_at(0, 14, f"length of episodes, s: median {np.median(seconds):.3g}", "fill-ink title")]
    for place, count in enumerate(counts):
        height = 70 * count / counts.max()
        body.append(
            f'<rect x="{step * place:.1f}" y="{98 - height:.1f}" width="{step - 2:.1f}" height="{height:.1f}" '
            f'class="fill-blue"><title>{count} of {edges[place]:.3g} to {edges[place + 1]:.3g} s</title></rect>'
        )
    for place in range(0, NUM_BUCKETS, 6):
        body.append(text_at(step * place, 114, tick_text(float(f"{edges[place]:.3g}")), "fill-soft"))
    body.append(text_at(width - 2, 114, tick_text(float(f"{edges[-1]:.3g}")), "fill-soft", "end"))
    return Chart(width, 120, "".join(body), "lengths")


def _label(episode: Episode) -> str:
    return f"episode {episode['episode']}, {episode['task']}, {episode['seconds']:.3g} seconds"
