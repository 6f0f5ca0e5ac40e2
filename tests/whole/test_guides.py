"""The templates in docs/guides run: each page's modules are importable and its tests pass."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

GUIDES = sorted(path for path in (ROOT / "docs" / "guides").glob("*.md") if path.stem != "index")
BLOCK = re.compile(r"```python\n# (\S+\.py)\n(.*?)```", flags=re.DOTALL)


def test_there_is_a_guide_for_every_kind_of_extension():
    assert [path.stem.removeprefix("new_") for path in GUIDES] == [
        "emit_system",
        "integration",
        "method",
        "operator_cost",
        "refusal",
    ]


@pytest.mark.slow(sample=1)
@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_the_template_runs(guide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = guide.read_text(encoding="utf-8")
    assert "## What reviewers check" in text
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") == 2
    (module_path, module), (test_path, test) = blocks
    assert not (ROOT / module_path).exists(), f"{module_path} exists: the template needs a new name"
    package = importlib.import_module(".".join(Path(module_path).parent.parts))
    assert importlib.import_module(".".join(Path(test_path).parent.parts))

    # Import the template as if the file were in its package; monkeypatch removes it afterwards.
    stem = Path(module_path).stem
    name = f"{package.__name__}.{stem}"
    (tmp_path / f"{stem}.py").write_text(module)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.setattr(package, stem, None, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]
    importlib.import_module(name)

    (tmp_path / "template_test.py").write_text(test)
    names = runpy.run_path(str(tmp_path / "template_test.py"))
    tests = [function for name, function in names.items() if name.startswith("test_")]
    assert tests
    for function in tests:
        function()
