"""Imports go one way, and planning starts without torch and Matplotlib."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GRAPH = ROOT / "tests" / "data" / "gpt2_small_b8_t1024.json"
HEAVY = ("torch", "matplotlib", "transformers")
MAY_IMPORT = {
    "graphs": {"graphs"},
    "solver": {"solver", "graphs"},
    "scheduler_runtime": {"scheduler_runtime", "solver", "graphs"},
}
SOURCES = [
    (package, path) for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))
]


def imported_by(program: str, *arguments: str) -> dict[str, bool]:
    """Which of the heavy packages a new interpreter has loaded after running `program`."""
    report = "import json, sys; print(json.dumps([n for n in sys.modules if '.' not in n]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    return {name: name in loaded for name in HEAVY}


LIGHT_GRAPHS = ("graph", "files", "step", "synthetic", "hardware", "sharded", "sharding")
LIGHT = [f"graphs.{name}" for name in LIGHT_GRAPHS] + [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "solver").rglob("[!_]*.py"))
    if path.parent.name != "plot"
]


def test_the_core_and_the_solver_import_nothing_heavy():
    assert imported_by("import graphs, solver") == dict.fromkeys(HEAVY, False)
    loaded = imported_by("import " + ", ".join(LIGHT))
    assert loaded == dict.fromkeys(HEAVY, False)


def test_pictures_need_matplotlib_alone():
    assert imported_by("import solver.plot") == {
        "torch": False,
        "matplotlib": True,
        "transformers": False,
    }


def test_planning_a_saved_graph_imports_nothing_heavy(tmp_path):
    program = "import sys; from solver.cli import main; assert main(sys.argv[1:]) == 0"
    options = ("--budget", "4GB", "-o", str(tmp_path / "schedule.json"), "--quiet")
    assert imported_by(program, str(GRAPH), *options) == dict.fromkeys(HEAVY, False)


def test_solving_a_saved_graph_from_python_imports_nothing_heavy():
    program = "import sys; from solver import solve; solve(sys.argv[1], budget='4GB')"
    assert imported_by(program, str(GRAPH)) == dict.fromkeys(HEAVY, False)


@pytest.mark.parametrize(
    ("package", "path"), SOURCES, ids=[str(p.relative_to(ROOT)) for _, p in SOURCES]
)
def test_imports_go_one_way(package, path):
    ours = {name for name in _imports(path) if name in MAY_IMPORT}
    assert ours <= MAY_IMPORT[package], f"{path.name} imports {ours - MAY_IMPORT[package]}"


def test_the_places_that_find_another_package_by_name():
    """`--verify` and the fallback run the model, which is scheduler_runtime's: found by name."""
    places = [
        path.name
        for package, path in SOURCES
        if package in ("graphs", "solver") and _names_the_runtime(path)
    ]
    assert places == ["submodules.py", "verification.py"]


def _imports(path: Path) -> Iterator[str]:
    """The top-level names of everything that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their package"
            yield (node.module or "").partition(".")[0]


def _names_the_runtime(path: Path) -> bool:
    """Whether a string that could be imported by name is in the code."""
    constants = (
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
    )
    return any(
        isinstance(value, str) and value.startswith("scheduler_runtime") and " " not in value
        for value in constants
    )
