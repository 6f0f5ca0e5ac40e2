"""Open pages in headless Chromium, if it is installed, for the tests of the HTML report."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LOOK = """
const frame = document.getElementById("frame");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const root = page.documentElement;
  const rgb = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (item) => {
    for (let at = item; at; at = at.parentElement) {
      const c = rgb(view.getComputedStyle(at).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const contrast = (item) => {
    const style = view.getComputedStyle(item);
    const ink = light(rgb(item.closest("svg") ? style.fill : style.color));
    const under = light(ground(item));
    return (Math.max(ink, under) + 0.05) / (Math.min(ink, under) + 0.05);
  };
  const items = [...page.querySelectorAll("h1, h2, p, dt, dd, th, td, pre, svg text")]
    .filter((item) => item.getClientRects().length);
  const found = {
    width: root.scrollWidth,
    window: root.clientWidth,
    tables: [...page.querySelectorAll(".box")].map((box) => [box.clientWidth, box.scrollWidth]),
    heights: [...page.querySelectorAll(".box")].map((box) => [box.clientHeight, box.scrollHeight]),
    least_font: Math.min(...[...page.querySelectorAll("svg")].filter((svg) => svg.clientWidth)
      .flatMap((svg) => [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim())
        .map((t) => svg.clientWidth / svg.viewBox.baseVal.width
          * parseFloat(view.getComputedStyle(t).fontSize)))),
    cut: [...page.querySelectorAll("svg")].filter((svg) => svg.clientWidth).flatMap((svg) => {
      const box = svg.getBoundingClientRect();
      return [...svg.querySelectorAll("text")].filter((t) => {
        const own = t.getBoundingClientRect();
        return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1
          || own.bottom > box.bottom + 1;
      }).map((t) => t.textContent);
    }),
    svgs: [...page.querySelectorAll("svg")].map((svg) => svg.getBoundingClientRect().height),
    n_items: items.length,
    contrast: Math.min(...items.filter((i) => i.textContent.trim()).map(contrast)),
    ground: ground(page.body),
    n_loaded: view.performance.getEntriesByType("resource").length,
    n_scripts: page.scripts.length,
    title: page.title,
    text: page.body.innerText,
  };
  document.getElementById("found").textContent = JSON.stringify(found);
};
"""


def find() -> str | None:
    """The path of the browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


def path_or_skip() -> str:
    """The path of the browser; without one the calling test is skipped."""
    path = find()
    if path is not None:
        return path
    pytest.skip(f"needs a browser: none of {', '.join(NAMES)} is on PATH (apt install chromium)")


def look(browser: str, page: str, directory: Path, *, width: int, dark: bool) -> dict[str, Any]:
    """Open a page in a frame of this width and return what a reader would see; see LOOK.

    page: the page's HTML.
    directory: for temporary files.

    A frame is needed because a window cannot be as narrow as a phone. The page is its `srcdoc`,
    since scripts cannot look into a frame that shows a file.
    """
    harness = directory / f"harness-{width}-{'dark' if dark else 'light'}.html"
    harness.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre>'
        f'<iframe id="frame" style="width:{width}px;height:800px;border:0"></iframe>'
        f"<script>{LOOK}\nframe.srcdoc = {json.dumps(page).replace('</', '<' + chr(92) + '/')};"
        "</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",  # as root, Chromium only starts without its sandbox
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={directory / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            harness.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={**os.environ, "HOME": str(directory)},
    )
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return json.loads(html.unescape(found.group(1)))
