"""A run as one HTML file to read, send and keep: curves, figures, pictures, config, environment."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from wamlab.lab.card import headline, key_figures, run_text
from wamlab.lab.colors import DARK, LIGHT, STATE_COLORS
from wamlab.lab.plots import levels_chart, loss_chart, speed_chart, split_chart
from wamlab.lab.records import write_whole
from wamlab.lab.run import Run, open_run, read_evaluations, read_metrics
from wamlab.lab.table import Table, short

PAGE_CSS = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:960px;padding:24px 16px 64px;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:22px;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:36px 0 10px}
header{display:flex;justify-content:space-between;align-items:center;gap:12px}
.badge{border-radius:12px;padding:2px 12px;white-space:nowrap;border:1px solid var(--state);color:var(--state)}
.soft,th,dt{color:var(--soft)}
.error{border-left:3px solid var(--orange);padding-left:12px;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(130px,1fr));gap:14px;margin:20px 0}
.figures b{display:block;font-size:19px}
.figures span{display:block;font-size:13px;color:var(--soft)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:20px 24px}
.scroll{overflow-x:auto}
.chart svg{min-width:min(560px,160vw)}
table{border-collapse:collapse;font-size:14px}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);font-weight:400;vertical-align:top}
.words td{overflow-wrap:anywhere}
.figures-table td{white-space:nowrap}
figure{margin:0 0 20px;overflow-x:auto}
figure img{max-width:max(100%,640px);height:auto}
details{margin-top:8px}
summary{cursor:pointer}
@media print{details{display:none}}
"""


def write_report(run: Run | str | Path, folder: Path | None = None) -> Path:
    """Write ``report.html`` into the run folder or another one, whole in itself, and return its path."""
    run = run if isinstance(run, Run) else open_run(run)
    path = (folder or run.folder) / "report.html"
    write_whole(path, report_html(run))
    return path


def report_html(run: Run) -> str:
    """Return the report as an HTML document; all that a user wrote is escaped."""
    status, config, environment = run.status, run.config, run.environment
    records, evaluations = read_metrics(run)[0], read_evaluations(run)
    body = [
        f'<header><h1>{escape(run.name)}</h1><span class="badge" style="--state:var(--'
        f'{STATE_COLORS[status["state"]]})">{status["state"]}</span></header>',
        f'<div class="soft">{escape(headline(status, config, records))}</div>',
    ]
    if status.get("error"):
        body.append(f'<p class="error">{escape(status["error"])}</p>')
    tiles = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(remark)}</span></div>"
        for name, value, remark in key_figures(records, evaluations)
    )
    body.append(f'<div class="figures">{tiles}</div>')
    body.append(f'<div class="scroll chart">{loss_chart(records, evaluations).svg}</div>')
    pair = [speed_chart(records, width=440), split_chart(records, width=440)]
    body.append(f'<div class="pair">{"".join(f"<div>{chart.svg}</div>" for chart in pair)}</div>')
    body += _evaluation_section(evaluations)
    body += _picture_section(run)
    if run.summary:
        body += ["<h2>Summary</h2>", _mapping_table(run.summary)]
    packages = environment.pop("packages")
    body += ["<h2>Config</h2>", _mapping_table(config), "<h2>Environment</h2>", _mapping_table(environment)]
    body.append(f"<details><summary>{len(packages)} packages</summary>{_mapping_table(packages)}</details>")
    return page_html(run.name, "".join(body))


def page_html(title: str, body: str, style: str = "") -> str:
    """Return a whole document in both colour schemes around a body that is HTML already."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>:root{_variables(LIGHT)}@media(prefers-color-scheme:dark){{:root{_variables(DARK)}}}"
        f"{PAGE_CSS}{style}</style></head><body>{body}</body></html>\n"
    )


def summary_table(run: Run | str | Path) -> str:
    """Return a run's state and key figures as aligned text for a terminal."""
    run = run if isinstance(run, Run) else open_run(run)
    return run_text(run.name, run.status, run.config, read_metrics(run)[0], read_evaluations(run))


def flattened(value: Any, name: str = "") -> dict[str, Any]:
    """Write nested mappings as one, with dotted names."""
    if isinstance(value, Mapping) and value:
        parts = (flattened(item, f"{name}.{key}" if name else str(key)) for key, item in value.items())
        return {key: item for part in parts for key, item in part.items()}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return flattened(dict(enumerate(value)), name)
    return {name: value}


def _evaluation_section(evaluations: list[dict[str, Any]]) -> list[str]:
    if not evaluations:
        return []
    rows = [
        {key.replace("_", " "): v for key, v in evaluation.items() if not isinstance(v, list | Mapping)}
        for evaluation in evaluations
    ]
    section = ["<h2>Evaluations</h2>", f'<div class="scroll figures-table">{Table(rows)._repr_html_()}</div>']
    if any(evaluation.get("held_out_loss_by_level") for evaluation in evaluations):
        section.append(f'<p></p><div class="scroll chart">{levels_chart(evaluations).svg}</div>')
    return section


def _picture_section(run: Run) -> list[str]:
    home = run.folder.resolve()  # a link may lead to a file that nobody means to show
    paths = [path for path in sorted(run.pictures.glob("*.png")) if path.resolve().is_relative_to(home)]
    figures = (
        f'<figure><img alt="{escape(path.stem)}" src="data:image/png;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}"><figcaption class="soft">{escape(path.stem)}'
        "</figcaption></figure>"
        for path in paths
    )
    return ["<h2>Pictures</h2>", *figures] if paths else []


def _mapping_table(mapping: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(short(value))}</td></tr>"
        for name, value in flattened(mapping).items()
    )
    return f'<div class="words"><table>{rows}</table></div>'


def _variables(palette: Mapping[str, str]) -> str:
    return "{" + "".join(f"--{name}:{color};" for name, color in palette.items()) + "}"
