"""Chromium without a screen: how long until the first picture, and how long each frame takes while zooming."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from playwright.sync_api import sync_playwright

NUM_FRAMES = 300
_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_WAIT_MS = 300_000  # some tools need minutes

# A frame is the time from one animation frame to the next, with one turn of the wheel in each: 100 frames inwards
# about a place, 100 out, 100 inwards elsewhere.
_ZOOM = """([selector, count]) => new Promise((done) => {
    const find = (root) => root.querySelector(selector) ?? [...root.querySelectorAll("*")]
        .filter((element) => element.shadowRoot).map((element) => find(element.shadowRoot)).find(Boolean);
    const target = find(document);
    const box = target.getBoundingClientRect();
    const times = [];
    const turn = (now) => {
        times.push(now);
        if (times.length > count) return done(times.slice(1).map((time, i) => time - times[i]));
        const third = Math.floor((3 * times.length) / count);
        const at = { clientX: box.left + box.width * (third < 2 ? 0.4 : 0.7), clientY: box.top + box.height / 2 };
        const deltaY = third === 1 ? 25 : -25;
        const event = { deltaY, bubbles: true, cancelable: true, composed: true, ...at };
        target.dispatchEvent(new WheelEvent("wheel", event));
        requestAnimationFrame(turn);
    };
    requestAnimationFrame(turn);
})"""


class Watch(NamedTuple):
    """`drawn`: a script that tells when the first picture was there, in ms, or null; `wheel`: what takes its turns."""

    drawn: str
    wheel: str


OURS = Watch("() => performance.getEntriesByName('rota-first-picture')[0]?.startTime ?? null", "#stage")


class Seen(NamedTuple):
    """`cpu_ms`: of the page's main thread, for each frame."""

    first_ms: float
    frames_ms: list[float]
    cpu_ms: float


class Browser:
    def __enter__(self) -> Browser:
        self._playwright = sync_playwright().start()
        self._chromium = self._playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_FLAGS)
        self._new_page().close()  # the first page of a browser is slow
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._chromium.close()
        self._playwright.stop()

    def look(self, file: Path, watch: Watch = OURS) -> Seen:
        page = self._new_page()
        page.goto(file.as_uri(), wait_until="commit", timeout=_WAIT_MS)
        first = page.wait_for_function(watch.drawn, timeout=_WAIT_MS).json_value()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def busy_s() -> float:
            metrics = session.send("Performance.getMetrics")["metrics"]
            return next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")

        before_s = busy_s()
        frames = page.evaluate(_ZOOM, [watch.wheel, NUM_FRAMES])
        cpu_ms = 1000 * (busy_s() - before_s) / NUM_FRAMES
        page.close()
        return Seen(first, frames, cpu_ms)

    def _new_page(self):
        page = self._chromium.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(_WAIT_MS)
        return page
