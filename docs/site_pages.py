"""Hooks that build the documentation site: the order of its pages, and their generated parts.

Every page under docs/ gets into the navigation: those in NAVIGATION in its order, all others under
"More". Comments in a page are replaced by sections of the README, by the help of the command, or by
docstrings. Links that leave docs/ (to code, to results) become the path in the repository, which
must exist. Formulas become MathML.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
NAVIGATION = (
    ("", "index install tutorial faq"),
    ("Integrations", "integrations/"),
    (
        "How to",
        (
            "report options model_files graph_files running_a_plan derivatives hugging_face emit "
            "export compile passes pipeline tensor_parallel gpu"
        ),
    ),
    (
        "Understand",
        "bytes methods offload copies plan_quality theory bitwise_identical limits architecture",
    ),
    ("Guides", "guides/"),
    ("Reference", "reference/"),
)
"""Titles in the navigation, each with its pages or a folder of pages."""
SECTION = re.compile(r"<!-- section of README.md: (.+) -->")
HELP = "<!-- solve --help -->"
FACES = re.compile(r"<!-- faces of (\w+) -->")
DOCSTRINGS = re.compile(r"<!-- docstrings of ([\w/ ]+) -->")
MATHS = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+(?:\n[^$\n]+)?)\$", re.DOTALL)
MATHS_PAGES = ("theory.md",)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Set the navigation, with all pages that exist."""
    found = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    nav: list[Any] = []
    for title, pages in NAVIGATION:
        if pages.endswith("/"):
            there = sorted(page for page in found if page.startswith(pages))
            there.sort(key=lambda page: not page.endswith("/index.md"))
        else:
            there = [f"{page}.md" for page in pages.split() if f"{page}.md" in found]
        found -= set(there)
        nav.extend([{title: there}] if title and there else there)
    if found:
        nav.insert(-1, {"More": sorted(found)})
    config["nav"] = nav
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in the generated parts of a page, and turn links that leave the site into paths.

    Raises FileNotFoundError if such a link leads nowhere.
    """
    markdown = SECTION.sub(lambda match: _section(match.group(1)), markdown)
    markdown = FACES.sub(lambda match: "\n".join(_faces(match.group(1))), markdown)
    markdown = DOCSTRINGS.sub(lambda match: _docstrings(match.group(1).split()), markdown)
    if HELP in markdown:
        markdown = markdown.replace(HELP, f"```text\n{_help()}\n```")
    if page.file.src_uri in MATHS_PAGES:
        markdown = MATHS.sub(_mathml, markdown)
    here = (DOCS / page.file.src_uri).parent

    def shown(match: re.Match[str]) -> str:
        words, target = match.group(1), match.group(2)
        path = (here / target).resolve()
        if path.is_relative_to(DOCS):
            return match.group(0)
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which does not exist")
        name = str(path.relative_to(ROOT))
        return words if name in words else f"{words} (`{name}`)"

    return LINK.sub(shown, markdown)


def _section(title: str) -> str:
    """The text under a title of the README, with links relative to docs/.

    Raises ValueError if there is no such title.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {title}\n")
    if not rest:
        raise ValueError(f"README.md has no section {title!r}")
    text = re.sub(r"\]\((?!https?:|docs/|#)", "](../", rest.partition("\n## ")[0])
    return text.replace("](docs/", "](").strip()


def _faces(package: str) -> Iterator[str]:
    """List the folders of a package: the first line of each docstring, and the exported names."""
    for path in sorted((ROOT / package).rglob("*/__init__.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        about = (ast.get_docstring(tree) or "").partition("\n")[0]
        yield f"- **`{'.'.join(path.parent.relative_to(ROOT).parts)}`**: {about}"
        imports = [line for line in tree.body if isinstance(line, ast.ImportFrom)]
        if names := sorted(alias.name for line in imports for alias in line.names):
            yield f"  <br>{', '.join(f'`{name}`' for name in names)}"


def _docstrings(folders: list[str]) -> str:
    """Markdown that shows the module docstrings in these folders that have several paragraphs."""
    parts = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("[!_]*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            if "\n\n" in text:
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                parts.append(f"::: {name}\n    options: {{members: []}}")
    return "\n\n".join(parts)


def _mathml(match: re.Match[str]) -> str:
    """A formula as MathML, which browsers show without a script."""
    block, inline = match.groups()
    words = " ".join((block or inline).split())
    if block:
        return str(convert(words, display="block"))
    # In a span, since Markdown takes a line that begins with <math> for a separate block.
    return f"<span>{convert(words)}</span>"


def _help() -> str:
    sys.path.insert(0, str(ROOT))
    try:
        from checkpoint_solver.cli.arguments import help_text
    finally:
        sys.path.remove(str(ROOT))
    return help_text()
