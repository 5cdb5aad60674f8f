"""Pages of timelines, opened in a real browser from disk."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rota.drawing import to_html

SIZE = {"width": 1280, "height": 720}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.dist)  # a browser is several processes


@dataclass
class Opened:
    """A page with all that it asked for and complained of."""

    page: object
    file: Path
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def ask(self, script, argument=None):
        return self.page.evaluate(script, argument)

    def settle(self):
        """Until what was asked for is drawn."""
        self.ask("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def place(self, rank, time_us, section=0):
        """Where a time of a rank's lane is on the screen."""
        return self.ask(
            """([section, rank, time]) => {
                const { layout, view, stage } = window.rota;
                const box = stage.getBoundingClientRect();
                const x = 76 + ((time - view.t0) / (view.t1 - view.t0)) * layout.plot;
                const y = 26 + layout.tops[section] + rank * layout.row - view.scroll + layout.lane * 0.5;
                return [box.left + x, box.top + y];
            }""",
            [section, rank, time_us],
        )

    def point(self, rank, time_us, section=0):
        """What the tip says there, line by line."""
        self.page.mouse.move(*self.place(rank, time_us, section))
        self.settle()
        tip = self.page.locator("#tip")
        return tip.inner_text().splitlines() if tip.is_visible() else []

    def drawn(self, rank, section=0):
        """The lane's pixels in the middle of its height, as the canvas holds them: red, green, blue, alpha, red, …"""
        return self.ask(
            """([section, rank]) => {
                const { layout, view } = window.rota;
                const work = document.getElementById("work");
                const y = 26 + layout.tops[section] + rank * layout.row - view.scroll + layout.lane / 2;
                const copy = new OffscreenCanvas(work.width, 1).getContext("2d", { willReadFrequently: true });
                copy.drawImage(work, 0, -Math.round(y * layout.ratio));
                return Array.from(copy.getImageData(0, 0, work.width, 1).data);
            }""",
            [section, rank],
        )

    def view(self):
        return self.ask("() => [window.rota.view.t0, window.rota.view.t1]")


@pytest.fixture
def open_page(chromium, tmp_path):
    """Opens the page of a timeline; in the end none may have complained or asked for anything but itself."""
    opened, contexts = [], []

    def open_it(timeline, fragment="", dark=False, scale=1, **asked):
        context = chromium.new_context(
            viewport=SIZE, color_scheme="dark" if dark else "light", device_scale_factor=scale
        )
        contexts.append(context)
        file = tmp_path / f"page {len(opened)}.html"
        file.write_text(to_html(timeline, **asked), encoding="utf-8")
        it = Opened(context.new_page(), file)
        opened.append(it)
        it.page.on("request", lambda request: it.requests.append(request.url))
        it.page.on("console", lambda message: it.complaints.append(message.text))
        it.page.on("pageerror", lambda error: it.complaints.append(str(error)))
        it.page.goto(file.as_uri() + fragment)
        it.page.wait_for_function("() => window.rota !== undefined")
        it.settle()
        return it

    yield open_it
    for it in opened:
        assert it.complaints == []
        assert {url.partition("#")[0] for url in it.requests} == {it.file.as_uri()}
    for context in contexts:
        context.close()
