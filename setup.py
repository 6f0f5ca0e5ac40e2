"""Sets the long description: the README with absolute links, since package indexes show it without
the repository. Everything else is in pyproject.toml.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)")


def absolute(readme: str, repository: str) -> str:
    """The README with relative links and images turned into URLs of the hosted repository."""

    def at_host(link: re.Match[str]) -> str:
        kind = "raw" if link.group(1) else "blob"
        return f"{link.group(1)}{link.group(2)}({repository}/{kind}/main/{link.group(3)})"

    return LINK.sub(at_host, readme)


def long_description() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return absolute(readme, project["urls"]["Repository"])


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown")
