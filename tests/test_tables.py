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
