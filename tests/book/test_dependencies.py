"""A chapter's outputs are stale exactly when something that it uses has changed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from book.dependencies import closure, fingerprint, imported

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "requirements.txt": "",
    "book/__init__.py": "",
    "book/quoted.py": "",
    "book/kernel_config.py": "",
    "rlcore/__init__.py": "",
    "rlcore/a.py": "from rlcore.b import f\n",
    "rlcore/b.py": "def f():\n    from . import c\n    return c\n",
    "rlcore/c.py": "",
    "rlcore/alone.py": "",
    "rlcore/sub/__init__.py": "from .deep import x\n",
    "rlcore/sub/deep.py": "from ..c import y\n",
    "widgets/__init__.py": "from widgets.one import One\n",
    "widgets/one.py": "import rlcore.c\n",
    "widgets/one.js": "",
    "widgets/widgets.css": "",
    "chapters/runs/grpo.json": "",
    "tests/parity/vectors.py": "import rlcore.c\n",
    "tests/parity/test_parity.py": "",
    "tests/data/vectors.json": "",
}


@pytest.fixture
def project(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "used"),
    [
        ("import torch", set()),
        ("from rlcore import a", {"rlcore/__init__", "rlcore/a", "rlcore/b", "rlcore/c"}),
        ("import rlcore.alone", {"rlcore/__init__", "rlcore/alone"}),
        ("%matplotlib inline\nfrom rlcore.c import *", {"rlcore/__init__", "rlcore/c"}),
        (
            "def f():\n    import rlcore.sub",
            {"rlcore/__init__", "rlcore/sub/__init__", "rlcore/sub/deep", "rlcore/c"},
        ),
    ],
)
def test_a_change_matters_if_and_only_if_the_code_can_reach_it(project, code, used):
    before = fingerprint(code, project)
    assert fingerprint(code, project) == before
    for name in FILES:
        path = project / name
        text = path.read_text("utf-8")
        path.write_text(text + "# changed\n", encoding="utf-8")
        always = name in ("requirements.txt", "book/quoted.py", "book/kernel_config.py")
        expected = always or name.removesuffix(".py") in used
        assert (fingerprint(code, project) != before) is expected, name
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", ["widgets/one.js", "widgets/widgets.css", "rlcore/c.py"])
def test_a_widget_is_its_drawing_too(project, name):
    before = fingerprint("from widgets import One", project)
    (project / name).write_text("# changed", encoding="utf-8")
    assert fingerprint("from widgets import One", project) != before


def test_recorded_runs_count_for_the_pages_that_read_them(project):
    reads = "import json\njson.load(open('runs/grpo.json'))"
    before, other = fingerprint(reads, project), fingerprint("import json", project)
    (project / "chapters" / "runs" / "grpo.json").write_text("{}", encoding="utf-8")
    assert fingerprint(reads, project) != before
    assert fingerprint("import json", project) == other


@pytest.mark.parametrize(
    "name", ["tests/parity/vectors.py", "tests/data/vectors.json", "rlcore/c.py"]
)
def test_proved_numbers_count_for_the_pages_that_show_them(project, name):
    shows = "from tests.parity.vectors import comparison"
    before, other = fingerprint(shows, project), fingerprint("import rlcore.alone", project)
    (project / name).write_text("# changed", encoding="utf-8")
    assert fingerprint(shows, project) != before
    assert fingerprint("import rlcore.alone", project) == other


def test_the_page_of_conventions_depends_on_the_numbers_that_it_shows():
    page = (ROOT / "chapters" / "conventions.md").read_text("utf-8")
    imports = re.findall(r"^(?:from|import) .*$", page, re.MULTILINE)
    modules = imported(ast.parse("\n".join(imports)), "")
    files = {path.relative_to(ROOT).as_posix() for path in closure(modules, ROOT)}
    assert {
        "rlcore/algorithms.py",
        "rlcore/choices.py",
        "rlcore/preferences.py",
        "rlcore/objectives/policy.py",
        "tests/parity/vectors.py",
        "tests/data/parity_vectors.json",
    } <= files
    assert "tests/parity/test_parity.py" not in files


def test_the_real_packages_are_followed():
    files = {p.relative_to(ROOT).as_posix() for p in closure({"widgets"}, ROOT)}
    assert "widgets/group_advantage.py" in files
    assert "widgets/group_advantage.js" in files
    assert "rlcore/objectives/advantages.py" in files
    assert not any(name.startswith("rlcore/training") for name in files)
