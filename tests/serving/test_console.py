"""The page at ``GET /``: its files, and what a visitor sees in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from leadline.core.client import EngineStats
from leadline.core.errors import EngineOverloaded
from leadline.engine.metrics import COUNTERS
from tests.serving.conftest import MakeRig, Rig
from tests.serving.live import Gate, serving
from tests.serving.test_chat import CALL, TOOLS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

STATIC = files("leadline.serving.console") / "static"
NAMES = sorted(file.name for file in STATIC.iterdir())


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/console/{name}"


# ---- the files


@pytest.mark.parametrize("name", NAMES)
def test_file_is_served_with_its_type_and_a_strict_policy(rig: MakeRig, name: str) -> None:
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg"}
    reply = rig("").http.get(path_of(name))
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith(kind[name.rpartition(".")[2]])
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert reply.content == (STATIC / name).read_bytes()


def test_file_that_did_not_change_is_not_sent_again(rig: MakeRig) -> None:
    http = rig("").http
    tag = http.get("/").headers["etag"]
    again = http.get("/", headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get("/", headers={"If-None-Match": '"old"'}).status_code == 200


def test_page_is_small_and_needs_nobody_else() -> None:
    assert sum(len((STATIC / name).read_bytes()) for name in NAMES) < 60_000
    for name in NAMES:
        text = (STATIC / name).read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not re.search(r"""(src|href|url|import|fetch)\W{0,3}\s*["'(]?(https?:)?//""", text)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium; nothing is downloaded."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("no chromium on the PATH (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as runner:
        chromium = runner.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield chromium
        chromium.close()


OpenPage = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser) -> Iterator[OpenPage]:
    """Open the page of a rig; it may not log errors, nor ask another server for anything."""
    problems: list[str] = []
    with ExitStack() as stack:

        def open_page(server: Rig, **context: Any) -> Page:
            url = stack.enter_context(serving(server.app))
            visitor = browser.new_context(**context)
            stack.callback(visitor.close)
            page = visitor.new_page()
            page.set_default_timeout(10_000)

            def check(request: Request) -> None:
                if not request.url.startswith(url):
                    problems.append(f"asks {request.url}")

            page.on("request", check)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on(
                "console",
                lambda message: (
                    problems.append(message.text) if "Content Security" in message.text else None
                ),
            )
            page.clock.install()  # it goes on by itself; tests may push it
            page.goto(url)
            page.locator("#model option").first.wait_for(state="attached")
            return page

        yield open_page
    assert problems == []


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def steps(server: Rig, *texts: str) -> list[tuple[int, ...]]:
    return [tuple(server.tokenizer.encode(text)) for text in texts]


def test_answer_streams_with_its_thinking_folded(rig: MakeRig, visit: OpenPage) -> None:
    server = rig("")
    server.engine.script = [
        *steps(server, "Let me see.</think>The mark is"),
        *steps(server, " **seven** fathoms.\n\n```python\nd = 7\n```"),
        (server.tokenizer.eos_token_id,),
    ]
    server.engine.gate = Gate()
    server.engine.num_cached_tokens = 5
    page = visit(server)
    send(page, "How deep?")
    page.locator(".prose", has_text="The mark is").wait_for()  # the rest waits for the gate
    assert page.locator(".usage").count() == 0
    assert page.locator(".assistant").get_attribute("aria-busy") == "true"
    server.engine.gate.open()
    page.locator(".usage").wait_for()
    answer = page.locator(".prose")
    assert answer.locator("p").inner_text() == "The mark is seven fathoms."
    assert answer.locator("strong").inner_text() == "seven"
    assert answer.locator("figure code").inner_text() == "d = 7"
    thinking = page.locator("details.thinking")
    assert thinking.get_attribute("open") is None
    thinking.locator("summary").click()
    assert thinking.locator("div").inner_text() == "Let me see."
    assert "cached 5" in page.locator(".usage").inner_text()
    assert "The mark is **seven** fathoms." in page.locator("#announcer").inner_text()


def test_second_message_carries_the_first_turn(rig: MakeRig, visit: OpenPage) -> None:
    server = rig("Hm</think>Aye.")
    page = visit(server)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Thinking").select_option("none")
    page.get_by_label("Longest answer").fill("50")
    for n, text in enumerate(("First?", "Second?"), start=1):
        send(page, text)
        page.locator(".usage").nth(n - 1).wait_for()
    request = server.engine.requests[-1]
    prompt = server.tokenizer.decode(request.prompt_token_ids)
    assert "Be brief." in prompt
    assert re.search(r"First\?.*Aye\..*Second\?<｜Assistant｜></think>$", prompt, re.S)
    assert request.sampling.max_tokens == 50
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".turn").count() == 0
    assert page.get_by_text("Take a sounding").is_visible()


def test_tool_call_is_shown_and_its_result_sent(rig: MakeRig, visit: OpenPage) -> None:
    server = rig(CALL)
    page = visit(server)
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("JSON list").fill(json.dumps(TOOLS))
    send(page, "Weather?")
    result = page.get_by_label("Result of get_weather")
    result.wait_for()
    assert page.locator(".call strong").inner_text() == "get_weather"
    assert '"city": "Oslo 2>&1"' in page.locator(".call pre").inner_text()
    server.engine.script = [*steps(server, "</think>Rain."), (server.tokenizer.eos_token_id,)]
    result.fill("it rains")
    page.get_by_role("button", name="Send result").click()
    page.locator(".prose", has_text="Rain.").wait_for()
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert "it rains" in prompt.rpartition("get_weather")[2]


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop_aborts_the_request_and_keeps_the_text(
    rig: MakeRig, visit: OpenPage, how: str
) -> None:
    server = rig("")
    server.engine.script = [*steps(server, "</think>So far"), *steps(server, " never")]
    server.engine.gate = Gate()
    page = visit(server)
    send(page, "Go")
    page.locator(".prose", has_text="So far").wait_for()
    if how == "Escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop").click()
    page.locator(".usage", has_text="stopped").wait_for()
    assert page.locator(".prose").inner_text() == "So far"
    page.wait_for_function(  # the server notices on its own time
        "async () => (await (await fetch('metrics')).text())"
        ".match(/request_success_total.*abort.* 1.0/)"
    )
    assert server.engine.aborted == [server.engine.requests[0].request_id]


def test_gauges_move_with_the_metrics(rig: MakeRig, visit: OpenPage) -> None:
    server = rig("")
    counters = dict.fromkeys(COUNTERS, 0) | {"evicted_pages": 0}
    now = EngineStats(
        num_running=2, num_pages=1000, num_free_pages=700, num_cached_pages=300, counters=counters
    )

    async def stats() -> EngineStats:
        return now

    server.engine.stats = stats  # type: ignore[method-assign]
    page = visit(server)
    page.locator("#health[data-state=up]").wait_for()
    legend = page.locator("[data-gauge=Pages]").inner_text()
    assert legend.split() == ["300", "used", "300", "cached", "400", "free"]
    moved = {"generation_tokens": 900, "prefix_cache_queries": 400, "prefix_cache_hits": 300}
    now = replace(now, num_running=7, counters=counters | moved)
    page.clock.fast_forward(2000)
    page.locator("[data-gauge=Running] .value", has_text="7").wait_for()
    assert page.locator("[data-gauge='Hit rate'] .value").inner_text() == "75 %"
    assert page.locator("[data-gauge='Tokens/s'] .value").inner_text() not in ("–", "0")
    assert page.locator("[data-gauge=Running] polyline").get_attribute("points")
    server.engine.is_dead = True
    server.engine.stats = type(server.engine).stats.__get__(server.engine)  # type: ignore[method-assign]
    page.clock.fast_forward(2000)
    page.get_by_text("The engine does not answer.").wait_for()


def test_keyboard_alone_is_enough(rig: MakeRig, visit: OpenPage) -> None:
    page = visit(rig("Deep thought</think>Aye."))
    page.keyboard.type("One")  # the message box has the focus
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    page.locator(".usage").wait_for()
    assert page.locator(".user .plain").inner_text() == "One\ntwo"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.get_by_text("Deep thought").is_visible()
    order = []
    page.locator(".skip").focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        order.append(
            page.evaluate(
                """() => {
                    const it = document.activeElement;
                    const label = it.labels?.[0]?.firstChild ?? it.labels?.[0];
                    const name = it.ariaLabel ?? (label ?? it).textContent;
                    return {
                        name: name.trim().split("\\n")[0],
                        seen: it === document.body || it.matches(":focus-visible"),
                    };
                }"""
            )
        )
    assert all(stop["name"] and stop["seen"] for stop in order)
    names = [stop["name"].split("(")[0].strip() for stop in order]
    wanted = ["Model", "New chat", "Dark theme", "Conversation", "Message", "Send", "Thinking"]
    places = [names.index(name) for name in wanted]
    assert places == sorted(places)


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_theme_follows_the_system_until_chosen(
    rig: MakeRig, visit: OpenPage, scheme: str, is_dark: bool
) -> None:
    page = visit(rig(""), color_scheme=scheme)

    def looks_dark() -> bool:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", color)[:3])) < 200

    toggle = page.get_by_role("button", name="Dark theme")
    assert (looks_dark(), toggle.get_attribute("aria-pressed")) == (is_dark, str(is_dark).lower())
    toggle.click()
    assert looks_dark() is not is_dark
    page.reload()
    assert looks_dark() is not is_dark


def test_phone_has_no_sideways_scroll_and_a_panel_of_its_own(rig: MakeRig, visit: OpenPage) -> None:
    page = visit(
        rig("</think>```\n" + "wide " * 80 + "\n```"), viewport={"width": 360, "height": 640}
    )
    send(page, "word" * 60)
    page.locator(".usage").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert not page.get_by_label("System prompt").is_visible()
    page.get_by_role("button", name="Settings and gauges").click()
    page.get_by_label("System prompt").fill("x")
    page.keyboard.press("Escape")
    assert page.get_by_label("Message", exact=True).is_visible()


def test_markup_of_a_model_stays_text(rig: MakeRig, visit: OpenPage) -> None:
    evil = "<img src=x onerror=alert(1)> [a](javascript:alert(1)) `<b>`"
    page = visit(rig(f"{evil}</think>{evil}"))
    send(page, evil)
    page.locator(".usage").wait_for()
    assert page.locator(".turns :is(img, b, script, a)").count() == 0
    assert "<img src=x onerror=alert(1)>" in page.locator(".prose").inner_text()


def test_refusal_is_shown_and_the_message_kept(rig: MakeRig, visit: OpenPage) -> None:
    server = rig("</think>Aye.")
    server.engine.refuse = EngineOverloaded("the queue is full")
    page = visit(server)
    send(page, "Hello?")
    page.locator(".error").get_by_text("the queue is full").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "Hello?"
    server.engine.refuse = None
    page.keyboard.press("Enter")
    page.locator(".prose", has_text="Aye.").wait_for()
    prompt = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids)
    assert prompt.count("Hello?") == 1


def test_key_goes_with_every_call_and_stays_in_the_tab(rig: MakeRig, visit: OpenPage) -> None:
    page = visit(rig(""))
    with page.expect_request("**/v1/models") as asked:
        page.get_by_label("API key").fill("k3y")
        page.keyboard.press("Tab")
    assert asked.value.header_value("authorization") == "Bearer k3y"
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
    page.reload()
    assert page.get_by_label("API key").input_value() == "k3y"
