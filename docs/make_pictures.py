"""Writes the pictures of README.md and docs/explain.md: `make pictures`. Needs Chromium.

The site shows NAME.dark.png instead of NAME.png in its dark theme.

python docs/make_pictures.py [FOLDER]      FOLDER: what `rota demo` wrote; without it the demo is run
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, sync_playwright

from rota import Cluster, Costs, Timeline, place, simulate, wave
from rota.cli import main as rota
from rota.drawing import save
from rota.schedules import NAMED

PICTURES = Path(__file__).parent / "pictures"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("the pictures need Chromium: apt-get install chromium")
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder)
        demo = Path(sys.argv[1]) if sys.argv[1:] else path
        if demo is path:
            rota(["demo", "--steps", "30", "-o", folder])
        planned, measured = demo / "plan.json", demo / "measured.json"
        rota(["compare", str(planned), str(measured), "-o", str(path / "both.html")])
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, dark in (("page.png", False), ("page.dark.png", True)):
            shoot(browser, path / "both.html", name, point=(0.145, 0.57), dark=dark)
        save(v_shaped(), path / "v.html", title="ZB-V on 4 ranks")
        shoot(browser, path / "v.html", "page_follow.png", keys="]]]]]", point=(0.62, 0.3))
        save(large(), path / "large.html", title="1F1B, 64 ranks × 512 micro-batches: 65,536 ops")
        shoot(browser, path / "large.html", "page_large.png")
        shoot(browser, path / "v.html", "page_dark.png", keys="ct", dark=True, fragment="#t=4000-40000")
        browser.close()
    save(v_shaped(), PICTURES / "figure.png", title="ZB-V on 4 ranks")


def shoot(
    browser: Browser,
    file: Path,
    name: str,
    keys: str = "",
    point: tuple[float, float] | None = None,
    dark: bool = False,
    fragment: str = "",
) -> None:
    """A screenshot of a page, after some keys, with the pointer at a place told in parts of the window."""
    theme = "dark" if dark else "light"
    page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme=theme, device_scale_factor=1.5)
    page.goto(file.as_uri() + fragment)
    page.wait_for_function("() => window.rota !== undefined")
    for key in keys:
        page.keyboard.press(key)
    if point:
        page.mouse.move(1280 * point[0], 720 * point[1])
    page.wait_for_timeout(300)
    page.screenshot(path=PICTURES / name)
    page.close()


def v_shaped() -> Timeline:
    """Two stages per rank, split backwards, transfers, memory with its limit, and an end of the step."""
    memory = {"activation_bytes": 2 * 10**9, "boundary_bytes": 3 * 10**6}
    costs = Costs.uniform(8, 1000, 1000, 900, reduce_us=800, optimizer_us=400, **memory)
    cluster = Cluster.uniform(4, 24 * 10**9, latency_us=20, bytes_per_us=100_000)
    return simulate(NAMED["zb_v"](wave(costs, cluster), 12))


def large() -> Timeline:
    costs = Costs.uniform(64, 1000, 2000, activation_bytes=10**9, boundary_bytes=64_000)
    cluster = Cluster.uniform(64, 80 * 10**9, latency_us=3, bytes_per_us=10_000)
    return simulate(NAMED["1f1b"](place(costs, cluster), 512))


if __name__ == "__main__":
    main()
