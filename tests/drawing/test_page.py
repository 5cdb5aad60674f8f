"""The page as a file: small, whole, and sure of itself. The tests in browser/ look at what a browser makes of it."""

import base64
import hashlib
import random
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

import rota
from drawing.test_text import SHAPES, timeline
from rota.drawing import html, save, to_html


def stretched(planned: rota.Timeline) -> rota.Timeline:
    """As if measured: every op takes about a tenth more or less, every transfer a little more."""
    chooser, plan = random.Random(1), planned.plan
    durations = [round(us * chooser.lognormvariate(0.03, 0.1)) for us in plan.graph.durations_us]
    times = replace(plan.graph, durations_us=durations).earliest()
    sent, arrived = [], []
    for route in plan.placement.routes:
        nodes = range(plan.first_node[route.source], plan.first_node[route.source + 1])
        sent.append(tuple(times.ends_us[node] + chooser.randint(0, 5) for node in nodes))
        arrived.append(tuple(start + route.duration_us + chooser.randint(0, 9) for start in sent[-1]))
    columns = [
        tuple(tuple(of[node] for node in nodes) for nodes in plan.nodes) for of in (times.starts_us, times.ends_us)
    ]
    return rota.Timeline(plan, columns[0], columns[1], tuple(sent), tuple(arrived))


@pytest.mark.parametrize("above", [False, True])
def test_idle_time_has_the_causes_that_explain_gives(above: bool) -> None:
    """Of a measured timeline, also time that ops upstream ran longer than planned."""
    placement = rota.place(rota.Costs.uniform(3, 100, 200), rota.Cluster.uniform(3))
    planned = rota.simulate(rota.schedules.one_f_one_b(placement, 6))
    measured = stretched(planned)
    with patch.object(html, "pack_timeline", wraps=html.pack_timeline) as packed:
        to_html(measured, above=planned if above else None)
    _, idles, _ = packed.call_args.args
    assert idles == rota.explain(measured).idles
    assert any(one.cause is rota.Cause.SLOWER for one in idles)


@pytest.mark.sweep
def test_65536_ops_as_planned_and_as_measured_are_less_than_a_megabyte() -> None:
    costs = rota.Costs.uniform(64, 1000, 2000, activation_bytes=10**9, boundary_bytes=64_000)
    placement = rota.place(costs, rota.Cluster.uniform(64, 80 * 10**9, latency_us=3, bytes_per_us=10_000))
    planned = rota.simulate(rota.schedules.one_f_one_b(placement, 512))
    page = to_html(stretched(planned), above=planned)
    assert len(page.encode()) < 1_000_000


@pytest.mark.parametrize("shape", SHAPES)
def test_the_policy_names_the_script_and_the_style_and_nothing_else(shape: str) -> None:
    page = to_html(SHAPES[shape]())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    hashes = [
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'" for text in (style, script)
    ]
    nothing = "'none'"
    assert rules == {
        "default-src": nothing,
        "style-src": hashes[0],
        "script-src": hashes[1],
        "base-uri": nothing,
        "form-action": nothing,
    }
    assert not re.search(r"(src|href)=", page.replace(script, ""))
    assert "http" not in page.replace("http-equiv", "")


def test_names_cannot_end_a_script() -> None:
    hostile = "</script><script>alert(1)</script>"
    page = to_html(timeline(), above=timeline(), title=hostile, names=(hostile, hostile))
    assert page.count("</script>") == 3
    assert "<script>alert" not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page


def test_a_page_is_the_same_each_time() -> None:
    assert to_html(timeline()) == to_html(timeline())


def test_save_writes_a_page(tmp_path: Path) -> None:
    save(timeline(), tmp_path / "x.html", title="µs")
    assert (tmp_path / "x.html").read_text(encoding="utf-8") == to_html(timeline(), title="µs")
