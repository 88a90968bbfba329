"""The page in a real browser, Debian's chromium without a window: skipped where there is none."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Running, running, wait_until, words

from outrider.measure.arms import Arm, Case
from outrider.race.events import race_events
from outrider.race.page import recorded_page
from pairs import embedded

pytestmark = pytest.mark.slow
# What a lane shows, and what the server sent for it.
SHOWN = """
return [...document.querySelectorAll(".lane")].map((lane) => ({
  name: lane.querySelector("h2").textContent,
  prompt: lane.querySelector(".prompt").textContent,
  tokens: [...lane.querySelectorAll(".token")].map((one) => [one.dataset.origin, one.textContent]),
  ghosts: [...lane.querySelectorAll(".ghost")].map((one) => one.textContent),
  facts: Object.fromEntries([...lane.querySelectorAll("dt")].map((dt) => [dt.textContent, dt.nextSibling.textContent])),
}));
"""


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    """A driver of selenium's, for a user who prefers reduced motion."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    binary, path = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if binary is None or path is None:
        pytest.skip("no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    # As root, as in containers, there is no sandbox; /dev/shm is small there.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    one = webdriver.Chrome(options, webdriver.ChromeService(path))
    try:
        features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
        one.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        yield one
    finally:
        one.quit()


def complaints(driver: Any) -> list[str]:
    """What the console has heard since the last call, violations of the policy among it."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


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


def found_by_axe(driver: Any) -> list[str]:
    axe = pytest.importorskip("axe_core_python", reason="axe is not installed: pip install axe-core-python")
    driver.execute_script((Path(axe.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
    found = driver.execute_async_script("const done = arguments[0]; axe.run().then(done, done)")
    return [f"{one['id']}: {node['html']}" for one in found["violations"] for node in one["nodes"]]


def is_over(driver: Any) -> bool:
    return "over" in driver.find_element("id", "verdict").get_attribute("class")


def test_a_race_to_its_end_and_again(driver: Any, server: Running) -> None:
    driver.get(server.url)
    start = driver.find_element("id", "start")
    wait_until(start.is_enabled)
    fill(driver, speed="Infinity", acceptance="block", seed=5, k=4, max_tokens=60)
    start.click()
    wait_until(lambda: is_over(driver), pause_s=0.5)  # seldom asked, since the race needs the processor
    verdict, texts = driver.find_element("id", "verdict").text, driver.execute_script(SHOWN)
    assert "Different samples, same distribution" in verdict and "times as fast as plain in this race" in verdict
    options: dict[str, Any] = {"seed": 5, "max_new_tokens": 60, "acceptance": "block", "num_draft_tokens": 4}
    for lane, arm in zip(texts, (embedded().plain(), embedded()), strict=True):
        (alone,) = arm.generate(lane["prompt"], **options)
        assert [origin for origin, _ in lane["tokens"]] == list(alone.origins)
    pause = driver.find_element("id", "pause")
    # In one script, so that no time passes between the two.
    driver.execute_script("document.getElementById('again').click(); document.getElementById('pause').click()")
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    assert not is_over(driver) and pause.text == "Continue"
    assert [lane["tokens"] for lane in driver.execute_script(SHOWN)] == [[], []]
    pause.click()
    wait_until(lambda: is_over(driver))
    assert driver.execute_script(SHOWN) == texts and complaints(driver) == []
    assert found_by_axe(driver) == []


def test_the_policy_is_kept(driver: Any, server: Running) -> None:
    """The browser refuses markup from a string, and styles that are not the server's. (The console's control, too.)"""
    driver.get(server.url)
    markup = "try { document.body.innerHTML = '<p>'; return '' } catch (error) { return error.name }"
    assert driver.execute_script(markup) == "TypeError"
    driver.execute_script("const s = document.createElement('style'); s.textContent = 'p {}'; document.head.append(s)")
    wait_until(lambda: any("Content Security Policy" in one for one in complaints(driver)))


def test_a_key_is_asked_for(driver: Any) -> None:
    """And kept nowhere."""
    with running(words(), api_keys=("secret",)) as server:
        driver.get(server.url)
        key, start = (driver.find_element("id", name) for name in ("key", "start"))
        wait_until(key.is_displayed)
        key.send_keys("secret")
        fill(driver, prompt="w1 w2")
        wait_until(start.is_enabled)
        fill(driver, speed="Infinity", max_tokens=5, drafter="ngram")
        start.click()
        wait_until(lambda: is_over(driver))
        kept = "return [localStorage.length, sessionStorage.length, document.cookie]"
        assert driver.execute_script(kept) == [0, 0, ""]
        assert all("401" in one for one in complaints(driver))


def test_the_page_with_a_recording_in_it(driver: Any, tmp_path: Path) -> None:
    """From a file, of three arms; it fetches nothing, and texts in it are no scripts."""
    decoder, prompt = embedded(), "</script><script>window.stolen = 1</script><!--<script>"
    arms = [Arm("plain", decoder.plain()), *(Arm(f"fable-draft, K = {k}", decoder, "fable-draft", k) for k in (2, 5))]
    events = json.loads(json.dumps([*race_events(arms, Case(0, prompt, 5), {"max_new_tokens": 60})]))
    path = tmp_path / "race.html"
    path.write_text(recorded_page(events), encoding="utf-8")
    complaints(driver)
    driver.get(path.as_uri())
    fill(driver, speed="Infinity")
    wait_until(lambda: is_over(driver))
    start, *rounds, end = events
    for which, (lane, arm) in enumerate(zip(driver.execute_script(SHOWN), start["arms"], strict=True)):
        own = [event for event in rounds if event["arm"] == which]
        tokens = [[token["origin"], token["text"] or "▫"] for event in own for token in event["tokens"]]
        assert lane["tokens"] == tokens and (lane["name"], lane["prompt"]) == (arm["name"], start["prompt"])
        stats, facts = end["arms"][which]["stats"], lane["facts"]
        assert facts["Rounds"] == str(len(own))
        if arm["draft"] is not None:
            assert lane["ghosts"] and facts["τ measured"] == f"{stats['mean_acceptance_length']:.2f}"
    assert driver.execute_script("return window.stolen") is None
    assert not driver.find_element("id", "controls").is_displayed()
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert complaints(driver) == []
