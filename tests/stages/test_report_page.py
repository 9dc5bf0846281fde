"""The report page in a real browser: what is on it, what a click does, and that nothing is fetched."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest

from shardwright.stages.report.facts import facts_of
from shardwright.stages.report.page import page_of
from tests.browser import BrowserError, find_browser, opened
from tests.report_sources import deep_sources, measured_of, piped_sources

LAYERS = 96
MOST_BYTES = 5_000_000
pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium: `apt-get install chromium`")


@pytest.fixture(scope="module")
def browser():
    with ExitStack() as stack:
        try:
            page = stack.enter_context(opened())
        except BrowserError as error:
            pytest.skip(f"Chromium does not start here: {error}")
        yield page


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """96 layers, with recompute, after training; one parameter has a name that is markup."""
    sources = deep_sources(LAYERS)
    path = tmp_path_factory.mktemp("page") / "deep.html"
    notes = ("<img src=x onerror=document.title='broken'>",)
    path.write_text(page_of(facts_of(replace(sources, report=measured_of(sources.plan), notes=notes))))
    return path


@pytest.fixture
def page(browser, deep):
    browser.problems.clear()
    browser.requests.clear()
    browser.prefer("light")
    browser.open(deep)
    browser.ask("localStorage.clear()")
    browser.open(deep)
    yield browser
    assert browser.problems == []
    assert {url.split("#")[0] for url in browser.requests if not url.startswith("data:")} == {deep.as_uri()}


def count(page, selector: str) -> int:
    return page.ask(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(page, selector: str) -> str:
    return page.ask(f"document.querySelector({json.dumps(selector)}).innerText")


@pytest.mark.long
def test_a_deep_plan_is_a_small_page(page, deep):
    """How soon it is interactive, benchmarks/report_page.py tells."""
    assert deep.stat().st_size < MOST_BYTES
    assert f"{LAYERS} layers" in text(page, "#title")


def test_every_section_is_drawn(page):
    names = ["model", "time", "memory", "recompute", "schedule", "frontier", "measured"]
    assert page.ask("[...document.querySelectorAll('section')].map((one) => one.id)") == names
    for name in names[2:]:
        assert count(page, f"#{name} svg") >= 1, name
    assert count(page, "#time .bar") > 3
    assert count(page, "#frontier circle.chosen") == 1 and count(page, "#frontier circle.baseline") == 2
    assert count(page, "#peak") == 1 and count(page, "#budget") == 1
    assert count(page, "#compared tr") == 3
    assert "recompute" in text(page, "#recompute .legend")
    assert count(page, "#recompute .chart:first-of-type rect.hover") > 0


def test_markup_in_a_name_is_text(page):
    assert "<img src=x" in text(page, "#notes")
    assert count(page, "#notes img") == 0 and "broken" not in page.ask("document.title")


def test_equal_blocks_are_folded_and_unfold(page):
    folded = count(page, "details.link")
    assert folded < 20
    page.click(".fold .unfold")
    assert count(page, "details.link") > 2 * (LAYERS - 2)
    page.click(".fold .unfold")
    assert count(page, "details.link") == folded


def test_a_link_opens_to_its_ops_and_layouts(page):
    assert count(page, ".links tr") == 0
    page.click(".fold details.link summary")
    page.frame()
    assert count(page, ".links tr") > 5 and count(page, ".links .state.on") > 0
    assert "layers.0." in text(page, ".links")


def test_a_module_is_found(page):
    page.type("#search", "layers.70.attention.query.weight")
    page.frame()
    assert text(page, "#found") == "1 links"
    shown = page.ask("[...document.querySelectorAll('details.link')].filter((one) => one.offsetParent).length")
    assert shown == 1
    assert "layers.70" in page.ask(
        "[...document.querySelectorAll('details.link')].find((one) => one.offsetParent).innerText"
    )
    page.ask(
        "(() => { const s = document.getElementById('search'); s.value = ''; s.dispatchEvent(new Event('input')); })()"
    )
    assert text(page, "#found") == ""
    assert page.ask("[...document.querySelectorAll('details.link')].every((one) => one.offsetParent)")


def test_the_pointer_shows_what_is_under_it(page):
    x, y = page.at("#peak")
    page.mouse("mouseMoved", x, y)
    assert "holds" in text(page, "#tip") and not page.ask("document.getElementById('tip').hidden")
    page.mouse("mouseMoved", 2, 2)
    assert page.ask("document.getElementById('tip').hidden")


def test_the_wheel_zooms_and_a_double_click_shows_all_again(page):
    def shown() -> list[float]:
        return [float(number) for number in page.ask("document.querySelector('#memory svg').dataset.shown").split()]

    whole = shown()
    x, y = page.at("#memory svg")
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    page.frame()
    low, high = shown()
    assert whole[0] < low < high < whole[1]
    page.mouse("mousePressed", x, y, button="left", clickCount=1)
    page.mouse("mouseMoved", x + 80, y, button="left", buttons=1)
    page.mouse("mouseReleased", x + 80, y, button="left", clickCount=1)
    page.frame()
    assert shown()[0] < low and shown()[1] - shown()[0] == pytest.approx(high - low)
    page.ask("document.querySelector('#memory svg').dispatchEvent(new MouseEvent('dblclick'))")
    page.frame()
    assert shown() == whole


def paper(page) -> int:
    """Brightness of the page's ground."""
    return page.ask("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
                    ".reduce((a, b) => a + b)")  # fmt: skip


def test_light_and_dark_follow_the_system_and_the_switch(page):
    assert paper(page) > 600
    page.prefer("dark")
    assert paper(page) < 200
    page.click("#theme")
    assert text(page, "#theme") == "theme: light" and paper(page) > 600
    page.click("#theme")
    page.prefer("light")
    assert text(page, "#theme") == "theme: dark" and paper(page) < 200


def test_a_pipeline_is_a_gantt_chart(browser, tmp_path):
    sources = piped_sources()
    path = tmp_path / "piped.html"
    path.write_text(page_of(facts_of(sources)))
    browser.problems.clear()
    browser.open(path)
    assert count(browser, "#schedule rect.hover") == len(sources.plan.timeline.events)
    assert count(browser, "#blocks h3") == len(sources.plan.partitions)
    assert count(browser, "#memory .stack") == len(sources.plan.partitions)
    assert "Not trained yet" in text(browser, "#measured")
    assert browser.problems == []


def test_a_page_of_the_plan_alone_says_what_is_missing(browser, tmp_path):
    sources = replace(piped_sources(), graph=None, profile=None, cluster=None, frontier=None)
    path = tmp_path / "bare.html"
    path.write_text(page_of(facts_of(sources)))
    browser.problems.clear()
    browser.open(path)
    assert "graph.json is not there" in text(browser, "#model")
    assert browser.problems == []
