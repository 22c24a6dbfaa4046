"""What goes into a release notebook, and what must not."""

import json
import re
from pathlib import Path

import nbformat
import pytest

from book.homework import chapter as chapters
from book.homework import release as releases
from book.homework.chapter import ChapterError, read_chapter
from book.homework.myst import MarkupError, to_markdown

DATA, SLUG = Path(__file__).parent / "data", "99-fixture"
REAL = chapters.chapters_with_exercises()


def sources(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def test_the_release_holds_what_a_student_needs(release):
    text = "\n".join(sources(release))
    for wanted in (
        "your name",
        "Restart Kernel and Run All Cells",
        f"`{SLUG}.ipynb`",
        "x = 9000 / 3",
        "<summary>Hint (click to open)</summary>",
        "See the chapter before.",
        "owed = None",
        "raise NotImplementedError",
        "from rlcore.checking import no_input as input",
        'check_number(owed, name="owed")',
        "Which cause fits?",
    ):
        assert wanted in text, wanted
    assert (release.parent / "runs" / "fixture.json").read_text() == "[0.5, 0.5, 0.5]\n"
    nbformat.validate(nbformat.read(release, as_version=4))


def test_nothing_leaks(release):
    raw = release.read_text()
    for leak in ("LEAKED", "HIDDEN-TEST-SOURCE", "PAGE-", "4500", "divide by all", "seed moves"):
        assert leak not in raw, leak


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_no_solution_line_of_a_real_chapter_leaks(path, tmp_path):
    chapter = read_chapter(path)
    made = releases.write_release(chapter, tmp_path)
    text = "\n".join(sources(made))
    shown = "\n".join(
        part.source for one in chapter.exercises for part in one.cells("exercise", "test")
    )
    for exercise in chapter.exercises:
        for part in exercise.cells("solution", "hidden-test"):
            for line in part.source.splitlines():
                plain = line.strip()
                common = plain.startswith(("import ", "from ", "def ", "class ", "#", '"""'))
                if len(plain) >= 12 and not common and plain not in shown:
                    assert plain not in text, f"{exercise.id}: {plain}"


def test_nbgrader_metadata(release):
    cells = nbformat.read(release, as_version=4).cells
    graded = {
        cell.metadata.nbgrader.grade_id: cell.metadata.nbgrader
        for cell in cells
        if "nbgrader" in cell.metadata
    }
    assert len(graded) == len([cell for cell in cells if "nbgrader" in cell.metadata])
    points = {name: facts.points for name, facts in graded.items() if facts.grade}
    assert points == {
        "shared-lunch--test-1": 0,
        "shared-lunch--hidden-test-1": 2,
        "center--test-1": 1,
        "center--hidden-test-1": 2,
        "center--hidden-test-2": 1,
        "flat-curve--test-1": 0,
        "flat-curve--hidden-test-1": 1,
    }
    assert [name for name, facts in graded.items() if facts.solution] == [
        "shared-lunch--exercise-1",
        "center--exercise-1",
        "flat-curve--exercise-1",
    ]
    assert all(facts.locked for facts in graded.values() if not facts.solution)


def test_a_release_is_the_same_every_time(chapter, release, tmp_path):
    assert releases.write_release(chapter, tmp_path).read_bytes() == release.read_bytes()


def test_nothing_is_written_outside(chapter, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    made = releases.write_release(chapter, tmp_path / "out")
    assert list(home.rglob("*")) == []
    names = {str(path.relative_to(made.parent)) for path in made.parent.rglob("*.*")}
    assert names == {f"{SLUG}.ipynb", "runs/fixture.json"}


def test_main(tmp_path, capsys):
    assert releases.main(["99", "--source", str(DATA), "--out", str(tmp_path)]) == 0
    assert "3 exercises, 7 points" in capsys.readouterr().out
    assert json.loads((tmp_path / SLUG / f"{SLUG}.ipynb").read_text())["nbformat"] == 4
    assert releases.main(["12", "--source", str(DATA), "--out", str(tmp_path)]) == 1
    assert "there are: 99-fixture" in capsys.readouterr().err
    assert releases.main(["--source", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "no chapter" in capsys.readouterr().err


# a change to the fixture chapter -> what the error must say
MISTAKES = {
    "no id": ("exercise: {id: center}\n", "exercise: {}\n", "needs `exercise: {id"),
    "no points": ("{id: center, points: 1}", "{id: center}", "test cell needs points, got None"),
    "negative": ("{id: center, points: 1}", "{id: center, points: -1}", "points, got -1"),
    "sum": ("{id: center, points: 4}", "{id: center, points: 5}", "says 5 .* sum to 4"),
    "apart": ("{id: flat-curve, points: 0}", "{id: center, points: 0}", "not together"),
    "name": ("check_close(center(rewards)", "check_close(centre(rewards)", "uses centre"),
    "page name": (
        'name="owed")\n```\n\n```{code-cell} ipython3\n---\ntags: [hidden',
        "name=page_only)\n```\n\n```{code-cell} ipython3\n---\ntags: [hidden",
        "uses page_only",
    ),
    "solution": ("owed = 9000 / 3", "owes = 9000 / 3", "does not define owed"),
    "syntax": ("def center(rewards):\n    raise", "def center(rewards)\n    raise", "not plain Py"),
    "two tags": (
        "tags: [test]\nexercise: {id: center",
        "tags: [test, solution]\nexercise: {id: center",
        "the tags",
    ),
    "file": ("runs/fixture.json]", "runs/none.json]", "none.json is not there"),
    "gate": ("```{exercise-end}\n```", "", "inside another exercise"),
    "backtick": ("{exercise} Centre the", "{exercise} `center` the", "a {code-cell} is swallowed"),
    "text only": (
        "```{exercise-start}\n",
        ":::{exercise} Alone\nx\n:::\n```{exercise-start}\n",
        "'Alone' has no cell",
    ),
    "text at the end": ("## Sources", ":::{exercise} Last\nx\n:::", "'Last' has no cell"),
    "never ends": (
        ":::{admonition} What is broken?",
        "```{exercise-start}\n```\n:::{note}",
        "no {exercise-end}",
    ),
    "eval": ("x = 9000 / 3`", "x = 9000 / 3` {eval}`x`", "cannot be computed"),
    "role": ("{doc}", "{doctor}", "the role"),
    "directive": (":::{hint}", ":::{glue}", "directive {glue}"),
    "open directive": (
        ":::{admonition} What is broken?",
        "::::{admonition} What is broken?",
        "never closed",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_chapter_is_named(mistake, tmp_path):
    old, new, says = MISTAKES[mistake]
    text = (DATA / f"{SLUG}.md").read_text("utf-8")
    assert old in text
    path = tmp_path / f"{SLUG}.md"
    path.write_text(text.replace(old, new, 1), "utf-8")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "fixture.json").write_text("[0]")
    with pytest.raises((ChapterError, MarkupError), match=says):
        read_chapter(path)


@pytest.mark.parametrize(
    "markup",
    [
        "```{solution} bill\nLEAK\n```",
        ":::{solution}\nLEAK\n:::",
        "```{solution-start} bill\n```\nLEAK\n```{solution-end}\n```",
        ":::{admonition} Solution\n:class: dropdown\nLEAK\n:::",
        "```{dropdown} Answer\nLEAK\n```",
        ":::{admonition} Click\n:class: dropdown solution\nLEAK\n:::",
        "```{admonition} Worked solution\nLEAK\n```",
        "````{hint} Look\n```{solution} x\nLEAK\n```\n````",
        "```{hint}\n---\nclass: dropdown, solution\n---\nLEAK\n```",
    ],
)
def test_every_form_of_a_solution_is_dropped(markup):
    made = to_markdown(["before", "", *markup.split("\n"), "", "after"], "here")
    assert "LEAK" not in made
    assert made.startswith("before")
    assert made.endswith("after")


def test_markup_that_stays():
    made = to_markdown(
        [
            "{math}`x^2`, {ref}`the mean <mean>`, {doc}`/07-ppo`",
            "```{math}",
            ":label: eq",
            "a = b",
            "```",
            ":::{note}",
            "mind",
            ":::",
            "```python",
            "x = {1: `2`}",
            "```",
        ],
        "here",
    )
    assert "$x^2$, the mean, 07-ppo" in made
    assert "$$\na = b\n$$" in made
    assert "> **Note**\n>\n> mind" in made
    assert re.search(r"```python\nx = \{1: `2`\}\n```", made)


def test_an_unknown_chapter_of_the_book_is_an_error():
    with pytest.raises(ChapterError, match="no chapter 'nothing'"):
        chapters.find_chapter("nothing")
