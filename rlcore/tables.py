"""Small tables for the pages: a caption, real header cells, marks that show without colour."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

LEFT = "text-align: left"  # JupyterLab sets tables flush right, text and all
# in the book's page, in JupyterLab, and elsewhere
GROUND = "var(--pst-color-background, var(--jp-layout-color0, Canvas))"
STAYS = f"position: sticky; left: 0; z-index: 1; background: {GROUND}"
LONG = 28  # characters that a cell of a wide table keeps in one line


@dataclass(frozen=True)
class Table:
    """A table that a notebook draws as HTML and a terminal prints as text.

    Args:
        header: column titles.
        rows: one sequence of cells per row, each as long as ``header``; the first names the row.
            A cell that is a tuple or a list is set as a list of its items.
        caption: one line above the table.
        marked: pairs (row, column), from 0, set in bold with a leading arrow: "this changed".
        wide: the table may be wider than its place: columns keep a readable width, and the first
            one stays in view while the others scroll.

    Raises:
        ValueError: a row is shorter or longer than the header, or a mark lies outside the table.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    marked: Iterable[tuple[int, int]] = field(default_factory=tuple)
    wide: bool = False

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
        styles = [self._style(column) for column in range(len(self.header))]

        def cell(row: int, column: int, value: object) -> str:
            text = _items(value) if isinstance(value, tuple | list) else html.escape(str(value))
            if (row, column) in self.marked:
                text = f"<strong>→ {text}</strong>"
            if column == 0:
                return f'<th scope="row" {styles[0]}>{text}</th>'
            return f"<td {styles[column]}>{text}</td>"

        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        if self.wide and self.caption:  # it stays in view too
            words = (
                f'<span style="{STAYS}; display: inline-block">{html.escape(self.caption)}</span>'
            )
            caption = f'<caption style="{LEFT}">{words}</caption>'
        head = "".join(
            f'<th scope="col" {style}>{html.escape(title)}</th>'
            for title, style in zip(self.header, styles, strict=True)
        )
        body = "".join(
            "<tr>" + "".join(cell(r, c, value) for c, value in enumerate(row)) + "</tr>"
            for r, row in enumerate(self.rows)
        )
        kind = "table-scroll wide" if self.wide else "table-scroll"
        return (
            f'<div class="{kind}" tabindex="0" role="region" style="overflow-x: auto" '
            f'aria-label="{html.escape(self.caption or "table", quote=True)}">'
            f'<table class="table">{caption}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def _style(self, column: int) -> str:
        """That of the cells of a column, as an attribute: it holds wherever the table is shown."""
        style = LEFT
        if self.wide:
            longest = max((len(str(row[column])) for row in self.rows), default=0)
            if column == 0:  # on a telephone it must leave room for the others
                style += f"; {STAYS}; min-width: min({min(longest, LONG) / 2:g}em, 38vw)"
            else:
                style += "; white-space: nowrap" if longest <= LONG else "; min-width: 14em"
        return f'style="{style}"'

    def __repr__(self) -> str:
        cells = [[str(title) for title in self.header]]
        for r, row in enumerate(self.rows):
            cells.append(
                [("→ " if (r, c) in self.marked else "") + _line(v) for c, v in enumerate(row)]
            )
        widths = [max(len(row[c]) for row in cells) for c in range(len(self.header))]
        lines = [
            "  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        return "\n".join(([self.caption] if self.caption else []) + lines)


def _items(values: Sequence[object]) -> str:
    items = "".join(f"<li>{html.escape(str(value))}</li>" for value in values)
    return f'<ul style="margin: 0; padding-left: 1.1em">{items}</ul>' if items else ""


def _line(value: object) -> str:
    return "; ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
