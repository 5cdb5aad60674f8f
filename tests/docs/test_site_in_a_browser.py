"""The site in a real browser: no page is wider than the window, and none asks for anything elsewhere."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.sweep]  # a browser is several processes, and the pages are many

HEIGHT = 900
WIDER_THAN_THE_WINDOW = """() => {
    const width = document.documentElement.clientWidth;
    const scrolls = (element) => {
        for (let above = element.parentElement; above !== document.body; above = above.parentElement) {
            if (["auto", "scroll"].includes(getComputedStyle(above).overflowX)) return true;
        }
        return false;
    };
    const found = [...document.querySelectorAll("main *")].filter((element) => {
        const box = element.getBoundingClientRect();
        const isShown = box.width > 0 && box.height > 0 && getComputedStyle(element).visibility === "visible";
        return isShown && box.right > width + 1 && !scrolls(element);
    });
    if (document.documentElement.scrollWidth > width) found.push(document.documentElement);
    return found.map((element) => `${element.tagName} ${element.textContent.trim().slice(0, 60)}`);
}"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, and where it is served."""
    pytest.importorskip("mkdocs", reason="needs MkDocs: pip install --group site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        Thread(target=server.serve_forever).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def look(chromium):
    """Opens windows of a width."""
    contexts = []

    def new_page(width):
        contexts.append(chromium.new_context(viewport={"width": width, "height": HEIGHT}))
        return contexts[-1].new_page()

    yield new_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize("width", [800, 1400])
def test_no_page_is_wider_than_the_window(site, look, width):
    folder, address = site
    page, asked = look(width), []
    page.on("request", lambda request: asked.append(request.url))
    wide = {}
    files = sorted(Path(folder).rglob("*.html"))
    assert len(files) > 45
    for file in files:
        page.goto(f"{address}{file.relative_to(folder)}")
        for mode, scheme in {"light": "default", "dark": "slate"}.items():
            page.evaluate("(scheme) => { document.body.dataset.mdColorScheme = scheme; }", scheme)  # as the button does
            if found := page.evaluate(WIDER_THAN_THE_WINDOW):
                wide[f"{file.relative_to(folder)}, {mode}"] = found
    assert wide == {}
    assert [url for url in asked if not url.startswith((address, "data:"))] == []


@pytest.mark.parametrize(
    ("inside", "is_wide"),
    [
        ("<p style='width: 1200px'>wide</p>", True),
        ("<div style='overflow: hidden'><p style='width: 1200px'>cut off</p></div>", True),
        ("<div style='overflow: auto'><p style='width: 1200px'>scrolls by itself</p></div>", False),
        ("<p>narrow</p>", False),
    ],
)
def test_what_is_wider_is_found(look, inside, is_wide):
    page = look(800)
    page.set_content(f"<main>{inside}</main>")
    assert bool(page.evaluate(WIDER_THAN_THE_WINDOW)) == is_wide
