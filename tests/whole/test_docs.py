"""The documentation builds strictly, agrees with the code, and its examples run."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread

import checkpoint_solver
from checkpoint_solver.cli.arguments import help_text
from checkpoint_solver.cli.command import main
from docs import screenshots
from graphs.graph import Node, Tensor
from graphs.graph.parts import KINDS, PHASES
from tests.support.browser import path_or_skip
from tests.support.paths import ROOT

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("graphs", "solver", "scheduler_runtime")
NAMES = "checkpoint_solver|graphs|solver|scheduler_runtime"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A broken link or an unknown name fails here."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


def page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site):
    start = page(site, "index.html")
    pages = sorted(path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md"))
    assert len(pages) > 10
    missing = [str(name) for name in pages if f'href="{name}"' not in start]
    assert [name for name in missing if name != "index.html"] == []


@pytest.mark.slow
def test_the_reference_shows_docstrings(site):
    assert "Find the schedule that fits the training step into" in page(
        site, "reference/solver.html"
    )
    assert "Trace one training step into" in page(site, "reference/graphs.html")
    assert 'id="scheduler_runtime.apply"' in page(site, "reference/scheduler_runtime.html")
    assert "solver.bound.cut" in page(site, "reference/methods.html")


def test_the_reference_documents_every_public_name():
    pages = (path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"\w+", "".join(pages)))
    modules = {each.name for each in pkgutil.iter_modules(checkpoint_solver.__path__)}
    former = {"Trace"}  # now Simulation
    assert set(checkpoint_solver.__all__) - modules - former <= documented


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_lists_what_every_folder_exports(site, package):
    text = page(site, f"reference/{package}.html")
    for path in (ROOT / package).glob("*/__init__.py"):
        assert f"<code>{package}.{path.parent.name}</code>" in text


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_page_lists_each_folder_above_what_it_imports(package):
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    table = text.partition(f"## {package}\n")[2].partition("\n## ")[0]
    listed = [name.removesuffix(".py") for name in re.findall(r"^\| `([\w.]+)` \|", table, re.M)]
    folder = ROOT / package
    there = {path.stem for path in folder.glob("[!_]*.py")}
    there |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted(listed) == sorted(there)
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = (getattr(node, "module", None) or "").split(".")
            if room in listed and parts[0] == package and len(parts) > 1 and parts[1] != room:
                assert listed.index(room) < listed.index(parts[1]), f"{path} imports {parts[1]}"


def test_the_start_page_shows_fit_first_and_sections_of_the_readme(site):
    start = page(site, "index.html")
    content = start.partition("<article")[2]
    assert 0 < content.index("fit</span>") < content.index("Which entry point?")
    for name in ("install", "tutorial", "faq", "integrations/index"):
        assert start.index(f'href="{name}.html"') < start.index('href="report.html"'), name


def test_the_readme_is_short_and_says_what_was_not_measured():
    assert len(README.splitlines()) <= 120
    assert "`pip install -c constraints.txt -e '.[test]' && pytest`" in README
    assert "pip install -c constraints.txt -e . && solve --budget 8GB examples/gpt2.py\n" in README
    for measured in ("Measured on one H200", "**Not measured on a GPU**"):
        assert README.index(measured) < README.index("\n## ")


def test_the_figures_of_the_gpu_are_those_of_its_file():
    path = ROOT / "benchmarks" / "results" / "gpu_h200.json"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    cases = {
        c: row
        for run in runs
        for c, row in run["parts"].get("ways", {"cases": {}})["cases"].items()
    }
    eager, blocks, ours = (
        cases[f"llama-8b-8192/{way}"] for way in ("eager", "every block", "ours/0.3")
    )
    page = (DOCS / "gpu.md").read_text(encoding="utf-8")
    for row in (eager, blocks, ours):
        assert f"{row['peak_bytes'] / 1e9:.3f} GB" in page
        assert f"{1e3 * row['time_s']:.1f} ms" in page
    head = " ".join(README.partition("\n## ")[0].replace("\n>", "").split())
    overheads = [f"{100 * ours[name]:.1f} %" for name in ("measured_overhead", "overhead", "bound")]
    for figure in (
        f"takes {eager['peak_bytes'] / 1e9:.1f} GB",
        f"for {ours['budget_bytes'] / 1e9:.1f} GB it takes {ours['peak_bytes'] / 1e9:.3f} GB",
        "{} more time (planned {}, bound {})".format(*overheads),
        f"{blocks['peak_bytes'] / 1e9:.1f} GB and {100 * blocks['measured_overhead']:.1f} %",
    ):
        assert figure in head
    assert f"{ours['predicted_bytes'] / 1e9:.3f}" == f"{ours['peak_bytes'] / 1e9:.3f}"


def test_the_results_in_the_readme_are_those_of_the_table():
    def rows(text: str) -> dict[str, list[str]]:
        lines = re.findall(r"^\| (.+) \|$", text, flags=re.MULTILINE)
        cells = [line.split(" | ") for line in lines]
        return {row[0]: row[1:] for row in cells if len(row) > 9 and row[1].isdigit()}

    measured = ROOT / "benchmarks" / "results" / "plan_quality.md"
    files = (DOCS / "plan_quality.md", measured)
    short, full, results = rows(README), *(rows(f.read_text(encoding="utf-8")) for f in files)
    assert full == results
    assert len(short) == 5
    for name, row in short.items():
        *figures, search, every_block, sqrt, dp, torch = full[name]
        assert row == [*figures, search, every_block, sqrt, torch], dp


@pytest.mark.slow
def test_the_report_in_the_docs_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["--budget", "8GB", "--device", "cpu", "examples/gpt2.py"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for text in (README, (DOCS / "report.md").read_text(encoding="utf-8")):
        excerpt = text.partition("```text\n")[2].partition("\n```")[0].splitlines()
        assert [x for x in excerpt if x not in printed and not x.startswith("  solve time")] == []


def test_the_command_page_shows_the_help(site):
    assert "solve --help" not in page(site, "reference/command.html")
    shown = re.sub(r"<[^>]+>", "", page(site, "reference/command.html"))
    for option in re.findall(r"--[a-z-]+", help_text()):
        assert option in shown


def test_formulas_need_no_script(site):
    theory = page(site, "theory.html")
    assert theory.count("<math") > 80
    assert theory.count("</p>\n<math") == theory.count('display="block"')
    assert "$" not in re.sub(r"<(script|style).*?</\1>", "", theory, flags=re.DOTALL)


def test_links_out_of_the_site_are_shown_as_paths(site):
    assert "benchmarks/results/emitted_settings.json" in page(site, "emit.html")
    assert 'href="../benchmarks' not in page(site, "emit.html")


def test_pages_load_nothing_from_other_sites(site):
    loaded = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:)?//", re.IGNORECASE)
    assert [p.name for p in site.rglob("*.html") if loaded.search(p.read_text("utf-8"))] == []


def test_options_page_names_every_option():
    named = set(re.findall(r"`[^`]*?(--[a-z-]+)", (DOCS / "options.md").read_text()))
    options = set(re.findall(r"--[a-z-]+", help_text()))
    assert sorted(named - options) == []
    assert options - named <= {"--help", "--version", "--output", "--op"}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_names_and_paths_in_code_spans_exist(path):
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(rf"`((?:{NAMES})(?:\.\w+)+)`", text):
        assert _resolves(name), name
    tops = f"{NAMES}|tests|benchmarks|examples|docs"
    for name in re.findall(rf"\b((?:{tops})/[\w/.]*\w)", text):
        assert (ROOT / name).exists(), name


def _resolves(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), attribute)
    return True


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = {"solve": "-m checkpoint_solver", "python": ""}
"""What a command of the docs is, as an argument of this interpreter."""


def run_here(command: str, directory: Path) -> str:
    """What a command of a page prints, run in this directory."""
    word, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *COMMANDS[word].split(), *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_the_tutorial_runs_as_written_and_prints_what_it_shows(tmp_path):
    """Blocks of Python are files, named in the first line; others are commands, or their output."""
    kinds, printed = [], ""
    for kind, block in FENCE.findall((DOCS / "tutorial.md").read_text(encoding="utf-8")):
        kinds.append(kind)
        if kind == "python":
            (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
        elif kind == "text":
            assert [x for x in block.splitlines() if x not in printed.splitlines()] == [], printed
        else:
            printed = "".join(run_here(command, tmp_path) for command in block.splitlines())
    assert (kinds.count("python"), kinds.count(""), kinds.count("text")) == (3, 6, 5)
    for name in ("schedule.json", "memory.png", "pareto.png"):
        assert (tmp_path / name).stat().st_size > 1000
    train = tmp_path / "train.py"
    exact = train.read_text().replace(":.4f", "!r")
    train.write_text(exact)
    planned = run_here("python train.py", tmp_path)
    train.write_text(exact.replace("apply(model, solution)\n", ""))
    assert run_here("python train.py", tmp_path) == planned


@pytest.mark.slow
def test_a_graph_file_is_planned_as_its_page_shows(tmp_path):
    printed = ""
    for kind, block in FENCE.findall((DOCS / "graph_files.md").read_text(encoding="utf-8")):
        if kind == "json":
            (tmp_path / "graph.json").write_text(block)
        elif kind == "python":
            (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
        elif kind == "text":
            assert [x for x in block.splitlines() if x not in printed.splitlines()] == [], printed
        else:
            printed = run_here(block.strip(), tmp_path)
    assert "ilp: optimal" in printed


def test_the_page_of_graph_files_names_every_field():
    text = (DOCS / "graph_files.md").read_text(encoding="utf-8")
    fields = {each.name for kind in (Tensor, Node) for each in dataclasses.fields(kind)}
    assert {name for name in fields if f"`{name}`" not in text} == set()
    assert {word for word in (*KINDS, *PHASES) if f"`{word}`" not in text} == set()


class Mean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu().mean()


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda p: p.name)
def test_the_first_lines_of_code_run(page, capsys):
    """The blocks of Python in a page, with a small model; each on a model of its own."""
    blocks = [block for kind, block in FENCE.findall(page.read_text("utf-8")) if kind == "python"]
    assert "fit(model" in blocks[0]
    for block in blocks:
        model = Mean()
        names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
        names |= {"batch": torch.randn(4, 8), "loader": [torch.randn(4, 8)] * 2}
        exec(block, names)  # noqa: S102
        model(names["batch"]).backward()
        assert "forward" in model.__dict__, "the model has a plan"


YOURS = {
    *("model", "Model", "Tower", "module", "stage", "layers", "trainer", "accelerator", "styles"),
    *("batch", "micro_batch", "loader", "data", "collate", "x", "y", "inputs", "targets"),
    *("optimizer", "criterion", "args", "rank", "mesh", "pipeline", "graph", "schedule"),
    "budget_bytes",
}
"""What a reader has: the blocks of Python in the docs define or import all else that they use."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_block_of_python_imports_what_it_uses(path):
    for block in [b for kind, b in FENCE.findall(path.read_text("utf-8")) if kind == "python"]:
        tree = list(ast.walk(ast.parse(block)))
        names = [node for node in tree if isinstance(node, ast.Name)]
        defined = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        defined |= {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        defined |= {node.arg for node in tree if isinstance(node, ast.arg)}
        for line in (each for each in tree if isinstance(each, ast.Import | ast.ImportFrom)):
            defined |= {(name.asname or name.name).partition(".")[0] for name in line.names}
            if isinstance(line, ast.ImportFrom) and line.module.startswith("checkpoint_solver"):
                assert all(
                    hasattr(importlib.import_module(line.module), n.name) for n in line.names
                )
        assert {name.id for name in names} <= defined | YOURS | set(dir(builtins)), block


@pytest.mark.slow
def test_a_screenshot_follows_the_color_scheme(tmp_path):
    browser = path_or_skip()
    page = tmp_path / "page.html"
    page.write_text("<style>@media (prefers-color-scheme: dark) {body {background: #000}}</style>.")
    corners = []
    for dark in (False, True):
        image = tmp_path / f"{dark}.png"
        screenshots.take_screenshot(browser, page, image, dark=dark)
        pixels = imread(image)
        assert pixels.shape[:2] == (screenshots.HEIGHT, screenshots.WIDTH)
        corners.append(pixels[-1, -1, 0])
    assert corners == [1.0, 0.0]
