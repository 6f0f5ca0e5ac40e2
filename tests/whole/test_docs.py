"""The documentation builds strictly, agrees with the code, and its examples run."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from docs import screenshots
from solver.cli.arguments import help_text
from solver.cli.command import main
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
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


def page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation(site):
    start = page(site, "index.html")
    pages = sorted(path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md"))
    assert len(pages) > 10
    missing = [str(name) for name in pages if f'href="{name}"' not in start]
    assert [name for name in missing if name != "index.html"] == []


def test_the_reference_shows_docstrings(site):
    assert "Find the schedule that fits the training step into" in page(
        site, "reference/solver.html"
    )
    assert "Trace one training step into" in page(site, "reference/graphs.html")
    assert 'id="scheduler_runtime.apply"' in page(site, "reference/scheduler_runtime.html")
    assert "solver.bound.cut" in page(site, "reference/methods.html")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_lists_what_every_folder_exports(site, package):
    text = page(site, f"reference/{package}.html")
    for path in (ROOT / package).glob("*/__init__.py"):
        assert f"<code>{package}.{path.parent.name}</code>" in text


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


def test_the_start_page_is_the_readme(site):
    assert "Which entry point?" in page(site, "index.html")
    assert 'href="tutorial.html"' in page(site, "index.html")


def test_the_readme_is_short_and_says_what_was_not_measured():
    assert len(README.splitlines()) <= 120
    assert "`pip install -c constraints.txt -e '.[test]' && pytest`" in README
    assert "pip install -c constraints.txt -e . && solve --budget 8GB examples/gpt2.py\n" in README
    assert README.index("Nothing has been measured on a GPU yet") < README.index("\n## ")


def test_the_results_in_the_readme_are_those_of_the_table():
    def rows(text: str) -> dict[str, list[str]]:
        lines = re.findall(r"^\| (.+) \|$", text, flags=re.MULTILINE)
        cells = [line.split(" | ") for line in lines]
        return {row[0]: row[1:] for row in cells if len(row) > 9 and row[1].isdigit()}

    short, full = rows(README), rows((DOCS / "plan_quality.md").read_text(encoding="utf-8"))
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


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path):
    """Its Python blocks in order, scaled down to take seconds."""
    text = (DOCS / "tutorial.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 3
    small = [("1024", "64"), ("16384", "2048"), ("1.2GB", "12MB"), ("10**9", "12 * 10**6")]
    small += [("11 * 10**8", "13 * 10**6"), ("12 * 10**8", "14 * 10**6")]
    for old, new in small:
        assert any(old in block for block in blocks), old
        blocks = [block.replace(old, new) for block in blocks]
    (tmp_path / "my_model.py").write_text(blocks[0])
    helper = "optimizer_of = lambda model: torch.optim.AdamW(model.parameters())\n"
    assert helper.strip() in text
    checks = (
        "assert solution.simulation.n_recomputed > 0, solution\n"
        "import pathlib; assert pathlib.Path('pareto.png').stat().st_size > 1000\n"
    )
    (tmp_path / "run.py").write_text(blocks[1] + helper + blocks[2] + checks)
    done = subprocess.run(
        [sys.executable, "run.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Memory at the peak of the step" in done.stdout


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
