"""Make the images of the README and the site: the plots, and screenshots of the `--report` page.

    PYTHONPATH=. python docs/screenshots.py [--budget 8GB] [--problem examples/gpt2.py]

Headless Chromium opens the page, once light and once dark (Debian: `apt install chromium`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
WIDTH, HEIGHT = 1000, 1500
"""Pixels of a screenshot, which shows the top of the page."""
TIME_LIMIT_S = "600"
"""Limit of the search; each point of the Pareto curve gets a twentieth of it."""
MEMORY, PARETO, HOST = "gpt2_memory.png", "gpt2_pareto.png", "gpt2_host.png"
HOST_OPTIONS = ("--budget", "5GB", "--device", "h100", "--host", "64GB")
"""Options of the plan with copies to the host; docs/offload.md has the same."""


def take_screenshot(browser: str, page: Path, image: Path, *, dark: bool) -> None:
    """Write what a browser window of WIDTH by HEIGHT pixels shows of the page."""
    with tempfile.TemporaryDirectory() as home:
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",  # as root, Chromium only starts without its sandbox
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                f"--user-data-dir={home}/profile",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--window-size={WIDTH},{HEIGHT}",
                "--virtual-time-budget=5000",
                f"--screenshot={image}",
                page.as_uri(),
            ],
            check=True,
            timeout=120,
            capture_output=True,
            env={**os.environ, "HOME": home},
        )


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from checkpoint_solver.cli import main as solve
    from tests.support.browser import find

    parser = argparse.ArgumentParser(description="Make the images of the documentation.")
    parser.add_argument("--budget", default="8GB")
    parser.add_argument("--problem", default="examples/gpt2.py")
    parser.add_argument("--out", type=Path, default=DOCS, help="a directory (default: docs)")
    given = parser.parse_args()
    browser = find()
    if browser is None:
        print("screenshots: no Chromium on PATH; Debian: apt install chromium", file=sys.stderr)
        return 1
    out = given.out.resolve()
    (out / "images").mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as directory:
        # The page shows paths as given; the link makes "examples/gpt2.py" work in this directory.
        os.chdir(directory)
        Path("examples").symlink_to(ROOT / "examples")
        outputs = ("--plot", MEMORY, "--pareto", PARETO, "--report", "report.html")
        options = ("--budget", given.budget, "--device", "cpu", "--time-limit", TIME_LIMIT_S)
        code = solve([*options, *outputs, "--quiet", given.problem])
        if code != 0:
            return int(code)
        host = (*HOST_OPTIONS, "--time-limit", TIME_LIMIT_S, "--plot", HOST)
        code = solve([*host, "--quiet", given.problem])
        if code != 0:
            return int(code)
        for name in (MEMORY, PARETO, HOST):
            shutil.copy(name, out / name)
        for dark in (False, True):
            name = "report_dark.png" if dark else "report_light.png"
            page = Path("report.html").resolve()
            take_screenshot(browser, page, out / "images" / name, dark=dark)
        os.chdir(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
