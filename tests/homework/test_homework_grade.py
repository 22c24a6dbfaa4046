"""Grading: a class in which much goes wrong, graded once; each test looks at one student of it."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest

from book.homework import course, grade
from book.homework import release as releases
from book.homework.chapter import CHAPTERS, chapters_with_exercises, read_chapter
from book.homework.kernel import Kernel, Limits
from book.homework.submissions import Unreadable, assemble, find_submissions, read_submission

SLUG = "99-fixture"
DATA = Path(__file__).parent / "data"
LIMITS = Limits(seconds=10, memory_mb=700)  # a busy machine is slow to import torch
FULL = {"shared-lunch": 2, "center": 4, "flat-curve": 1}

PNG = (  # one pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)

# what a student writes into the answer cell of `center`, of 4 points
ANSWERS = {
    "endless": "while True: pass",
    "stubborn": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "eater": 'x = []\nwhile True: x.append("a" * 10**7)',
    "exit": "import os\nos._exit(0)",
    "late exit": "def center(rewards):\n    import os\n    os._exit(0)",
    "late loop": "def center(rewards):\n    while True: pass",
    "late quit": "def center(rewards):\n    raise SystemExit",
    "input": 'n = int(input("n? "))',
    "late input": 'def center(rewards):\n    return rewards - float(input("mean? "))',
    "syntax": "def center(rewards:\n    return 0",
    "flood": 'for i in range(50_000): print("spam", i)\ndef center(rewards):\n    return rewards',
    "nan": "def center(rewards):\n    return rewards * float('nan')",
}
# the same, right: these get all points
RIGHT = {
    "helper": "def h(r):\n    return r.float() - r.float().mean()\n\n"
    "def center(rewards):\n    return h(rewards)",
    "checker": "def check(*a): return 'mine'\ndef check_close(*a, **k): return 'mine'\n"
    "def center(rewards):\n    return rewards.float() - rewards.float().mean()",
    "shadow": "sum = 0; list = [1]; half = rewards = None\nimport torch as t\ntorch = None\n"
    "def center(rewards):\n    return rewards.to(t.float32) - rewards.to(t.float32).mean()",
    "noisy": "import sys, warnings\ndef center(rewards):\n    warnings.warn('careful')\n"
    "    print('working', file=sys.stderr)\n"
    "    return rewards.float() - rewards.float().mean()\n0.0",
    "plots": "%matplotlib inline\nfrom IPython.display import HTML, Image, display\n"
    f"import base64\ndisplay(Image(data=base64.b64decode('{PNG}')))\n"
    "display(HTML('<script src=x.js></script>'))\n"
    "def center(rewards):\n    return rewards.float() - rewards.float().mean()",
}


def damage(edit, folder):
    """Notebooks whose cells were deleted, copied, split, changed; all answers are right."""
    test = "center--test-1"

    one = edit()
    del one.notebook.cells[one.index(test)]
    one.save(folder / "deleted" / f"{SLUG}.ipynb")

    one = edit()
    one.notebook.cells.insert(one.index(test), one.cell(test).copy())
    one.save(folder / "copied" / f"{SLUG}.ipynb")

    one = edit()
    whole = one.cell("center--exercise-1").source.split("\n")
    one.cell("center--exercise-1").source = "\n".join(whole[:1]) + "\n    return work(rewards)"
    body = ["def work(rewards):", *whole[1:]]
    one.insert_before("center--exercise-1", "\n".join(body)).save(
        folder / "split" / f"{SLUG}.ipynb"
    )

    one = edit()
    source = one.cell(test).source
    place = one.index(test)
    one.notebook.cells[place] = nbformat.v4.new_markdown_cell(
        source, metadata=one.notebook.cells[place].metadata
    )
    one.save(folder / "markdown" / f"{SLUG}.ipynb")

    one = edit().answer("center", "def center(rewards):\n    return rewards")  # wrong
    for cell in one.notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id", "").startswith("center--"):
            cell.source = cell.source.replace("check_close(", "print(")
    one.save(folder / "edited" / f"{SLUG}.ipynb")

    one = edit()
    for cell in one.notebook.cells:
        cell.metadata.clear()
    one.save(folder / "bare" / f"{SLUG}.ipynb")

    one = edit()
    one.notebook.cells = [c for c in one.notebook.cells if c.source.startswith("def center")]
    one.save(folder / "only one answer" / f"{SLUG}.ipynb")


@pytest.fixture(scope="module", autouse=True)
def watch_the_grader_only():
    """Results stay valid though somebody edits rlcore while the tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grade, "WATCHED", ("book/homework",))
        yield


@pytest.fixture(scope="module")
def graded(chapter, release, reference, edit, tmp_path_factory):
    """(report, out) of the whole class."""
    folder = tmp_path_factory.mktemp("class")
    for who, source in {**ANSWERS, **RIGHT}.items():
        edit().answer("center", source).save(folder / who / f"{SLUG}.ipynb")
    damage(edit, folder)
    shutil.copytree(release.parent, folder / "untouched")
    (folder / "김 민수" / "Assignment 1").mkdir(parents=True)
    shutil.copy(reference, folder / "김 민수" / "Assignment 1" / f"{SLUG}.ipynb")
    shutil.copy(reference, folder / f"Zoë O'Neil [b]_{SLUG}.ipynb")
    one = edit().answer("shared-lunch", "owed = 4500")
    one.notebook.cells[one.index("setup") - 1].source = 'student_name = "Ada L."  # me'
    one.save(folder / "ada.ipynb")
    (folder / "not json").mkdir()
    (folder / "not json" / f"{SLUG}.ipynb").write_text("PK\x03\x04")
    (folder / "not a notebook").mkdir()
    (folder / "not a notebook" / f"{SLUG}.ipynb").write_text("[1, 2]")
    (folder / "nothing").mkdir()
    for name in (f"{SLUG}.ipynb", f"{SLUG} (1).ipynb"):
        (folder / "twice").mkdir(exist_ok=True)
        shutil.copy(reference, folder / "twice" / name)
    (folder / "essay.pdf").write_text("no")
    (folder / ".ipynb_checkpoints").mkdir()
    shutil.copy(reference, folder / ".ipynb_checkpoints" / f"{SLUG}.ipynb")
    out = tmp_path_factory.mktemp("grades")
    return grade.grade_folder(folder, out, [chapter], LIMITS), out, folder


@pytest.fixture(scope="module")
def of(graded):
    report = graded[0]
    return lambda student: report["students"][student][0]


def points(result):
    return {name: one["points"] for name, one in result["exercises"].items()}


def test_untouched_scores_nothing_and_the_reference_everything(of):
    assert points(of("untouched")) == dict.fromkeys(FULL, 0)
    assert points(of("김 민수")) == FULL
    assert of("untouched")["status"] == of("김 민수")["status"] == "graded"


@pytest.mark.parametrize(
    ("student", "says"),
    [
        ("endless", rf"timeout: it ran longer than {LIMITS.seconds} s"),
        ("stubborn", r"timeout"),
        ("eater", r"out of memory"),
        ("exit", r"kernel died"),
        ("late exit", r"kernel died"),
        ("late loop", r"timeout"),
        ("late quit", r"SystemExit"),
        ("input", r"input\(\) is not available"),
        ("late input", r"input\(\) is not available"),
        ("syntax", r"SyntaxError"),
        ("flood", r"at index \[0\] \(1\)"),
        ("nan", r"is NaN"),
    ],
)
def test_a_broken_answer_costs_its_own_exercise_only(of, student, says):
    result = of(student)
    assert points(result) == FULL | {"center": 0}
    assert re.match(rf"center: .*{says}", result["exercises"]["center"]["message"])


@pytest.mark.parametrize("student", RIGHT)
def test_what_a_student_calls_things_does_not_matter(of, student):
    assert points(of(student)) == FULL
    assert of(student)["remarks"] == []


@pytest.mark.parametrize(
    ("student", "remark"),
    [
        ("deleted", "center--test-1 was missing"),
        ("copied", "center--test-1 was there 2 times"),
        ("split", ""),
        ("markdown", "center--test-1 was changed"),
        ("bare", ""),
    ],
)
def test_damaged_notebooks_are_graded_with_the_original_tests(of, student, remark):
    assert points(of(student)) == FULL
    assert remark in of(student)["exercises"]["center"]["message"]


def test_edited_tests_do_not_help(of):
    assert points(of("edited")) == FULL | {"center": 0}
    assert "center--test-1 was changed" in of("edited")["exercises"]["center"]["message"]


def test_the_one_answer_that_is_there_counts(of):
    result = of("only one answer")
    assert points(result) == {"shared-lunch": 0, "center": 4, "flat-curve": 0}
    message = result["exercises"]["flat-curve"]["message"]
    assert "`cause` is not defined" in message
    assert "answer cell flat-curve--exercise-1 was not in the notebook" in message


def test_a_wrong_turn_gets_its_hint_and_the_typed_name_is_kept(of):
    result = of("ada")
    assert points(result) == FULL | {"shared-lunch": 0}
    assert "divide by all three" in result["exercises"]["shared-lunch"]["message"]
    assert result["name_in_notebook"] == "Ada L."


@pytest.mark.parametrize(
    ("student", "says"),
    [
        ("not json", "no JSON"),
        ("not a notebook", "not a notebook"),
        ("nothing", "no notebook of 99-fixture"),
        ("twice", "2 notebooks .* leave one"),
    ],
)
def test_what_cannot_be_graded_says_why(of, student, says):
    assert points(of(student)) == dict.fromkeys(FULL, 0)
    assert re.match(rf"not graded: .*{says}", of(student)["status"])


def test_report(graded):
    report, out, _ = graded
    assert report == json.loads((out / "report.json").read_text("utf-8"))
    assert report["complete"]
    assert report["chapters"] == {SLUG: 7}
    left_out = {one["file"]: one["why"] for one in report["left_out"]}
    files = ["essay.pdf", "untouched/runs/fixture.json"]
    assert left_out == dict.fromkeys(files, "not a notebook (.ipynb)")
    assert report["limits"]["seconds"] == LIMITS.seconds
    assert {"python", "nbgrader", "torch"} <= set(report["versions"])
    for results in report["students"].values():
        for name, one in results[0]["exercises"].items():
            assert one["message"].startswith(f"{name}: ")


def test_scores(graded):
    report, out, _ = graded
    with (out / "scores.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert set(rows) == set(report["students"])
    assert list(rows["ada"]) == ["student", *FULL, "total", "max", "status"]
    assert rows["Zoë O'Neil [b]"]["total"] == rows["Zoë O'Neil [b]"]["max"] == "7"
    assert rows["untouched"]["total"] == "0"
    assert rows["late loop"]["center"] == "0"
    assert rows["late loop"]["total"] == "3"
    assert rows["twice"]["status"].startswith("not graded: 2 notebooks")


def test_feedback_pages(graded):
    report, out, _ = graded
    pages = {path.stem: path.read_text("utf-8") for path in (out / "feedback").iterdir()}
    assert set(pages) == set(report["students"])
    for text in pages.values():
        assert not re.search(r"""(src|href)\s*=\s*["'](?!data:|#)|@import|url\(|https?:""", text)
        assert "default-src 'none'" in text
        assert "<script" not in text
        for leak in ("HIDDEN-TEST-SOURCE", "LEAKED-S", "LEAKED-A", "wrong_turns", "BEGIN HIDDEN"):
            assert leak not in text
    assert "<math" in pages["ada"]
    assert "divide by all three" in pages["ada"]
    assert "7 of 7 points" in pages["김 민수"]
    assert "data:image/png" in pages["plots"]
    assert "the rest of the output is left out" in pages["flood"]
    assert len(pages["flood"]) < 200_000
    assert "in your notebook, center, line 2" in pages["late input"]


def test_the_grade_book_is_nbgraders(graded):
    _, out, _ = graded
    from nbgrader.api import Gradebook

    url = course.course(out / "work" / SLUG, SLUG).db_url
    with course.isolated(out / "work"), Gradebook(url, "book") as book:
        scores = {one["first_name"]: one["score"] for one in book.submission_dicts(SLUG)}
    assert scores["김 민수"] == 7
    assert scores["untouched"] == 0
    assert scores["exit"] == 3


def test_a_second_run_grades_only_what_changed(graded, chapter, capsys):
    _, out, folder = graded
    path = folder / "ada.ipynb"
    text = path.read_text("utf-8")
    path.write_text(text.replace("owed = 4500", "owed = 3000"), "utf-8")
    before = (out / "scores.csv").read_text("utf-8")
    capsys.readouterr()
    try:
        report = grade.grade_folder(folder, out, [chapter], LIMITS)
    finally:
        path.write_text(text, "utf-8")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    fresh = [line for line in lines if "unchanged" not in line and "not graded" not in line]
    assert len(fresh) == 1
    assert "ada: 7/7" in fresh[0]
    assert report["students"]["ada"][0]["points"] == 7
    after = (out / "scores.csv").read_text("utf-8")
    assert after.replace("ada,2,4,1,7", "ada,0,4,1,5") == before


def test_an_interrupted_run_goes_on(chapter, reference, tmp_path, monkeypatch):
    for who in ("a", "b"):
        (tmp_path / "in" / who).mkdir(parents=True)
        shutil.copy(reference, tmp_path / "in" / who / f"{SLUG}.ipynb")
    whole, calls = grade.grade_notebook, []

    def interrupted(*arguments):
        calls.append(arguments[2])
        if calls == ["a", "b"]:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(grade, "grade_notebook", interrupted)
    out = tmp_path / "out"
    report = grade.grade_folder(tmp_path / "in", out, [chapter], LIMITS)
    assert not report["complete"]
    assert list(report["students"]) == ["a"]
    assert "a,2,4,1,7" in (out / "scores.csv").read_text()
    report = grade.grade_folder(tmp_path / "in", out, [chapter], LIMITS)
    assert calls == ["a", "b", "b"]
    assert report["complete"]
    assert [rows[0]["points"] for rows in report["students"].values()] == [7, 7]


def test_a_failure_of_the_grader_is_one_students_row(chapter, reference, tmp_path, monkeypatch):
    for who in ("a", "b"):
        (tmp_path / "in" / who).mkdir(parents=True)
        shutil.copy(reference, tmp_path / "in" / who / f"{SLUG}.ipynb")
    whole = grade.grade_notebook

    def failing(chapter, root, student, *rest):
        if student == "a":
            raise RuntimeError("no space left")
        return whole(chapter, root, student, *rest)

    monkeypatch.setattr(grade, "grade_notebook", failing)
    report = grade.grade_folder(tmp_path / "in", tmp_path / "out", [chapter], LIMITS)
    status = report["students"]["a"][0]["status"]
    assert status == "not graded: the grader failed (RuntimeError: no space left)"
    assert report["students"]["b"][0]["points"] == 7


def test_what_cannot_be_read_costs_its_own_student_only(chapter, reference, tmp_path):
    name = f"{SLUG}.ipynb"
    for who in ("directory", "formula", "gone", "link", "nested", "pipe", "surrogate"):
        (tmp_path / "in" / who).mkdir(parents=True)
    (tmp_path / "in" / "directory" / name).mkdir()
    (tmp_path / "in" / "link" / name).symlink_to("/nonexistent")
    (tmp_path / "in" / "gone" / name).symlink_to(name)  # a link to itself
    (tmp_path / "in" / "nested" / "homework.ipynb").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "in" / "pipe" / name)
    text = reference.read_text("utf-8").replace("owed = 9000 / 3", "owed = 9000 / 3 # \\ud800")
    text = text.replace('student_name = \\"\\"', 'student_name = \\"\\ud800\\"')
    assert text.count("ud800") == 2
    (tmp_path / "in" / "surrogate" / name).write_text(text, "utf-8")
    (tmp_path / "in" / "formula").rename(tmp_path / "in" / "=cmd|calc")
    odd = os.fsdecode(b"kim \xff")
    (tmp_path / "in" / odd).mkdir()
    (tmp_path / "in" / odd / name).symlink_to("/nonexistent")
    out = tmp_path / "out"
    students = grade.grade_folder(tmp_path / "in", out, [chapter], LIMITS)["students"]
    says = {who: rows[0]["status"] for who, rows in students.items()}
    assert says.pop("nested").startswith("not graded: homework.ipynb is not a notebook")
    none, unread = f"not graded: no notebook of {SLUG}", f"not graded: {name} cannot be read"
    assert says == {
        "directory": none,
        "pipe": none,
        "=cmd|calc": none,
        "link": f"{unread} (No such file or directory)",
        "gone": f"{unread} (Too many levels of symbolic links)",
        "kim \\udcff": f"{unread} (No such file or directory)",
        "surrogate": "graded",
    }
    assert points(students["surrogate"][0]) == FULL
    assert students["surrogate"][0]["name_in_notebook"] == "\\ud800"
    assert "'=cmd|calc," in (out / "scores.csv").read_text("utf-8")


WRONG = "\ndef center(rewards):\n    return rewards"
FINDER = """
import importlib.util, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "rlcore.checking":
            return importlib.util.spec_from_loader(name, self)
    def create_module(self, spec): return None
    def exec_module(self, module):
        module.check_close = lambda *a, **k: None
sys.meta_path.insert(0, Finder())"""
FORGED = {  # code -> what the remark names
    "runner": ("import book.homework.inside as i; i.run_test = lambda *a: None", "run_test"),
    "other source": (
        "import book.homework.inside as i; real = i.run_test\n"
        "i.run_test = lambda source, *a: real('', *a)",
        "run_test",
    ),
    "exec": ("import builtins; builtins.exec = lambda *a: None", "run_test"),
    "own exec": ("import book.homework.inside as i; i.exec = lambda *a: None", ""),
    "import_module": (
        "import importlib, sys, types\nfake = types.ModuleType('rlcore.checking')\n"
        "fake.check_close = lambda *a, **k: None\n"
        "importlib.import_module = lambda name: sys.modules.update({name: fake})",
        "importlib.import_module",
    ),
    "finder": (FINDER, "sys.meta_path"),
    "checking": (
        "import rlcore.checking; rlcore.checking.check_close = lambda *a, **k: None",
        "rlcore.checking.check_close",
    ),
    "module": (
        "import sys, types; sys.modules['rlcore.checking'] = fake = types.SimpleNamespace()\n"
        "fake.check_close = lambda *a, **k: None",
        "sys.modules[rlcore.checking]",
    ),
}


def test_a_notebook_cannot_forge_its_points_cheaply(chapter, edit, tmp_path):
    for who, (source, _) in FORGED.items():
        edit().answer("center", source + WRONG).save(tmp_path / "in" / who / f"{SLUG}.ipynb")
    right = (
        "%pdb on\nimport builtins; builtins.sum = lambda *a: 0\n"
        + edit().cell("center--exercise-1").source
    )
    edit().answer("center", right).save(tmp_path / "in" / "right" / f"{SLUG}.ipynb")
    made = grade.grade_folder(tmp_path / "in", tmp_path / "out", [chapter], LIMITS)["students"]
    for who, (_, remark) in FORGED.items():
        assert points(made[who][0])["center"] == 0, who
        assert made[who][0]["remarks"] == ([f"touched the grader: {remark}"] if remark else []), who
    assert points(made["right"][0]) == FULL
    assert made["right"][0]["remarks"] == ["touched the grader: builtins.sum"]
    assert "touched the grader" in (tmp_path / "out" / "feedback" / "runner.html").read_text()


def test_main(reference, tmp_path, capsys, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "in").mkdir()
    shutil.copy(reference, tmp_path / "in" / f"{SLUG}_kim.ipynb")
    options = ["--source", str(DATA), "--out", str(tmp_path / "out"), "--seconds", "20"]
    assert grade.main(["--submissions", str(tmp_path / "in"), *options]) == 0
    assert f"[1/1] {SLUG}  kim: 7/7" in capsys.readouterr().out
    assert grade.main([str(tmp_path / "in"), "99", *options]) == 0
    assert "unchanged" in capsys.readouterr().out
    assert list(home.rglob("*")) == []
    assert grade.main([str(tmp_path / "no"), *options]) == 1
    assert "does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        grade.main([])
    with pytest.raises(SystemExit):
        grade.main([str(tmp_path / "in"), "--seconds", "0"])


def test_names_of_files(tmp_path):
    for name in (
        "kim/11-grpo.ipynb",
        "lee/Homework 3/11-grpo (2).ipynb",
        "11-grpo_park.ipynb",
        "Choi Yuna_11-grpo.ipynb",
        "kim/12-dapo.ipynb",
        "kim/07-ppo.ipynb",
        "11-grpo.ipynb",
        "__MACOSX/kim/._11-grpo.ipynb",
        "kim/notes.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = find_submissions(tmp_path, ["11-grpo", "12-dapo"])
    assert set(found.files) == {
        ("kim", "11-grpo"),
        ("kim", "12-dapo"),
        ("lee", "11-grpo"),
        ("park", "11-grpo"),
        ("Choi Yuna", "11-grpo"),
    }
    assert dict(found.skipped) == {
        "11-grpo.ipynb": "the file's name does not say whose it is",
        "kim/07-ppo.ipynb": "a notebook of 07-ppo, which is not graded now",
        "kim/notes.txt": "not a notebook (.ipynb)",
    }
    with pytest.raises(ValueError, match="does not exist"):
        find_submissions(tmp_path / "none", ["11-grpo"])


def test_decomposed_and_composed_hangul_are_one_student(tmp_path):
    import unicodedata

    for form, folder in (("NFC", "a"), ("NFD", "b")):
        name = unicodedata.normalize(form, f"김민수_{SLUG}.ipynb")
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text("{}")
        found = find_submissions(tmp_path / folder, [SLUG])
        assert list(found.files) == [("김민수", SLUG)]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("metadata"),
        lambda data: data.update(nbformat_minor=0),
        lambda data: [cell.pop("metadata") for cell in data["cells"]],
        lambda data: [cell.pop("id", None) for cell in data["cells"]],
        lambda data: [cell.update(source=[cell["source"]]) for cell in data["cells"]],
        lambda data: data["cells"].append("text"),
        lambda data: data["cells"].append({}),
        lambda data: data["cells"][5].update(metadata=None),
        lambda data: data["cells"][5]["metadata"].update(nbgrader=3),
    ],
)
def test_a_notebook_that_bends_the_format_is_read(reference, release, tmp_path, damage):
    data = json.loads(reference.read_text("utf-8"))
    damage(data)
    path = tmp_path / "bent.ipynb"
    path.write_text(json.dumps(data), "utf-8")
    notebook, _ = assemble(nbformat.read(release, as_version=4), read_submission(path))
    text = "\n".join(cell.source for cell in notebook.cells)
    assert "owed = 9000 / 3" in text
    assert "return rewards - rewards.mean()" in text
    assert text.count("check_number(owed") == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"cells": 3}', '{"cells": []}', "\xff"])
def test_what_is_no_notebook_says_so(tmp_path, text):
    path = tmp_path / "x.ipynb"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(Unreadable, match=r"x\.ipynb (is|cannot)"):
        read_submission(path)


def test_assemble_keeps_the_students_order(release, edit, tmp_path):
    one = edit().insert_before("center--exercise-1", "first = 1")
    one.insert_before("flat-curve--text", "scratch = 2")
    notebook, remarks = assemble(
        nbformat.read(release, as_version=4), read_submission(one.save(tmp_path / "x.ipynb"))
    )
    order = [cell.id if not cell.id.startswith("own") else cell.source for cell in notebook.cells]
    start = order.index("center--text")
    assert order[start : order.index("flat-curve--text")] == [
        "center--text",
        "first = 1",
        "center--exercise-1",
        "scratch = 2",
        "center--test-1",
        "center--hidden-test-1",
        "center--hidden-test-2",
    ]
    assert not any(remarks.values())


def test_no_installed_kernelspec_is_needed(tmp_path, monkeypatch):
    """A python3 kernel that is installed elsewhere is not taken either."""
    import sys

    spec = tmp_path / "kernels" / "python3"
    spec.mkdir(parents=True)
    (spec / "kernel.json").write_text(
        json.dumps({"argv": ["/nonexistent/python"], "display_name": "x", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    (tmp_path / "run").mkdir()
    with course.isolated(tmp_path / "work"), Kernel(tmp_path / "run", LIMITS) as kernel:
        outcome = kernel.run("import sys; print(sys.executable)")
    assert outcome.ok
    assert Path(outcome.outputs[0].text.strip()) == Path(sys.executable)


REAL = chapters_with_exercises(CHAPTERS)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_every_chapter_untouched_scores_0_and_the_reference_all(path, tmp_path):
    chapter = read_chapter(path)
    made = releases.write_release(chapter, tmp_path)
    assert grade.prove(chapter, made) == []
