"""Every text of the page can be read: its contrast with what is behind it is 4.5 or more (WCAG 2), in both themes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from drawing.browser.timelines import measured, one_f_one_b, v_shaped, wired
from rota.accounting.causes import Cause

READABLE = 4.5
FILTERS = ({}, {"batch": 2})
CAUSES = tuple({"cause": cause} for cause in range(len(Cause)))

# Records each text that is drawn, with its colour and its middle.
RECORD = """() => {
    window.texts = [];
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, x, y, ...more) {
        const width = this.measureText(text).width;
        const middle = x + { left: width / 2, center: 0, right: -width / 2 }[this.textAlign];
        window.texts.push([text, this.fillStyle, middle, y]);
        draw.call(this, text, x, y, ...more);
    };
}"""

# Idle intervals get the cause that is highlighted, or all causes in turn.
SHOW = """(changes) => {
    const page = window.rota;
    for (const { timeline } of page.sections) {
        timeline.lanes.forEach(({ idle }, rank) => idle.cause.forEach((_, i) => {
            idle.cause[i] = changes.cause ?? (i + 5 * rank) % page.causes.length;
        }));
    }
    Object.assign(page.view, { batch: null, cause: null }, changes);
    window.texts.length = 0;
    page.changed();
}"""

# Each text with its colour and the pixel that lies behind its middle.
TEXTS = """() => {
    const { width, height } = document.getElementById("top");
    const behind = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    behind.fillStyle = getComputedStyle(document.body).backgroundColor;
    behind.fillRect(0, 0, width, height);
    for (const name of ["ground", "work"]) {
        const canvas = document.getElementById(name);
        behind.drawImage(canvas, canvas.offsetLeft, 0);
    }
    const pixel = (x, y) => Array.from(behind.getImageData(Math.round(x), Math.round(y), 1, 1).data).slice(0, 3);
    return window.texts.map(([text, color, x, y]) => [text, color, pixel(x, y)]);
}"""

ON_PAGE = """() => {
    const texts = [];
    const shown = (color) => !/, 0\\)$|^transparent$/.test(color);
    const background = (element) => {
        while (element && !shown(getComputedStyle(element).backgroundColor)) element = element.parentElement;
        return getComputedStyle(element ?? document.body).backgroundColor;
    };
    document.getElementById("help").showModal();
    for (const element of document.querySelectorAll("body, body *")) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!own || !element.checkVisibility() || element.matches("script, option")) continue;
        texts.push([element.textContent.trim().slice(0, 30), getComputedStyle(element).color, background(element)]);
    }
    const input = document.getElementById("follow");
    texts.push(["placeholder", getComputedStyle(input, "::placeholder").color, background(input)]);
    document.getElementById("help").close();
    return texts;
}"""


def rgb(color: str | list[int]) -> list[int]:
    if not isinstance(color, str):
        return color
    if color.startswith("#"):
        return [int(color[1 + 2 * i : 3 + 2 * i], 16) for i in range(3)]
    return [int(part) for part in re.findall(r"\d+", color)[:3]]


def luminance(color: list[int]) -> float:
    shares = [channel / 255 for channel in color]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str | list[int], other: str | list[int]) -> float:
    (darker, lighter) = sorted(luminance(rgb(color)) for color in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("#777777", [255, 255, 255]) == pytest.approx(4.48, abs=0.01)


def poor(texts: list[list[Any]]) -> list[list[Any]]:
    return [each for each in texts if contrast(each[1], each[2]) < READABLE]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_can_be_read(open_page, dark: bool) -> None:
    seen = set()
    for timeline, views in ((measured(one_f_one_b()), (*FILTERS, *CAUSES)), (v_shaped(), FILTERS), (wired(), [{}])):
        it = open_page(timeline, dark=dark)
        it.ask(RECORD)
        for view in views:
            it.ask(SHOW, view)
            it.settle()
            texts = it.ask(TEXTS)
            assert (view, poor(texts)) == (view, [])
            seen |= {text for text, *_ in texts}
        assert poor(it.ask(ON_PAGE)) == []
    assert {"F0", "B0", "1F0", "1I0", "rank 0", "0 ms", "host a", *Cause} <= seen


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_time_at_the_pointer_can_be_read(open_page, dark: bool) -> None:
    it = open_page(one_f_one_b(), dark=dark)
    it.ask(RECORD)
    it.point(0, 50)
    paper, accent = it.ask("() => [window.rota.theme.paper, window.rota.theme.accent]")
    assert any(rgb(color) == paper for _, color, *_ in it.ask("() => window.texts"))  # it is on the accent's colour
    assert contrast(paper, accent) >= READABLE
