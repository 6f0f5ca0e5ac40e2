"""What an index shows and a shell completes: metadata, long description, completion scripts."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from checkpoint_solver.cli import parser
from tests.support.paths import INSTALLED, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


def test_metadata_and_citation_agree():
    cited = dict(re.findall(r"^(version|license|repository-code): (\S+)", CITATION, re.MULTILINE))
    project = PROJECT["project"]
    repository = project["urls"]["Repository"]
    assert cited == {
        "version": project["version"],
        "license": project["license"],
        "repository-code": repository,
    }
    assert all(url.startswith(repository) for url in project["urls"].values())
    assert f"name: {project['authors'][0]['name']}\n" in CITATION


def test_links_of_the_long_description_are_absolute_and_lead_to_files():
    repository = PROJECT["project"]["urls"]["Repository"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", SETUP["long_description"]())
    assert len(links) > 20
    for is_image, link in links:
        if link.startswith(f"{repository}/"):
            kind, branch, path = link.removeprefix(f"{repository}/").split("/", 2)
            assert (kind, branch) == ("raw" if is_image else "blob", "main")
            assert (ROOT / path.partition("#")[0]).exists(), path
        else:
            assert link.startswith("https://"), link


def test_links_that_are_absolute_stay():
    text = "[a](https://a.org/b) [c](#d) ![e](f.png) [`g`](h/i.md#j)"
    assert SETUP["absolute"](text, "https://r") == (
        "[a](https://a.org/b) [c](#d) ![e](https://r/raw/main/f.png) "
        "[`g`](https://r/blob/main/h/i.md#j)"
    )


def test_every_package_is_installed_with_its_types():
    tools = PROJECT["tool"]["setuptools"]
    assert tools["packages"]["find"]["include"] == [f"{name}*" for name in INSTALLED]
    assert all("py.typed" in tools["package-data"][name] for name in INSTALLED)
    assert all((ROOT / name / "py.typed").exists() for name in INSTALLED)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_the_command(shell):
    shtab = pytest.importorskip("shtab", reason="shtab is not installed")
    script = shtab.complete(parser(), shell=shell)
    assert {"budget", "torchtitan", "verify"} <= set(re.findall(r"\w+", script))
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


COMPLETED = """
eval "$script"
COMP_WORDS=({words} "")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_solve "" "" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize("words", ["solve", "solve explain", "solve explain plan.json"])
def test_bash_completes_names_of_files(tmp_path, words):
    shtab = pytest.importorskip("shtab", reason="shtab is not installed")
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not installed, and only it can run what it completes by")
    (tmp_path / "plan.json").touch()
    script = shtab.complete(parser(), shell="bash")
    done = subprocess.run(
        [bash, "-c", COMPLETED.format(words=words)],
        env={**os.environ, "script": script},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "plan.json" in done.stdout.split()


def test_fish_completes_options_and_choices(tmp_path):
    shtab = pytest.importorskip("shtab", reason="shtab is not installed")
    if (fish := shutil.which("fish")) is None:
        pytest.skip("fish is not installed, and only it can run what it completes by")
    path = tmp_path / "solve.fish"
    path.write_text(shtab.complete(parser(), shell="fish"))

    def completed(line: str) -> set[str]:
        program = f"source {path}; complete -C '{line}'"
        done = subprocess.run(
            [fish, "--no-config", "-c", program], capture_output=True, text=True, check=True
        )
        return {each.split("\t")[0] for each in done.stdout.splitlines()}

    assert "--budget" in completed("solve --b")
    assert "torchtitan" in completed("solve --emit tor")


def test_files_are_completed_by_the_names_that_shtab_knows():
    shtab = pytest.importorskip("shtab", reason="shtab is not installed")
    files = [action for action in parser()._actions if hasattr(action, "complete")]
    assert {action.dest for action in files} >= {"problem", "output", "report"}
    assert all(action.complete == shtab.FILE for action in files)


MODEL_FILE = """
import torch

def get_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), Mean())

def get_batch():
    return torch.randn(4, 8)

class Mean(torch.nn.Module):
    def forward(self, x):
        return x.mean()
"""


@pytest.mark.slow
def test_a_wheel_runs_without_the_repository(tmp_path):
    source, away = tmp_path / "source", tmp_path / "away"
    away.mkdir()
    for name in INSTALLED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    pip = ("pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path))
    _run(*pip, str(source), cwd=tmp_path)
    shutil.rmtree(source)
    (wheel,) = tmp_path.glob("checkpoint_solver-*.whl")
    version = _run("checkpoint_solver", "--version", cwd=away, path=wheel)
    assert version == f"solve {PROJECT['project']['version']}\n"
    (away / "small.py").write_text(MODEL_FILE)
    options = ("--budget", "1MB", "--report", "page.html", "small.py")
    assert "Answer  optimal" in _run("checkpoint_solver", *options, cwd=away, path=wheel)
    assert "<html" in (away / "page.html").read_text(encoding="utf-8")


def _run(module: str, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    """What `python -m module` prints. path: the only one that Python gets, a wheel."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)  # wheels without compiled code can be imported from
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
