"""A small table of mappings: aligned text in a terminal, HTML in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np


def short(value: Any) -> str:
    """Write a value for a person: four significant digits, a dash for nothing."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value == [] or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(short(item) for item in value)
    return str(value)


class Table(Sequence[Mapping[str, Any]]):
    """Rows with the same columns; prints itself."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
        self.rows = list(rows)
        self.columns = list(columns or dict.fromkeys(key for row in rows for key in row))

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def __repr__(self) -> str:
        """Align the columns: numbers to the right, words to the left."""
        if not self.rows:
            return "(no rows)"
        cells = [[short(row.get(column)) for column in self.columns] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        is_number = [self._is_number(column) for column in self.columns]

        def line(texts: Sequence[str]) -> str:
            aligned = zip(texts, widths, is_number, strict=True)
            return "  ".join(t.rjust(w) if right else t.ljust(w) for t, w, right in aligned).rstrip()

        return "\n".join([line(self.columns), line(["─" * width for width in widths]), *map(line, cells)])

    def _repr_html_(self) -> str:
        heads = "".join(f"<th{self._style(c)}>{escape(c)}</th>" for c in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td{self._style(c)}>{escape(short(row.get(c)))}</td>" for c in self.columns) + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"

    def _style(self, column: str) -> str:
        side = "right" if self._is_number(column) else "left"
        return f' style="text-align:{side};font-variant-numeric:tabular-nums"'

    def _is_number(self, column: str) -> bool:
        values = [row[column] for row in self.rows if row.get(column) is not None]
        return bool(values) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
