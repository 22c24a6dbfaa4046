import re

import pytest

from rlcore.tables import Table


def test_html_escapes_marks_and_names_rows():
    table = Table(["", "a<b"], [["x", "1 & 2"], ["y", 3]], caption="c", marked=[(1, 1)])
    page = table._repr_html_()
    assert "a&lt;b" in page
    assert "1 &amp; 2" in page
    assert re.search('<th scope="row"[^>]*>y</th>', page)
    assert "<strong>→ 3</strong>" in page
    assert page.count("<strong>") == 1
    assert "<caption>c</caption>" in page


def test_text_lines_up():
    lines = repr(Table(["name", "v"], [["long name", 1], ["n", 22]], marked=[(0, 1)])).splitlines()
    assert lines == ["name       v", "long name  → 1", "n          22"]


def test_a_list_in_a_cell():
    table = Table(["name", "notes"], [["x", ("a<b", "c")], ["y", []]])
    page = table._repr_html_()
    assert "<li>a&lt;b</li><li>c</li></ul></td>" in page
    assert re.search(r"<td[^>]*></td>", page)
    assert repr(table).splitlines() == ["name  notes", "x     a<b; c", "y"]


def test_a_wide_table_keeps_its_first_column_in_view():
    long = "a sentence of more than a few words"
    page = Table(["name", "n", "text"], [["x", 1, long]], wide=True, caption="c")._repr_html_()
    first, number, text = re.findall(r'<t[hd] (?:scope="row" )?style="([^"]*)">(?:x|1|a)', page)
    assert "position: sticky; left: 0" in first
    assert "white-space: nowrap" in number
    assert "min-width" in text
    assert "nowrap" not in text
    box = re.match(r"<div ([^>]*)>", page)[1]
    assert 'tabindex="0" role="region"' in box  # the keyboard reaches it, a reader names it
    assert 'aria-label="c"' in box
    assert "overflow-x: auto" in box
    assert "sticky" not in Table(["name"], [["x"]])._repr_html_()


@pytest.mark.parametrize(
    ("rows", "marked", "message"),
    [
        ([["only one"]], (), "rows: row 0 has 1 cells, wanted 2"),
        ([["a", "b"]], [(1, 0)], r"marked: no cell \(1, 0\) in a table of 1 rows and 2 columns"),
        ([["a", "b"]], [(0, -1)], r"marked: no cell \(0, -1\)"),
    ],
)
def test_bad_input(rows, marked, message):
    with pytest.raises(ValueError, match=message):
        Table(["x", "y"], rows, marked=marked)
