"""The page of the server in headless Chromium, with the trained nano and its drafts."""

import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inkrt.builder.build import build_engine
from inkrt.builder.options import BuildOptions
from inkrt.engines import nano

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]
NANO = Path(nano.__file__).parent / "checkpoint"
QUESTION = "Which number is the largest: 417, 86, 903, 255?"
KEY = "a-key"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("page") / "nano"
    build_engine(NANO, folder, BuildOptions(max_seq_len=512, max_batch_size=2))
    command = [sys.executable, "-m", "inkrt.commands.serve", str(folder), "--port", "8791"]
    with subprocess.Popen([*command, "--api-key", KEY], stderr=subprocess.DEVNULL) as server:
        address = "http://127.0.0.1:8791"
        for _ in range(200):
            try:
                urllib.request.urlopen(f"{address}/ready")
                break
            except OSError:
                time.sleep(0.2)
        yield address
        server.terminate()


@pytest.fixture
def page(address: str) -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 780})  # a phone's
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(request.url))
        page.goto(address)
        page.locator("summary").click()
        page.locator("#key").fill(KEY)
        page.locator("#key").dispatch_event("change")
        sync_api.expect(page.locator("#model")).to_contain_text("nano · cpu · drafts: dspark")
        page.locator("#temperature").fill("0")
        page.locator("summary").click()
        yield page
        browser.close()
    assert [each for each in problems if "chat/completions" not in each] == []


def ask(page: Any, text: str) -> None:
    page.locator("#text").fill(text)
    page.locator("#text").press("Enter")


def test_an_answer_with_its_accepted_drafts(page: Any) -> None:
    ask(page, QUESTION)
    answer = page.locator("article.assistant")
    sync_api.expect(answer.locator(".content")).to_have_text("903", timeout=60_000)
    sync_api.expect(answer.locator(".reasoning")).to_contain_text("903 or 255: 903.")
    facts = answer.locator(".facts")
    sync_api.expect(facts).to_contain_text("46 + 52 tokens")
    (length,) = re.findall(r"([\d.]+) tokens a step", facts.inner_text())
    assert float(length) > 2
    shown = "".join(answer.locator(".accepted").all_inner_texts())
    assert 30 < len(shown) < len(answer.locator(".reasoning").inner_text()) + 3
    # No more than the screen is wide.
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_text_is_never_markup_and_stays_when_the_page_comes_again(page: Any) -> None:
    text = "<img src=x onerror=alert(1)> <b>bold</b>"
    ask(page, text)
    sync_api.expect(page.locator("article.user")).to_have_text(text)
    sync_api.expect(page.locator(".retry")).to_be_visible(timeout=60_000)
    assert page.locator("article.user *").count() == 0
    page.reload()
    sync_api.expect(page.locator("article.user")).to_have_text(text)
    page.locator("#clear").click()
    assert page.locator("article").count() == 0


def test_an_answer_can_be_stopped_and_asked_for_again(page: Any) -> None:
    ask(page, "Tell me a story of the sea. " * 4)
    sync_api.expect(page.locator("#stop")).to_be_visible()
    page.keyboard.press("Escape")
    sync_api.expect(page.locator(".facts")).to_contain_text("stopped")
    sync_api.expect(page.locator("#send")).to_be_visible()
    page.locator(".retry").click()
    assert page.locator("article.assistant").count() == 1
    sync_api.expect(page.locator(".retry")).to_be_visible(timeout=120_000)


def test_an_error_is_shown(page: Any) -> None:
    page.locator("summary").click()
    page.locator("#max_tokens").fill("-1")
    ask(page, "hello")
    sync_api.expect(page.locator(".error")).to_contain_text("max_tokens")
    page.locator("#key").fill("wrong")
    page.locator("#max_tokens").fill("5")
    ask(page, "hello")
    sync_api.expect(page.locator(".error").last).to_contain_text("the API key is missing or wrong")
