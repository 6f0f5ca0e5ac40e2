"""The notebooks run from top to bottom, and are stored without output."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
N_IMAGES = {"methods": 7, "offload": 1, "pareto": 1, "quickstart": 1, "rewrites": 1}
STARTUP = "profile_default/startup/time_limits.py"
TIME_LIMITS = """
from tests.support.time_limits import deadline, extended

deadline.Deadline.after = extended
del deadline, extended
"""


def test_every_notebook_is_listed():
    assert [path.stem for path in NOTEBOOKS] == list(N_IMAGES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_output(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert all(set(cell.metadata) == set() for cell in notebook.cells)


@pytest.fixture
def run_notebook(tmp_path, monkeypatch):
    """Runs a notebook and returns its outputs."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this checkout, not an installed copy
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    (tmp_path / STARTUP).parent.mkdir(parents=True)
    (tmp_path / STARTUP).write_text(TIME_LIMITS)

    def run(notebook):
        place = {"metadata": {"path": str(ROOT / "notebooks")}}
        NotebookClient(notebook, timeout=None, resources=place).execute()
        return [out for cell in notebook.cells for out in cell.get("outputs", ())]

    return run


@pytest.mark.slow(keep=5)  # all
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, run_notebook):
    outputs = run_notebook(nbformat.read(path, as_version=4))
    assert sum("image/png" in out.get("data", ()) for out in outputs) == N_IMAGES[path.stem]
    warned = [out.text for out in outputs if out.get("name") == "stderr"]
    assert warned == []
    assert "no plan for" not in str(outputs)


@pytest.mark.slow
def test_a_method_without_a_plan_has_a_row_among_the_methods(run_notebook):
    (path,) = (path for path in NOTEBOOKS if path.stem == "methods")
    notebook = nbformat.read(path, as_version=4)
    (choice,) = (cell for cell in notebook.cells if "for name in (" in cell.source)
    choice.source = choice.source.replace('for name in ("sqrt"', 'for name in ("none", "sqrt"')
    outputs = run_notebook(notebook)
    text = "".join(out.text for out in outputs if out.get("name") == "stdout")
    lines = text.partition("planned in\n")[2].splitlines()
    assert len(lines) == 6
    assert [line.split()[0] for line in lines if "no plan for" in line] == ["none"]
