"""The page in a real browser: skipped where there is none."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import LIMIT_S, Running, running, wait_until, words

from browsers import browser, complaints
from documents import examples
from outrider.api import load
from outrider.measure.arms import Arm, Case
from outrider.race.events import race_events
from outrider.race.page import recorded_page
from pairs import broken_model, embedded, word_tokenizer

pytestmark = pytest.mark.slow
# All that a lane shows, in text and colour, and what the server sent for it.
SHOWN = """
const style = (one) => { const {color, textDecorationLine, textDecorationStyle} = getComputedStyle(one);
  return [color, textDecorationLine, textDecorationStyle].join(" "); };
return [...document.querySelectorAll(".lane")].map((lane) => ({
  name: lane.querySelector("h2").textContent,
  prompt: lane.querySelector(".prompt").textContent,
  tokens: [...lane.querySelectorAll(".token")].map((one) => [one.dataset.origin, one.textContent, style(one)]),
  ghosts: [...lane.querySelectorAll(".ghost")].map((one) => [one.textContent, style(one)]),
  facts: Object.fromEntries([...lane.querySelectorAll("dt")].map((dt) => [dt.textContent, dt.nextSibling.textContent])),
}));
"""
_KEEP_EVENTS = """
window.received = "";
const original = window.fetch;
window.fetch = async (...all) => { const answer = await original(...all);
  if (String(all[0]) === "v1/race") answer.clone().text().then((text) => { window.received = text; });
  return answer; };
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser(is_still=True) as one:
        yield one


@pytest.fixture(scope="module")
def server(driver: Any) -> Iterator[Running]:
    with running(embedded(), context_len=512) as one:
        yield one


def fill(driver: Any, **values: object) -> None:
    for name, value in values.items():
        field = driver.find_element("id", name.replace("_", "-"))
        if field.tag_name == "select":
            field.find_element("css selector", f"option[value='{value}']").click()
        else:
            field.clear()
            field.send_keys(str(value))


def raced(driver: Any, server: Running, **values: object) -> list[dict[str, Any]]:
    """Run a race from the page to its end, and give the events that the page had."""
    driver.get(server.url)
    driver.execute_script(_KEEP_EVENTS)
    start = driver.find_element("id", "start")
    wait_until(start.is_enabled)
    fill(driver, speed="Infinity", **values)
    start.click()
    # Seldom asked, since the race needs the processor.
    wait_until(lambda: is_over(driver) and driver.execute_script("return window.received"), pause_s=0.5)
    blocks = driver.execute_script("return window.received").split("\n\n")
    return [json.loads(block.removeprefix("data: ")) for block in blocks if block.startswith("data: {")]


def is_over(driver: Any) -> bool:
    return "over" in driver.find_element("id", "verdict").get_attribute("class")


def check_lanes(driver: Any, events: list[dict[str, Any]]) -> None:
    """Each lane shows its events: texts, a colour and an underline for each origin, and the counts."""
    start, *rounds, end = events
    for which, (lane, arm) in enumerate(zip(driver.execute_script(SHOWN), start["arms"], strict=True)):
        own = [event for event in rounds if event["arm"] == which]
        tokens = [(token["origin"], token["text"] or "▫") for event in own for token in event["tokens"]]
        assert [(origin, text) for origin, text, _ in lane["tokens"]] == tokens
        assert (lane["name"], lane["prompt"]) == (arm["name"], start["prompt"])
        stats, facts = end["arms"][which]["stats"], lane["facts"]
        assert facts["Rounds"] == str(len(own))
        if arm["draft"] is None:
            assert {style for _, _, style in lane["tokens"]} == {lane["tokens"][0][2]}
            assert "none" in lane["tokens"][0][2]
            continue
        rejected = [
            one["text"].replace("\n", "↵") or "▫"
            for event in own
            if event["tokens"][-1]["origin"] == "correction"
            for one in event["drafted"][len(event["tokens"]) - 1 :]
        ]
        assert [text for text, _ in lane["ghosts"]] == rejected and rejected
        assert all("line-through" in style for _, style in lane["ghosts"])
        looks = {(origin, *style.split(" underline ")) for origin, _, style in lane["tokens"]}
        lines = {"accepted": "solid", "correction": "double", "bonus": "dotted"}
        assert {origin: line for origin, _, line in looks} == lines
        assert len(looks) == len({colour for _, colour, _ in looks}) == 3
        counts = [sum(origin == one for one, _ in tokens) for origin in lines]
        assert [int(number) for number in re.findall(r"\d+", facts["Tokens"])] == counts
        num_drafted = [stats["num_draft_tokens"], stats["num_accepted_draft_tokens"]]
        assert [*map(int, re.findall(r"\d+", facts["Drafted"])[:2])] == num_drafted
        assert facts["τ measured"] == f"{stats['mean_acceptance_length']:.2f}"


@pytest.mark.parametrize(
    ("acceptance", "seed", "k", "said"),
    [
        ("block", 5, 4, "Different samples, same distribution"),
        ("gumbel", 6, 7, "Both texts are the same, token for token: under gumbel the seed 6 determines the text"),
    ],
)
def test_a_race_to_its_end_and_again(
    driver: Any, server: Running, acceptance: str, seed: int, k: int, said: str
) -> None:
    events = raced(driver, server, acceptance=acceptance, seed=seed, k=k, max_tokens=60)
    start = events[0]
    assert (start["acceptance"], start["seed"], start["max_new_tokens"]) == (acceptance, seed, 60)
    check_lanes(driver, events)
    plain, speculative = ["".join(text for _, text, _ in lane["tokens"]) for lane in driver.execute_script(SHOWN)]
    assert (plain == speculative) == (acceptance == "gumbel") and said in driver.find_element("id", "verdict").text
    assert "times as fast as plain in this race" in driver.find_element("id", "verdict").text
    pause = driver.find_element("id", "pause")
    # In one script, so that no time passes between the two.
    driver.execute_script("document.getElementById('again').click(); document.getElementById('pause').click()")
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert not is_over(driver) and pause.text == "Continue"
    assert [lane["tokens"] for lane in driver.execute_script(SHOWN)] == [[], []]
    pause.click()
    wait_until(lambda: is_over(driver))
    check_lanes(driver, events)
    # All rounds were shown at once, and each lane has its place in the order of Tab.
    stops = "return [...document.querySelectorAll('.lane')].map((lane) => lane.querySelector('.token').tabIndex)"
    assert driver.execute_script(stops) == [0, 0] and complaints(driver) == []


def test_the_policy_is_kept(driver: Any, server: Running) -> None:
    """The browser refuses markup from a string, and styles that are not the server's. (The control of the check of the
    console, too.)"""
    driver.get(server.url)
    markup = "try { document.body.innerHTML = '<p>'; return '' } catch (error) { return error.name }"
    assert driver.execute_script(markup) == "TypeError"
    driver.execute_script("const s = document.createElement('style'); s.textContent = 'p {}'; document.head.append(s)")
    wait_until(lambda: any("Content Security Policy" in one for one in complaints(driver)))


def test_tokens_tell_of_themselves(driver: Any, server: Running) -> None:
    """With the keyboard, and at the pointer; Escape takes it away."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    events = raced(driver, server, acceptance="rejection", seed=5, max_tokens=40)
    driver.find_element("id", "keep").click()
    drafted = [one for event in events[1:-1] if event["arm"] == 1 for one in event["drafted"]]
    lane = driver.find_element("css selector", ".lane:not(.plain)")
    tip = driver.find_element("id", "tip")
    assert not tip.is_displayed()
    driver.execute_script("arguments[0].querySelector('[tabindex=\"0\"]').focus()", lane)
    for _ in range(4):
        focused = driver.switch_to.active_element
        assert focused.get_attribute("aria-describedby") == "tip" and tip.is_displayed()
        origin, classes = focused.get_attribute("data-origin"), focused.get_attribute("class")
        if origin == "accepted" or "ghost" in classes:
            one = drafted.pop(0)
            assert one["text"].strip() in tip.text
            p, q, least = (float(dd.text) for dd in tip.find_elements("tag name", "dd"))
            assert (p, q) == (pytest.approx(one["p"], rel=0.1, abs=5e-4), pytest.approx(one["q"], rel=0.1, abs=5e-4))
            assert least == pytest.approx(min(1, one["p"] / one["q"]), rel=0.1, abs=5e-4)
        else:
            assert origin in tip.text or "drawn from p" in tip.text
        ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()
    (stop,) = lane.find_elements("css selector", "[tabindex='0']")
    assert stop.get_attribute("class") == "token"  # also while a rejected draft is in focus
    ActionChains(driver).send_keys(Keys.ESCAPE).perform()
    assert not tip.is_displayed()
    ActionChains(driver).move_to_element(lane.find_element("css selector", ".token")).perform()
    assert tip.is_displayed()
    assert complaints(driver) == []


def test_a_race_that_fails_says_so(driver: Any, tmp_path: Path) -> None:
    """A model that gives NaN, after a race that was paused."""
    word_tokenizer().save_pretrained(broken_model(tmp_path))
    with running(load(tmp_path, device="cpu")) as server:
        raced(driver, server, prompt="w1 w2", max_tokens=2, drafter="ngram")
        driver.execute_script("document.getElementById('again').click(); document.getElementById('pause').click()")
        fill(driver, prompt="w3 w7", max_tokens=9)
        driver.find_element("id", "start").click()
        wait_until(lambda: "NaN" in driver.find_element("id", "error").text)
        pause = driver.find_element("id", "pause")
        assert driver.find_element("id", "verdict").text == "The race was interrupted."
        assert pause.text == "Pause" and not pause.is_enabled()


def test_a_key_is_asked_for(driver: Any) -> None:
    """And kept nowhere. A full queue is told."""
    options = {"context_len": 1_000_000, "num_slots": 1, "max_queue": 0, "api_keys": ("secret",)}
    with running(words(1_000_000), **options) as server, server.http() as http:
        driver.get(server.url)
        key, start, error = (driver.find_element("id", name) for name in ("key", "start", "error"))
        wait_until(key.is_displayed)
        key.send_keys("secret")
        fill(driver, prompt="w1 w2")
        wait_until(start.is_enabled)
        fill(driver, speed="Infinity", max_tokens=5, drafter="ngram")
        body = {"prompt": "w1", "max_tokens": 900_000, "stream": True}
        headers = {"authorization": "Bearer secret"}
        with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            next(response.iter_lines())
            start.click()
            wait_until(lambda: error.text != "")
            assert error.text == "the queue is full (running or waiting: 1): try again in about 1 s"
        wait_until(lambda: server.num_open == 0)
        start.click()
        wait_until(lambda: is_over(driver))
        kept = "return [localStorage.length, sessionStorage.length, document.cookie]"
        assert driver.execute_script(kept) == [0, 0, ""]
        assert all("401" in one or "503" in one for one in complaints(driver))


def found_by_axe(driver: Any) -> list[str]:
    """Faults that axe-core (by Deque) finds in the page."""
    axe = pytest.importorskip("axe_core_python", reason="axe is not installed: pip install axe-core-python")
    driver.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    driver.set_script_timeout(LIMIT_S)
    run = "const done = arguments[0]; axe.run().then(done, (error) => done({error: String(error)}))"
    found = driver.execute_async_script(run)
    assert len(found["passes"]) > 20
    return [f"{one['id']}: {one['help']}: {node['html']}" for one in found["violations"] for node in one["nodes"]]


@pytest.mark.parametrize("is_dark", [False, True])
def test_everyone_can_use_the_page(server: Running, tmp_path: Path, is_dark: bool) -> None:
    """At the beginning, at the end with a token in focus and rejected drafts kept, and with tables, in a narrow window:
    there nothing but tables scrolls sideways."""
    with browser(is_dark=is_dark) as driver:
        driver.get(server.url)
        assert found_by_axe(driver) == []
        raced(driver, server, seed=5, max_tokens=30)
        driver.find_element("id", "keep").click()
        driver.execute_script("document.querySelector('.lane:not(.plain) .ghost').focus()")
        assert driver.find_element("id", "tip").is_displayed()
        assert found_by_axe(driver) == []
    with browser(is_dark=is_dark, is_still=True, width=390) as driver:
        path = recorded(tmp_path / "race.html", {"max_new_tokens": 30}, examples()["compare"][0])
        driver.get(path.as_uri())
        fill(driver, speed="Infinity")
        wait_until(lambda: is_over(driver))
        assert found_by_axe(driver) == []
        width = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        assert len(set(driver.execute_script(width))) == 1


def recorded(path: Path, options: dict[str, Any], document: Any = None, events: list[Any] | None = None) -> Path:
    """A file with a race of three arms."""
    decoder, prompt = embedded(), "</script><script>window.stolen = 1</script><!--<script>"
    arms = [Arm("plain", decoder.plain()), *(Arm(f"fable-draft, K = {k}", decoder, "fable-draft", k) for k in (2, 5))]
    found = [*race_events(arms, Case(0, prompt, 5), options)]
    path.write_text(recorded_page(found, document), encoding="utf-8")
    if events is not None:
        events += json.loads(json.dumps(found))
    return path


def test_the_page_with_a_recording_in_it(driver: Any, tmp_path: Path) -> None:
    """From a file; it fetches nothing, and texts in it are no scripts."""
    events: list[Any] = []
    path = recorded(tmp_path / "race.html", {"max_new_tokens": 60, "temperature": 0.9}, events=events)
    complaints(driver)
    driver.get(path.as_uri())
    fill(driver, speed="Infinity")
    wait_until(lambda: is_over(driver))
    check_lanes(driver, events)
    assert driver.execute_script("return window.stolen") is None
    assert not driver.find_element("id", "controls").is_displayed()
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert complaints(driver) == []
