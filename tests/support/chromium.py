"""A real browser: Debian's Chromium. tests/conftest.py has its fixture."""

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@pytest.fixture(scope="session")
def chromium():
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium, as `make test` does where it may")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install --group dev")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()
