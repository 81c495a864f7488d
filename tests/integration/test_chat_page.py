"""The chat page in headless Chromium, which reaches nothing but the page's server.

What depends on an engine is tested on a real server; the rest on a model whose answers are written here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from cog_triton.generation import Chunk
from cog_triton.request.request import Request
from tests.browser import HOSTILE, Tab, chromium
from tests.openai_server import ANSWER, MESSAGES, OpenAIServer
from tests.scripted_model import serving
from tests.support import limit
from tests.unit.api.openai.support import Backend

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# The tests of either model's page are run by one browser.
pytestmark = pytest.mark.xdist_group("cog_server")
CALL = '{"name": "weather", "arguments": {"city": "Paris <b>"}}'
ENDLESS, OPENING = "Go", "Hello"
WRITTEN_TEXT = f"<think>Hm, <b>hm</b>.</think>\n\n{HOSTILE}\n<tool_call>{CALL}</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
BROWSER_MS = 120_000  # for one step of a browser on a busy machine
STREAMED = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class WrittenModel(Backend):
    """A model that thinks, says what is hostile to a page, and calls a tool; it answers "Go" without end.

    Attributes:
        cancelled: set when an answer without end was cancelled.
    """

    def __init__(self) -> None:
        super().__init__(template="tools <tool_call> <think></think>")
        self.context_length = 1_000_000
        self.cancelled = threading.Event()

    async def generate(
        self, request: Request, request_id: str | None = None, *tenant: Any
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append((request, request_id))
        self.tenants += tenant
        if self.tokenizer.messages[-1]["content"] == ENDLESS:
            try:
                for number in itertools.count(1):
                    yield Chunk("and so on ", number, 9)
                    await asyncio.sleep(0.002)
            finally:
                self.cancelled.set()
        for number, letter in enumerate(WRITTEN_TEXT, 1):
            yield Chunk(letter, number, 9)
        yield Chunk("", len(WRITTEN_TEXT), 9, "stop")


@dataclass(frozen=True)
class Written:
    """The server of a model whose answers are written here, in this process."""

    model: WrittenModel
    url: str


@pytest.fixture(scope="module")
def written() -> Iterator[Written]:
    model = WrittenModel()
    with serving(model, "demo") as url:
        yield Written(model, url)


@pytest.fixture
def tab(browser: Browser, openai_server: OpenAIServer) -> Iterator[Tab]:
    """The page of the demo model's server."""
    with opened(browser, openai_server) as tab:
        yield tab


@pytest.fixture
def written_tab(browser: Browser, written: Written) -> Iterator[Tab]:
    with opened(browser, written) as tab:
        yield tab


@contextmanager
def opened(browser: Browser, server: OpenAIServer | Written) -> Iterator[Tab]:
    """A tab with the page; at the end it has asked for nothing else, and nothing was wrong with it."""
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(BROWSER_MS)
    tab = Tab(context.new_page())
    try:
        tab.open(server.url)
        yield tab
        assert tab.complaints == []
        assert {url for url in tab.urls if not url.startswith((server.url, "data:"))} == set()
    finally:
        context.close()


# Answers


def test_an_answer_streams_and_is_measured(tab: Tab, server: OpenAIServer) -> None:
    tab.ask()
    assert tab.bodies == [{"messages": MESSAGES, **STREAMED}]  # what is not set is not sent
    tab.page.get_by_role("button", name="New chat").click()
    tab.set(Temperature=0)
    tab.ask()
    assert tab.text().startswith(ANSWER)
    ttft, rate, tokens, reason = tab.facts()[:4]
    assert ttft.startswith("TTFT ")
    assert rate.endswith(" tokens/s")
    usage = server.chat(temperature=0).json()["usage"]
    assert tokens == f"{usage['prompt_tokens']} tokens in, {usage['completion_tokens']} tokens out"
    assert reason == "stop"
    assert tab.page.locator("#facts").inner_text() == "context of 2,048 tokens"


def test_every_setting_is_sent(tab: Tab) -> None:
    names = {"Temperature": 0.5, "Top_p": 0.9, "Top_k": 40, "Max_tokens": 7, "Seed": 3}
    names |= {"Repetition_penalty": 1.1, "Presence_penalty": 0.2, "Frequency_penalty": -0.2}
    more = {"System_prompt": "Be brief.", "Additional_fields": {"min_p": 0.1}}
    tab.set(**names, **more, Stop_sequences="END\n\\n\\n\n")
    tab.ask()
    (body,) = tab.bodies
    assert body.pop("messages")[0] == {"role": "system", "content": "Be brief."}
    sent = {name.lower(): value for name, value in names.items()}
    assert body == {**STREAMED, **sent, "stop": ["END", "\n\n"], "min_p": 0.1}
    assert "7 tokens out" in tab.facts()[2]


def test_a_conversation_grows_is_asked_again_and_cleared(tab: Tab) -> None:
    tab.set(Temperature=0, Max_tokens=3)
    tab.ask("Hello")
    first = {"role": "assistant", "content": tab.text()}
    tab.ask("Thanks")
    history = [{"role": "user", "content": "Hello"}, first, {"role": "user", "content": "Thanks"}]
    assert tab.bodies[1]["messages"] == history
    tab.page.get_by_role("button", name="Regenerate").click()
    tab.ended()
    assert tab.bodies[2] == tab.bodies[1]
    assert tab.page.locator("article").count() == 2
    tab.page.get_by_role("button", name="New chat").click()
    assert tab.page.locator("article").count() == 0
    tab.ask("Hello")
    assert tab.bodies[3] == tab.bodies[0]


@pytest.mark.rare
def test_the_keys(tab: Tab) -> None:
    prompt = tab.page.get_by_label("Message")
    for key in ("Enter", "a", "Shift+Enter", "b", "Enter"):  # at first there is nothing to send
        prompt.press(key)
    tab.ended()
    assert [body["messages"][0]["content"] for body in tab.bodies] == ["a\nb"]
    assert prompt.input_value() == ""


def test_a_stop_ends_the_request(written_tab: Tab, written: Written) -> None:
    tab = written_tab
    stop = tab.page.get_by_role("button", name="Stop")
    ways: list[Callable[[], None]] = [stop.click, lambda: tab.page.keyboard.press("Escape")]
    for end in ways:
        written.model.cancelled.clear()
        tab.send(ENDLESS)
        # Some of it has come, and it goes on.
        tab.page.locator("article").last.locator(".text > *").first.wait_for()
        end()
        tab.ended()
        assert tab.facts()[1] == "stopped"
        assert tab.text()
        assert written.model.cancelled.wait(limit(60))
        assert stop.is_hidden()


def test_thoughts_are_folded_and_calls_are_shown(written_tab: Tab) -> None:
    tab = written_tab
    tab.set(Additional_fields={"tools": TOOLS})
    tab.ask(OPENING)
    thoughts = tab.page.locator("article details")
    assert thoughts.inner_text().startswith("Thought for ")
    assert thoughts.get_attribute("open") is None
    thoughts.locator("summary").click()
    assert thoughts.locator("div").inner_text() == "Hm, <b>hm</b>."
    assert tab.facts()[3] == "tool_calls"
    call = tab.page.locator(".call")
    assert call.locator("figcaption").inner_text().startswith("call to weather")
    assert json.loads(call.locator("code").inner_text()) == {"city": "Paris <b>"}
    # What is written next is the call's result.
    assert tab.page.get_by_placeholder("Result of weather").is_visible()
    tab.ask("21 degrees")
    *_, answer, result = tab.bodies[1]["messages"]
    (made,) = answer["tool_calls"]
    assert made["function"]["name"] == "weather"
    assert result == {"role": "tool", "tool_call_id": made["id"], "content": "21 degrees"}


# The schema box


def test_an_answer_to_a_schema(tab: Tab) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tab.set(Temperature=0, JSON_schema=schema)
    tab.ask()
    jsonschema.validate(json.loads(tab.page.locator("article code").inner_text()), schema)
    form = {"name": "answer", "schema": schema, "strict": True}
    assert tab.bodies[0]["response_format"] == {"type": "json_schema", "json_schema": form}


def test_a_schema_that_is_no_json_is_told_at_once(tab: Tab) -> None:
    problem = tab.page.locator("#schema-problem")
    for text in ('{"type": "object",', "[1]", "null"):
        tab.set(JSON_schema=text)
        assert problem.inner_text().startswith("Not JSON: ")
        tab.send()
        assert tab.page.locator("#schema").evaluate("box => box === document.activeElement")
    assert tab.bodies == []
    tab.set(JSON_schema="")
    assert problem.is_hidden()


# Errors


@pytest.mark.rare
def test_an_error_is_shown_and_leaves_the_conversation(tab: Tab, server: OpenAIServer) -> None:
    tab.set(Additional_fields={"logit_bias": {"<b>": 1}})
    tab.ask("Hello")
    error = tab.page.get_by_role("alert").filter(has_text="logit_bias.<b>: ")
    assert error.locator("small").inner_text().startswith("400 · invalid_request_error · ")
    assert error.locator("small").inner_text().endswith("param: logit_bias.<b>")
    assert error.locator("b").count() == 0
    (name,) = tab.page.locator("article .id").all_inner_texts()
    assert f"{name} /v1/chat/completions 400 " in server.log.read_text()
    tab.set(Additional_fields="")
    tab.ask()
    assert tab.bodies[1]["messages"] == MESSAGES


@pytest.mark.rare
def test_behind_a_path_of_a_proxy(tab: Tab, server: OpenAIServer) -> None:
    deep = f"{server.url}/deep/"
    tab.page.route(f"{deep}**", lambda at: at.continue_(url=at.request.url.replace("/deep/", "/")))
    tab.urls.clear()
    tab.goto(deep)
    tab.ask()
    assert all(url.startswith((deep, "data:")) for url in tab.urls)
    assert tab.text()


def test_a_key_is_asked_for_and_stays_in_the_tab(tab: Tab) -> None:
    error = {"message": "no such key", "type": "invalid_request_error", "code": "invalid_api_key"}

    def check(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer sk-1":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": error})

    tab.page.route("**/v1/**", check)
    tab.page.get_by_role("button", name="Close the settings").click()
    tab.page.reload()
    tab.page.get_by_role("alert").filter(has_text="no such key").wait_for()
    tab.set(API_key="sk-1")
    tab.page.get_by_label("API key").blur()
    tab.page.get_by_role("heading", name="Ask demo").wait_for()
    tab.ask()
    assert tab.text()
    reload(tab)
    assert tab.page.get_by_label("API key").input_value() == "sk-1"
    assert tab.page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    assert tab.page.context.cookies() == []


def test_an_error_in_mid_stream_and_a_server_that_is_gone(tab: Tab) -> None:
    begun = {"choices": [{"index": 0, "delta": {"content": "So far"}}]}
    failed = {"error": {"message": "It broke", "type": "server_error", "code": "E2100"}}
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in (begun, failed))
    answer = {"content_type": "text/event-stream", "body": body}
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    tab.ask()
    error = tab.page.locator("article .error")
    assert error.inner_text().startswith("It broke")
    assert "server_error" in error.locator("small").inner_text()
    assert tab.text() == "So far"
    tab.page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    tab.ask()
    assert "cannot be reached" in error.last.inner_text()


# What a page must not do


def test_what_a_model_says_is_never_html(written_tab: Tab) -> None:
    tab = written_tab
    tab.set(System_prompt=HOSTILE)
    tab.ask(HOSTILE)
    tab.ask(OPENING)
    assert tab.page.evaluate("window.hit") is None
    assert "<img src=x onerror=" in tab.text()
    made = set(tab.page.locator("#log *").evaluate_all("all => all.map((node) => node.localName)"))
    assert not {"img", "script", "svg", "iframe", "b", "i"} & made
    links = tab.page.locator("#log a").evaluate_all("all => all.map((link) => link.href)")
    assert links
    assert all(link.startswith("https://example.org/") for link in links)
    handlers = "all => all.some((n) => [...n.attributes].some((a) => a.name.startsWith('on')))"
    assert not tab.page.locator("#log *").evaluate_all(handlers)


def test_the_browser_refuses_what_a_page_must_not_do(
    browser: Browser, server: OpenAIServer
) -> None:
    with browser.new_page() as page:
        page.goto(server.url)
        page.evaluate(
            """() => {
                window.refused = [];
                document.onsecuritypolicyviolation = (event) => refused.push(event.effectiveDirective);
                try { document.body.innerHTML = "<b>" } catch { }
                document.body.setAttribute("style", "color: red");
                new Image().src = "/v1/models";
                fetch("http://127.0.0.1:1/").catch(() => { });
            }"""
        )
        page.wait_for_function("refused.length >= 4")
        assert set(page.evaluate("refused")) == {
            *("require-trusted-types-for", "style-src-attr", "img-src", "connect-src")
        }


# What the browser keeps


def shown(tab: Tab) -> list[str]:
    """The texts of the turns, and what is said below the answers."""
    return [*tab.page.locator("#log > *").all_inner_texts(), *tab.facts()]


def reload(tab: Tab) -> None:
    tab.page.reload()
    tab.ended()


def test_a_reload_keeps_the_chat_and_the_settings(tab: Tab) -> None:
    tab.set(Temperature=0, Max_tokens=3, System_prompt="Be brief.")
    tab.ask("Hello")
    tab.ask("Thanks")
    before = shown(tab)
    reload(tab)
    assert shown(tab) == before
    assert tab.page.get_by_role("button", name="Regenerate").count() == 1
    tab.page.get_by_role("button", name="Regenerate").click()
    tab.ended()
    assert tab.bodies[2] == tab.bodies[1]  # the system prompt and the parameters among it
    tab.ask("More")
    roles = [message["role"] for message in tab.bodies[3]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    tab.page.get_by_role("button", name="New chat").click()
    assert tab.page.evaluate("sessionStorage.getItem('chat')") is None
    tab.page.reload()
    tab.page.get_by_role("heading", name="Ask demo").wait_for()
    assert tab.page.locator("article").count() == 0
    assert tab.page.get_by_label("System prompt").input_value() == "Be brief."
    assert tab.page.evaluate("localStorage.length") == 0


@pytest.mark.rare
def test_a_reload_keeps_thoughts_calls_and_their_results(written_tab: Tab) -> None:
    tab = written_tab
    tab.set(Additional_fields={"tools": TOOLS})
    tab.ask(OPENING)
    before = shown(tab)
    reload(tab)
    assert shown(tab) == before
    assert tab.page.locator("article details summary").inner_text().startswith("Thought for ")
    assert tab.page.locator(".call figcaption").inner_text().startswith("call to weather")
    assert tab.page.get_by_placeholder("Result of weather").is_visible()
    tab.ask("21 degrees")
    *_, answer, result = tab.bodies[1]["messages"]
    assert result["tool_call_id"] == answer["tool_calls"][0]["id"]
    reload(tab)
    assert "21 degrees" in tab.page.locator(".tool").inner_text()


@pytest.mark.rare
def test_a_reload_keeps_what_came_of_an_answer(written_tab: Tab) -> None:
    tab = written_tab
    tab.send(ENDLESS)
    tab.page.locator("article .text > *").first.wait_for()
    reload(tab)
    assert tab.facts()[1] == "interrupted"
    assert tab.text()
    assert tab.page.get_by_role("button", name="Stop").is_hidden()


@pytest.mark.rare
def test_a_chat_that_has_no_room_is_said_to_have_none(tab: Tab) -> None:
    tab.set(Temperature=0, Max_tokens=3)
    full = "() => { Storage.prototype.setItem = () => { throw new DOMException('full'); }; }"
    tab.page.evaluate(full)
    tab.ask("Hello")
    note = tab.page.get_by_role("alert").filter(has_text="too long for the browser")
    assert note.is_visible()
    assert tab.text()
    tab.page.get_by_role("button", name="New chat").click()
    assert note.is_hidden()


# The reference at /docs


@pytest.mark.rare
def test_the_reference_works_without_a_network(browser: Browser, server: OpenAIServer) -> None:
    with browser.new_page() as page:
        page.set_default_timeout(BROWSER_MS)
        tab = Tab(page)
        tab.watch()
        page.goto(f"{server.url}/docs")
        page.locator("#operations-default-models_v1_models_get").get_by_role("button").first.click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        shown = page.locator(".live-responses-table .highlight-code").first
        shown.wait_for()
        assert '"owned_by": "cog-triton"' in shown.inner_text()
        assert all(url.startswith((server.url, "data:")) for url in tab.urls)
        assert tab.complaints == []


# How it looks


@pytest.mark.rare
def test_the_demo_model_is_said_to_be_a_toy(tab: Tab) -> None:
    note = tab.page.get_by_text("This is the demo model, a toy")
    assert note.is_visible()
    cards = {"data": [{"id": "real", "max_model_len": 9}]}
    tab.page.route("**/v1/models", lambda route: route.fulfill(json=cards))
    tab.page.reload()
    tab.page.get_by_role("heading", name="Ask real").wait_for()
    assert note.is_hidden()


FORMULA = r"$$\int_0^1 x^2\,dx$$ and $\frac{a}{b}$ and $\href{javascript:window.hit=1}{x}$"


@pytest.mark.rare
def test_formulas_are_shown_under_the_policy_of_the_page(tab: Tab) -> None:
    show = "text => showMarkdown($('log').appendChild(element('div', {id: 'here'})), text)"
    tab.page.evaluate(show, FORMULA)
    assert tab.page.locator("#here math").count() >= 2
    assert tab.page.locator("#here math mfrac").count() == 1
    assert tab.page.locator("#here a").count() == 0


DESKTOP = {"viewport": {"width": 1200, "height": 800}}
PHONE = {"viewport": {"width": 320, "height": 640}, "has_touch": True, "is_mobile": True}
LONG_NAME = "meta-llama/Llama-3.1-8B-Instruct"
# Links in a text are as large as its lines; a thing that is not shown has no size.
SMALL = """() => [...document.querySelectorAll("button, select, input, textarea, summary")]
    .map((node) => [node.id || node.textContent, node.getBoundingClientRect()])
    .filter(([, box]) => box.width && (box.width < 44 || box.height < 44)).map(([name]) => name)"""


@contextmanager
def looked_at(browser: Browser, server: OpenAIServer | Written, **look: Any) -> Iterator[Tab]:
    """A tab on a screen of another kind."""
    context = browser.new_context(**look)
    context.set_default_timeout(BROWSER_MS)
    tab = Tab(context.new_page())
    try:
        tab.open(server.url)
        yield tab
        assert tab.complaints == []
    finally:
        context.close()


def states(tab: Tab) -> Iterator[str]:
    """Bring the page into its states, one after the other."""
    yield "nothing asked"
    tab.ask(OPENING)
    yield "an answer with thoughts, code and a call"
    tab.page.locator("article details summary").click()
    yield "thoughts that are open"
    if tab.page.locator("#settings").is_hidden():
        tab.page.get_by_role("button", name="Settings").click()
    tab.set(JSON_schema="{")
    yield "settings with a mistake"


@pytest.mark.rare
@pytest.mark.parametrize(
    ("screen", "scheme"),
    [
        pytest.param(DESKTOP, "light", id="desktop, light"),
        pytest.param(DESKTOP, "dark", id="desktop, dark"),
        pytest.param(PHONE, "light", id="phone, light"),
        pytest.param(PHONE, "dark", id="phone, dark"),
    ],
)
def test_axe_finds_nothing(browser: Browser, written: Written, screen: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with looked_at(browser, written, color_scheme=scheme, **screen) as tab:
        for state in states(tab):
            found = axe.run(tab.page).response
            assert len(found["passes"]) > 10  # it has looked
            assert [(state, fault["id"], fault["nodes"]) for fault in found["violations"]] == []


@pytest.mark.rare
def test_a_finger_meets_every_control(browser: Browser, written: Written) -> None:
    with looked_at(browser, written, **PHONE) as tab:
        for state in states(tab):
            assert tab.page.evaluate(SMALL) == [], state
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= 320, state


@pytest.mark.rare
def test_the_models_name_is_legible_on_a_small_phone(browser: Browser, written: Written) -> None:
    with looked_at(browser, written, **PHONE) as tab:
        cards = {"data": [{"id": LONG_NAME, "max_model_len": 9}]}
        tab.page.route("**/v1/models", lambda route: route.fulfill(json=cards))
        tab.page.reload()
        tab.page.get_by_role("heading", name=f"Ask {LONG_NAME}").wait_for()
        box = tab.page.get_by_label("Model", exact=True).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
        width = """select => {
            const context = document.createElement("canvas").getContext("2d");
            context.font = getComputedStyle(select).font;
            return context.measureText(select.value).width;
        }"""
        needed = tab.page.get_by_label("Model", exact=True).evaluate(width)
        assert needed + 30 <= box["width"]  # with the arrow


@pytest.mark.rare
def test_copies(tab: Tab) -> None:
    tab.set(Temperature=0, Max_tokens=4, System_prompt="It's")
    tab.ask()
    copied, commands = tab.page.get_by_label("System prompt"), []
    for old in (False, True):  # without the clipboard, as a browser is over plain HTTP
        if old:
            tab.page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        for button, text in (("Copy", tab.text()), ("curl", r"It'\''s")):
            tab.page.locator("article footer").get_by_text(button, exact=True).click()
            tab.page.get_by_text("Copied").wait_for()
            copied.fill("")
            copied.press("Control+v")
            assert text in copied.input_value()
            commands.append(copied.input_value())
            tab.page.get_by_text("Copied").wait_for(state="detached")
    run = subprocess.run(["bash", "-c", commands[-1]], capture_output=True, text=True)
    assert run.stdout.endswith("data: [DONE]\n\n"), run.stderr
