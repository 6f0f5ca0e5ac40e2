"""How the site is put together: the order of its pages, and what is filled into them.

A page that is put under docs/ is in the navigation by that: known ones in the order below, those
of docs/integrations under "Integrations", others under "More". Links that leave docs/ (to code, to
results) are shown as the path in the repository, which has to exist. Formulas become MathML.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("index.md", "tutorial.md")),
    (
        "How to",
        (
            "report.md",
            "options.md",
            "model_files.md",
            "hugging_face.md",
            "emit.md",
            "export.md",
            "compile.md",
            "gpu.md",
        ),
    ),
    ("Understand", ("theory.md", "same_bits.md", "limits.md")),
)
HELP = "<!-- solve --help -->"
MATHS = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+(?:\n[^$\n]+)?)\$", re.DOTALL)
MATHS_PAGES = ("theory.md",)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """The navigation, of what there is."""
    found = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    nav: list[Any] = []
    for title, pages in ORDER:
        there = [page for page in pages if page in found]
        found -= set(there)
        nav.extend([{title: there}] if title and there else there)
    for title, folder in (("Integrations", "integrations/"), ("Reference", "reference/")):
        there = sorted(page for page in found if page.startswith(folder))
        found -= set(there)
        if there:
            nav.append({title: there})
    if found:
        nav.insert(-1, {"More": sorted(found)})
    config["nav"] = nav
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in the command's help, and show links that leave the site as paths."""
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
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which is not there")
        name = str(path.relative_to(ROOT))
        return words if name in words else f"{words} (`{name}`)"

    return LINK.sub(shown, markdown)


def _mathml(match: re.Match[str]) -> str:
    """Formulas as MathML, which browsers show without a script."""
    block, inline = match.groups()
    words = " ".join((block or inline).split())
    if block:
        return str(convert(words, display="block"))
    # In a span, since Markdown takes a line that begins with <math> for a block of its own.
    return f"<span>{convert(words)}</span>"


def _help() -> str:
    sys.path.insert(0, str(ROOT))
    try:
        from solver.cli import help_text
    finally:
        sys.path.remove(str(ROOT))
    return help_text()
