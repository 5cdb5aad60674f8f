"""Hostile names, the policy, and what eyes and windows there are."""

import pytest

from drawing.browser.timelines import one_f_one_b


@pytest.mark.parametrize(
    "name", ["</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>", "{data}{script}"]
)
def test_hostile_names_are_but_text(open_page, name):
    timeline = one_f_one_b()
    page = open_page(timeline, title=name, above=timeline, names=(name, name)).page
    assert page.locator("h1").inner_text() == name
    assert page.title() == name
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("img, b:not(.cause b)").count() == 0
    assert page.evaluate("() => window.rota.sections[1].title") == name


def test_the_policy_lets_nothing_in(open_page):
    it = open_page(one_f_one_b())
    blocked = it.ask(
        """async () => {
            const blocked = [];
            addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
            const image = document.createElement("img");
            image.src = "http://127.0.0.1:9/x.png";
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(image, script);
            await fetch("http://127.0.0.1:9/").catch(() => {});
            await new Promise((done) => setTimeout(done, 0));
            return blocked.sort();
        }"""
    )
    assert blocked == ["connect-src", "img-src", "script-src-elem"]
    assert it.ask("() => window.hacked") is None
    assert all("Content Security Policy" in text or "Fetch API" in text for text in it.complaints)
    it.complaints.clear()
    assert it.requests.pop() == "http://127.0.0.1:9/x.png"  # asked for, and refused


def test_dark_and_light(open_page):
    timeline = one_f_one_b()
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = open_page(timeline), open_page(timeline, dark=True)
    colors = light.ask(ground), dark.ask(ground)
    assert colors[0] != colors[1]
    light.page.keyboard.press("d")
    assert light.ask(ground) == colors[1]
    assert light.drawn(1)[3::4] == dark.drawn(1)[3::4]
