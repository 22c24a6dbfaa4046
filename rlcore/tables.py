"""Small tables for the pages: a caption, real header cells, marks that show without colour."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LEFT = 'style="text-align: left"'  # JupyterLab sets tables flush right, text and all


@dataclass(frozen=True)
class Table:
    """A table that a notebook draws as HTML and a terminal prints as text.

    Args:
        header: column titles.
        rows: one sequence of cells per row, each as long as ``header``; the first names the row.
        caption: one line above the table.
        marked: pairs (row, column), from 0, set in bold with a leading arrow: "this changed".

    Raises:
        ValueError: a row is shorter or longer than the header, or a mark lies outside the table.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    marked: Iterable[tuple[int, int]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise ValueError(
                    f"rows: row {index} has {len(row)} cells, "
                    f"wanted {len(self.header)} (as the header)"
                )
        object.__setattr__(self, "marked", frozenset(self.marked))
        for row_index, column in self.marked:
            if not (0 <= row_index < len(self.rows) and 0 <= column < len(self.header)):
                raise ValueError(
                    f"marked: no cell ({row_index}, {column}) in a table of "
                    f"{len(self.rows)} rows and {len(self.header)} columns"
                )

    def _repr_html_(self) -> str:
        def cell(row: int, column: int, value: object) -> str:
            text = html.escape(str(value))
            if (row, column) in self.marked:
                text = f"<strong>→ {text}</strong>"
            if column == 0:
                return f'<th scope="row" {LEFT}>{text}</th>'
            return f"<td {LEFT}>{text}</td>"

        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        head = "".join(f'<th scope="col" {LEFT}>{html.escape(title)}</th>' for title in self.header)
        body = "".join(
            "<tr>" + "".join(cell(r, c, value) for c, value in enumerate(row)) + "</tr>"
            for r, row in enumerate(self.rows)
        )
        return (
            '<div class="table-scroll" tabindex="0" role="region" '
            f'aria-label="{html.escape(self.caption or "table", quote=True)}">'
            f'<table class="table">{caption}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def __repr__(self) -> str:
        cells = [[str(title) for title in self.header]]
        for r, row in enumerate(self.rows):
            cells.append(
                [("→ " if (r, c) in self.marked else "") + str(v) for c, v in enumerate(row)]
            )
        widths = [max(len(row[c]) for row in cells) for c in range(len(self.header))]
        lines = [
            "  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        return "\n".join(([self.caption] if self.caption else []) + lines)
