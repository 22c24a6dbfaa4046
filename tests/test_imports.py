"""Who may import whom.  Imports run one way: objectives <- algorithms <- training <- chapters.

objectives        torch, the standard library, each other
preferences       objectives, naming, torch, the standard library
algorithms        objectives and its own parts (answers, choices, assembly, naming), torch, the
                  standard library
trl_export        algorithms, preferences, objectives; TRL itself only when it is asked for a config
rlcore, the rest  anything of rlcore that makes no cycle; never widgets or book
widgets           rlcore.objectives, anywidget, traitlets, ipywidgets, torch, each other
book              none of rlcore and widgets: it runs notebooks
rlcore.checking   torch and the standard library (a grader loads no model)

Read from the source (also imports inside functions), so nothing has to be installed or run; only
what an import really loads is asked of a fresh interpreter.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("rlcore", "widgets", "book")
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imports(module: str, everywhere: bool = True) -> set[str]:
    """The modules that a module imports (``from a import b``: a.b, where that is a module).

    everywhere=False: only by the statements that run when the module is imported.
    """
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in statements(ast.parse(path.read_text()), everywhere):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found |= {
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in SOURCES else base
                for alias in node.names
            }
    return found


def statements(tree: ast.AST, everywhere: bool) -> list[ast.AST]:
    if everywhere:
        return list(ast.walk(tree))
    found: list[ast.AST] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        found += [node, *statements(node, everywhere)]
    return found


def outside(module: str) -> set[str]:
    """Top-level packages that are neither the standard library nor of this project."""
    tops = {name.partition(".")[0] for name in imports(module)}
    return tops - set(sys.stdlib_module_names) - set(PACKAGES)


def inside(module: str) -> set[str]:
    return {name for name in imports(module) if name.partition(".")[0] in PACKAGES}


def modules(prefix: str) -> list[str]:
    return [name for name in SOURCES if name == prefix or name.startswith(f"{prefix}.")]


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def test_the_sources_are_found() -> None:
    assert {"rlcore", "rlcore.objectives", "rlcore.objectives.policy", "rlcore.algorithms"} <= (
        SOURCES.keys()
    )
    assert "rlcore.objectives.aggregation" in imports("rlcore.objectives.policy")


@pytest.mark.parametrize("module", modules("rlcore.objectives"))
def test_objectives_import_torch_and_each_other(module: str) -> None:
    assert outside(module) <= {"torch"}
    assert all(within(name, "rlcore.objectives") for name in inside(module))


ROWS = ("algorithms", "assembly", "choices", "answers", "preferences", "naming")
MADE_OF = {  # an algorithm's parts: answers <- choices <- assembly <- algorithms
    "algorithms": ("rlcore.assembly", "rlcore.choices", "rlcore.answers"),
    "assembly": ("rlcore.choices",),
    "choices": ("rlcore.answers", "rlcore.naming"),
    "preferences": ("rlcore.naming",),
    "answers": ("rlcore.choices",),  # for the type checker alone, see the next test
}


@pytest.mark.parametrize("part", ROWS)
def test_rows_import_objectives(part: str) -> None:
    """And each other in one direction; preferences knows no algorithm."""
    assert outside(f"rlcore.{part}") <= {"torch"}
    for name in inside(f"rlcore.{part}"):
        assert within(name, "rlcore.objectives") or name in MADE_OF.get(part, ()), name


def test_answers_do_without_choices_when_they_run() -> None:
    assert "rlcore.choices" in imports("rlcore.answers")
    assert "rlcore.choices" not in imports("rlcore.answers", everywhere=False)


KNOW_TRL = {"rlcore.trl_export", "rlcore.trl_data"}
FED = ("rlcore.tasks", "rlcore.trl_data")


def test_the_export_knows_rows_alone() -> None:
    """TRL is reached by its name, when a config is asked for; tasks, when one is given."""
    assert outside("rlcore.trl_export") <= {"torch"}
    allowed = ("rlcore.algorithms", "rlcore.preferences", "rlcore.objectives", *FED)
    for name in inside("rlcore.trl_export"):
        assert any(within(name, prefix) for prefix in allowed), name
    assert not {*FED} & imports("rlcore.trl_export", everywhere=False)
    assert outside("rlcore.trl_data") == set()
    assert all(within(name, "rlcore.tasks") for name in inside("rlcore.trl_data"))
    for module in KNOW_TRL:
        assert "import_module" in SOURCES[module].read_text()


@pytest.mark.parametrize("module", sorted(set(modules("rlcore")) - KNOW_TRL))
def test_nobody_else_in_rlcore_knows_trl(module: str) -> None:
    assert "trl" not in outside(module)
    assert "import_module" not in SOURCES[module].read_text()
    if module != "rlcore":  # which hands out to_trl when it is asked for it
        assert not KNOW_TRL & imports(module)


@pytest.mark.parametrize("module", [name for name in modules("rlcore") if "checking" in name])
def test_checking_imports_torch_alone(module: str) -> None:
    assert outside(module) <= {"torch"}
    assert all(within(name, "rlcore.checking") for name in inside(module))


@pytest.mark.parametrize("module", modules("rlcore"))
def test_rlcore_knows_neither_widgets_nor_book(module: str) -> None:
    assert all(within(name, "rlcore") for name in inside(module))


@pytest.mark.parametrize(
    "module",
    [
        name
        for part in ("tasks", "models", "sampling", "devices", "evaluation", "plots")
        for name in modules(f"rlcore.{part}")
    ],
)
def test_only_the_loops_know_the_loops(module: str) -> None:
    """Tasks, models, sampling and the like serve the training; they do not start it."""
    assert not any(within(name, "rlcore.training") for name in inside(module))


@pytest.mark.parametrize("module", modules("widgets"))
def test_widgets_import_objectives_only(module: str) -> None:
    assert outside(module) <= {"anywidget", "traitlets", "ipywidgets", "torch"}
    for name in inside(module):
        assert within(name, "rlcore.objectives") or within(name, "widgets"), name


@pytest.mark.parametrize("module", modules("book"))
def test_book_imports_neither_rlcore_nor_widgets(module: str) -> None:
    assert all(within(name, "book") for name in inside(module))


def test_no_cycles() -> None:
    """Among the imports that run when a module is imported.  A package counts as its __init__."""
    graph = {
        module: {name for name in imports(module, everywhere=False) if name in SOURCES} - {module}
        for module in SOURCES
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"imports in a circle: {' -> '.join([*path, module])}"
        if module not in done:
            for name in sorted(graph[module]):
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rlcore", ("torch", "transformers", "numpy", "matplotlib", "trl")),
        ("rlcore.objectives", ("transformers", "matplotlib", "rlcore.algorithms", "trl")),
        ("rlcore.algorithms", ("transformers", "matplotlib", "rlcore.models", "trl")),
        ("rlcore.preferences", ("transformers", "matplotlib", "rlcore.algorithms", "trl")),
        ("rlcore.trl_export", ("transformers", "matplotlib", "rlcore.models", "trl")),
        ("rlcore.trl_data", ("torch", "transformers", "datasets", "trl")),
        ("rlcore.__main__", ("torch", "transformers", "trl")),
    ],
)
def test_what_an_import_loads(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*[n for n in {absent!r} if n in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


def code_lines(function: ast.FunctionDef) -> int:
    """From ``def`` to the last line, without the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_no_module_of_rlcore_loads_trl() -> None:
    """All of them in one interpreter; and asking the package for to_trl does not either."""
    names = [name for name in modules("rlcore") if not name.endswith("__main__")]
    code = f"import sys, {', '.join(names)}; rlcore.to_trl; print('trl' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False"]


@pytest.mark.parametrize("module", modules("rlcore.objectives"))
def test_a_loss_function_fits_on_a_screen(module: str) -> None:
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.FunctionDef):
            assert code_lines(node) <= 40, f"{module}.{node.name}: {code_lines(node)} lines"


@pytest.mark.parametrize(
    "module",
    [
        *(f"rlcore.{part}" for part in (*ROWS, "trl_export", "trl_data")),
        *modules("rlcore.objectives"),
    ],
)
def test_public_functions_are_documented(module: str) -> None:
    tree = ast.parse(SOURCES[module].read_text())
    assert ast.get_docstring(tree)
    if module.rpartition(".")[2].startswith("_"):
        return
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{module}.{node.name}"
