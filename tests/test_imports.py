"""Imports go one way, and planning starts without torch and Matplotlib."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
import pytest

from graphs.moved_imports import MOVED_TO
from tests.support.paths import GPT2, ROOT

GRAPH = GPT2
SLOW = ("torch", "matplotlib", "transformers", "scipy", "pulp")
"""Loaded only by those answers that need them."""
MAY_IMPORT = {
    "checkpoint_solver": {"checkpoint_solver", "scheduler_runtime", "solver", "graphs"},
    "graphs": {"graphs"},
    "solver": {"solver", "graphs"},
    "scheduler_runtime": {"scheduler_runtime", "solver", "graphs"},
}
CALLBACKS = "scheduler_runtime.integrations"
"""Each of its modules imports another library, so its face imports none of them."""
SOURCES = [
    (package, path) for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))
]


def imported_by(program: str, *arguments: str) -> set[str]:
    """Which of the slow packages a new interpreter has loaded after running `program`."""
    report = "import json, sys; print(json.dumps([n for n in sys.modules if '.' not in n]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    return {name for name in SLOW if name in loaded}


LIGHT_GRAPHS = ("graph", "files", "hardware", "host_state", "fsdp", "pipeline", "synthetic")
LIGHT = [f"graphs.{name}" for name in LIGHT_GRAPHS] + [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "solver").rglob("[!_]*.py"))
    if path.parent.name != "plot"
]


@pytest.mark.slow
def test_the_core_and_the_solver_import_nothing_heavy():
    assert not imported_by("import graphs, solver, checkpoint_solver.cli")
    assert imported_by("import " + ", ".join(LIGHT)) <= {"pulp"}


@pytest.mark.slow
def test_pictures_need_matplotlib_alone():
    assert imported_by("import solver.reporting.plot") == {"matplotlib"}


@pytest.mark.slow
def test_planning_a_saved_graph_imports_nothing_heavy(tmp_path):
    program = "import sys; from checkpoint_solver.cli import main; assert main(sys.argv[1:]) == 0"
    options = ("--budget", "4GB", "-o", str(tmp_path / "schedule.json"), "--quiet")
    assert imported_by(program, str(GRAPH), *options) == {"scipy"}


@pytest.mark.slow
def test_tests_of_the_solver_collect_without_torch():
    folders = ("bound", "chain", "sizes_deadlines_progress", "methods", "schedule", "plan_analysis")
    paths = [f"tests/solver/{name}" for name in folders]
    paths += ["tests/graphs/graph/test_graph.py", "tests/graphs/test_files.py"]
    program = "import pytest, sys; assert pytest.main(sys.argv[1:]) == 0"
    assert "torch" not in imported_by(program, "--collect-only", "-q", "-n0", *paths)


@pytest.mark.slow
def test_solving_a_saved_graph_from_python_imports_nothing_heavy():
    program = "import sys; from solver import solve; solve(sys.argv[1], budget='4GB')"
    assert imported_by(program, str(GRAPH)) == {"scipy"}


def test_the_version_loads_nothing_else():
    program = "import sys; from checkpoint_solver.cli import main; assert main(['--version']) == 0"
    report = "print(*(n for n in sys.modules if n.split('.')[0] not in sys.stdlib_module_names))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"{program}; {report}"],  # without what site loads
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    version, loaded = done.stdout.splitlines()
    assert version.startswith("solve ")
    ours = {"checkpoint_solver", "checkpoint_solver.cli"}
    assert set(loaded.split()) - {"__main__"} == ours


@pytest.mark.slow
def test_a_usage_error_imports_nothing_slow():
    program = (
        "from checkpoint_solver.cli import main; assert main(['--budgte', '4GB', 'model.py']) == 2"
    )
    assert not imported_by(program)


WRONG_SIZES = [
    ("--budget", "16XB"),
    ("--budget", "-3GB"),
    ("--budget", "1GB", "--reserve", "x"),
    ("--budget", "1GB", "--host", "12Q"),
    ("--budget", "1GB", "--host", "50%"),
    ("--budget", "1GB", "--host", "8GB", "--disk", "50%:/scratch"),
    ("--budget", "1GB", "--host", "8GB", "--host-link", "5Gb/s"),
    ("--budget", "1GB", "--host", "8GB", "--disk", "50QB:/scratch"),
    ("--budget", "1GB", "--host", "8GB", "--disk", "50GB:/scratch", "--disk-rate", "1"),
]


@pytest.mark.slow
def test_a_wrong_size_is_refused_before_torch_is_loaded():
    program = (
        "from checkpoint_solver.cli import main\n"
        f"for wrong in {WRONG_SIZES!r}:\n"
        "    assert main([*wrong, 'examples/gpt2.py']) == 2, wrong"
    )
    assert not imported_by(program)


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=str)
def test_packages_import_one_way(package, path):
    ours = {module.partition(".")[0] for module in _imports(path)} & set(MAY_IMPORT)
    assert ours <= MAY_IMPORT[package], f"{path.name} imports {ours - MAY_IMPORT[package]}"


@pytest.mark.parametrize(("package", "path"), SOURCES, ids=str)
def test_a_wing_is_imported_through_its_face(package, path):
    """Outside of a folder nothing is imported from the files inside it."""
    inside = ".".join(path.relative_to(ROOT).parent.parts)
    for module in _imports(path, names=False):
        wing, _, _ = module.rpartition(".")
        if wing in ("", *MAY_IMPORT, CALLBACKS) or _is_folder(module):
            continue
        assert f"{inside}.".startswith(f"{wing}."), f"{path} imports {module}, not its face {wing}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_wings_import_downwards(package):
    """No circle among the folders and files of a package, nor among those of a folder."""
    for folder in [ROOT / package, *(p.parent for p in (ROOT / package).rglob("*/__init__.py"))]:
        name = ".".join(folder.relative_to(ROOT).parts)
        edges = [
            (_room(name, _module(path)), _room(name, imported))
            for path in folder.rglob("*.py")
            if path != folder / "__init__.py"
            for imported in _imports(path)
            if imported.startswith(f"{name}.")
        ]
        order = networkx.DiGraph((a, b) for a, b in edges if a != b)
        assert networkx.is_directed_acyclic_graph(order), networkx.find_cycle(order)


@pytest.mark.parametrize("package", ["graphs", "solver"])
def test_the_top_of_a_package_is_small(package):
    other = ("__pycache__", "__init__.py", "__main__.py", "py.typed")
    entries = [p.name for p in (ROOT / package).iterdir() if p.name not in other]
    assert len(entries) <= 16, sorted(entries)


def test_no_module_is_shadowed_by_a_name_of_its_package():
    names = [_module(path) for _, path in SOURCES if path.name != "__main__.py"]
    optional = (f"{CALLBACKS}.", "checkpoint_solver.integrations.")
    names = [name for name in names if "." in name and not name.startswith(optional)]
    for name in names:
        importlib.import_module(name)
    for name in names:
        package, _, leaf = name.rpartition(".")
        assert isinstance(getattr(sys.modules[package], leaf), types.ModuleType), name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("graphs.step", "graphs.training_step"),
        ("solver.plot", "solver.reporting.plot"),
        ("solver.cli", "checkpoint_solver.cli"),
        ("solver.revolve", "solver.chain"),
        ("solver.dp", "solver.chain"),
        ("solver.bounds", "solver.bound"),
        ("solver.report", "solver"),
        ("solver.emit", "solver.module_checkpointing.for_other_frameworks"),
        ("solver.device", "solver.device_and_costs"),
        ("solver.analysis", "solver.plan_analysis"),
        ("solver.common", "solver.sizes_deadlines_progress"),
        ("solver.framework_settings", "solver.module_checkpointing.for_other_frameworks"),
        ("solver.scheduler_runtime_bridge", "scheduler_runtime.verifying"),
        ("solver.reporting.python_api", "solver.python_api"),
        ("graphs.eager", "graphs.graph"),
        ("graphs.links", "graphs.hardware"),
        ("scheduler_runtime.hugging_face", "scheduler_runtime.integrations.hugging_face"),
    ],
)
def test_an_old_path_fails_with_the_new_one(old, new):
    with pytest.raises(ModuleNotFoundError, match=f"{old} has moved to {new}$"):
        importlib.import_module(old)


OLD_PATHS = """
import importlib
import sys
for path in sys.argv[1:]:
    try:
        importlib.import_module(path)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_an_old_path_of_the_solver_fails_with_the_new_one_before_anything_else_is_imported():
    """`solver` alone loads nothing, so not the list of old paths either."""
    done = subprocess.run(
        [sys.executable, "-c", OLD_PATHS, "solver.plot", "solver.nowhere", "solver.revolve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "solver.plot has moved to solver.reporting.plot",
        "No module named 'solver.nowhere'",
        "solver.revolve has moved to solver.chain",
    ]


def test_every_module_that_moved_has_a_place():
    for new, names in MOVED_TO.items():
        assert importlib.util.find_spec(new) is not None, new
        for old in names.split():
            path = ROOT / (old if "." in old else f"{new.partition('.')[0]}.{old}").replace(
                ".", "/"
            )
            assert not path.exists(), path
            assert not path.with_suffix(".py").exists(), path


def test_nothing_below_the_runtime_finds_it_by_name():
    places = [
        path.name
        for package, path in SOURCES
        if package in ("graphs", "solver")
        and path.name not in ("moved_imports.py", "users_line.py")  # they import none of it
        and _names_the_runtime(path)
    ]
    assert not places


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _is_folder(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__init__.py").exists()


def _room(folder: str, module: str) -> str:
    """The entry of the folder that the module is, or is in."""
    return module.removeprefix(f"{folder}.").partition(".")[0]


def _imports(path: Path, *, names: bool = True) -> Iterator[str]:
    """Every module of ours that a file imports, wherever in it.

    names: `from folder import file` imports the file; else it asks the folder for a name.
    """
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name their package"
            base = node.module or ""
            inside = [f"{base}.{alias.name}" for alias in node.names]
            found = [name if names and _exists(name) else base for name in inside]
        else:
            continue
        yield from (name for name in found if name.partition(".")[0] in MAY_IMPORT)


def _exists(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or _is_folder(module)


@cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def _names_the_runtime(path: Path) -> bool:
    """Whether a string that could be imported by name is in the code."""
    constants = (n.value for n in _nodes(path) if isinstance(n, ast.Constant))
    return any(
        isinstance(value, str) and value.startswith("scheduler_runtime") and " " not in value
        for value in constants
    )
