"""`checkpoint_solver` offers the packages' own objects, loads nothing early, and has types."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint_solver
from tests.support.paths import ROOT
from tests.test_imports import imported_by

HOMES = ("graphs", "solver", "scheduler_runtime")
FOLDER = ROOT / "checkpoint_solver"
MODULES = [
    pytest.param(
        ".".join(path.relative_to(ROOT).with_suffix("").parts),
        marks=[pytest.mark.slow] if path.parent != FOLDER else [],  # imports another library
        id=path.stem,
    )
    for path in sorted(FOLDER.rglob("[!_]*.py"))
    if path.parent.name != "cli"  # the command
]


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("home", HOMES)
def test_every_public_name_is_the_same_object(home):
    package = importlib.import_module(home)
    assert {*package.__all__} <= {*dir(package)}  # before each is loaded
    for name in package.__all__:
        assert getattr(checkpoint_solver, name) is getattr(package, name), name


def test_no_name_has_two_homes():
    names = [name for home in HOMES for name in importlib.import_module(home).__all__]
    names += checkpoint_solver._FROM_FOLDERS
    names += checkpoint_solver._MODULES
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_offers_the_objects_of_its_home(name):
    tree = ast.parse((ROOT / name.replace(".", "/")).with_suffix(".py").read_text())
    offered = importlib.import_module(name)
    origin = {
        alias.asname or alias.name: (line.module, alias.name)
        for line in tree.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert sorted(offered.__all__) == sorted(origin)
    for attribute, (home, name_there) in origin.items():
        assert getattr(offered, attribute) is getattr(importlib.import_module(home), name_there)


def test_modules_are_attributes_too():
    for name in checkpoint_solver._MODULES:
        found = checkpoint_solver.__getattr__(name)
        assert found is importlib.import_module(f"checkpoint_solver.{name}")


def test_a_star_and_dir_give_every_name():
    expected = {name for home in HOMES for name in importlib.import_module(home).__all__}
    expected |= {"export", "trace", "TraceError"}
    assert expected <= set(checkpoint_solver.__all__)
    assert expected <= set(dir(checkpoint_solver))


def test_dir_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None; import checkpoint_solver; "
        "names = dir(checkpoint_solver); assert {'solve', 'Graph', 'fit'} - {*names} == {'fit'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_types_are_declared_for_every_name():
    tree = ast.parse((FOLDER / "__init__.py").read_text())
    (typed,) = (line for line in tree.body if isinstance(line, ast.If))
    lines = [line for line in typed.body if isinstance(line, ast.ImportFrom)]
    named = {alias.asname: line.module for line in lines for alias in line.names if alias.asname}
    assert {line.module for line in lines if line.names[0].name == "*"} == set(HOMES)
    modules = dict.fromkeys(checkpoint_solver._MODULES, "checkpoint_solver")
    assert named == {**checkpoint_solver._FROM_FOLDERS, **modules}


def test_importing_it_loads_nothing_slow():
    assert not imported_by(
        "import checkpoint_solver; hasattr(checkpoint_solver, '__wrapped__')\n"
        "from checkpoint_solver import Graph, solve, report, sweep, BudgetError\n"
        "from checkpoint_solver import emit, schedule, synthetic"
    )


def test_an_unknown_name_is_an_import_error():
    with pytest.raises(ImportError, match="cannot import name 'solv'"):
        from checkpoint_solver import solv  # noqa: F401


@pytest.mark.parametrize("name", HOMES)
def test_a_file_that_hides_a_package_is_named(name, tmp_path):
    (tmp_path / f"{name}.py").touch()
    program = f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; import checkpoint_solver"
    done = python("-c", program)
    assert done.returncode == 1
    assert f"that name is taken by {tmp_path / name}.py: rename it" in done.stderr


def test_the_module_is_the_command():
    done = python("-m", "checkpoint_solver", "--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "solve")


@pytest.mark.slow
def test_a_strict_type_checker_knows_the_names(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed")
    program = (
        "from checkpoint_solver import Graph, Solution, apply, export, report, solve\n"
        "from checkpoint_solver.costs import Roofline, named\n"
        "from checkpoint_solver.schedule import simulate\n"
        "reveal_type(solve)\n"
        "reveal_type(export.to_torch_checkpoint)\n"
        "reveal_type(Roofline(named('h100')))\n"
        "reveal_type(simulate)\n"
        "def planned(graph: Graph) -> Solution:\n"
        "    return solve(graph)\n"
    )
    (tmp_path / "user.py").write_text(program)
    options = ("--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path}")
    done = python("-m", "mypy", *options, str(tmp_path / "user.py"))
    assert "solver.schedule.solution.Solution" in done.stdout
    assert "Export" in done.stdout
    assert 'Revealed type is "graphs.costs.models.Roofline"' in done.stdout
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, done.stdout
    assert 'Missing named argument "budget" for "solve"' in errors[0]
