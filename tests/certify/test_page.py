"""Certificates of toys, and findings about their texts, as pages: whole, closed in themselves, of one mind with the
document."""

import copy
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from outrider.certify import run as module
from outrider.certify.controls import ACCEPT_ALL, Control
from outrider.certify.job import CertifyTask, generate_texts
from outrider.certify.page import TESTS, render_certificate, render_samples
from outrider.certify.run import certify, run_pilot
from outrider.certify.samples import SampledText, SamplesReport, judge, judge_greedily
from outrider.cli.shared.options import SamplingOptions
from outrider.cli.shared.output import make_document, options_json
from outrider.cli.shared.pair_options import PairOptions
from outrider.decoder import Decoder
from outrider.drafters.base import NoDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.options import Sampling
from outrider.stats.intervals import uniform_distance
from toys import llama_pair

_CLOSED_BY_NOTHING = {"meta", "br"}
_NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


class Page(HTMLParser):
    """A page taken apart; every element must be closed where it ought to be."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = text
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _CLOSED_BY_NOTHING:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    @property
    def figures(self) -> list[str]:
        return [attrs["aria-label"] for _, attrs in self.tags if attrs.get("role") == "img"]


@cache
def _certified(kind: str) -> dict[str, Any]:
    """The document of a real certificate of a tiny pair."""
    target, drafter = llama_pair()
    options: dict[str, Any] = {"temperature": 0.0} if kind == "greedy" else {"top_k": 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NUM_PILOT_TOKENS", 256)
        patch.setattr(module, "_NUM_CONTEXTS", 1)
        patch.setattr(module, "CONTROLS", (*module.CONTROLS[:2], module.CONTROLS[5]))
        if kind == "wrong":
            inner, mistake = module.generate_texts, Control("", "", ACCEPT_ALL)
            patch.setattr(
                module, "generate_texts", lambda job, texts, control=None: inner(job, texts, control or mistake)
            )
        acceptance = "gumbel" if kind == "gumbel" else "rejection"
        drafter = NgramDrafter() if kind == "ngram" else drafter
        decoder = Decoder(target, None, frozenset({0}), drafter, acceptance, num_draft_tokens=4)
        job = CertifyTask(decoder, Sampling(max_new_tokens=24, **options), [(1, 2), (3,)], 1e-3, batch_size=64, seed=7)
        certificate = certify(job, run_pilot(job), 1000)
    pair = PairOptions("toy", ["small"], acceptance)
    settings = options_json(
        pair,
        SamplingOptions(**options).to_options(seed=7, num_seeds=1, max_new_tokens=24),
        num_draft_tokens=4,
        prompts=None,
        significance=1e-3,
        budget=None,
        detect_tv=None,
        num_tokens=1000,
        batch_size=64,
    )
    weights = {"target": "1f" * 32, "draft": None if kind == "ngram" else "2e" * 32}
    return make_document("certify", settings, certificate.to_json() | {"weights": weights}, target)


@cache
def _sampled(kind: str) -> dict[str, Any]:
    """The document of real findings about texts of a tiny model: sampled ones, greedy ones, or "wrong" ones of both."""
    target, drafter = llama_pair()
    decoder = Decoder(target, None, frozenset({0}), NoDrafter(), "rejection", num_draft_tokens=4)

    def texts(written: Sampling, said: Sampling, num_texts: int) -> list[SampledText]:
        found = generate_texts(
            CertifyTask(decoder, written, [(1, 2), (3,)], 1e-3, batch_size=64, seed=7), range(num_texts)
        )
        return [SampledText(one.index + 1, one.prompt_ids, one.token_ids, said) for one in found]

    warm, greedy = Sampling(max_new_tokens=24), Sampling(max_new_tokens=24, temperature=0.0)
    drafts = drafter if kind == "draft" else NoDrafter()
    statistical, found = None, []
    if kind != "greedy":
        written = Sampling(max_new_tokens=24, temperature=0.5 if kind == "wrong" else 1.0)
        statistical = judge(target, drafts, texts(written, warm, 60), level=1e-3, seed=3, batch_size=64)
    if kind in ("greedy", "wrong"):
        found = [judge_greedily(target, texts(warm if kind == "wrong" else greedy, greedy, 4), 64)]
    shared = asdict(SamplingOptions())  # as the command
    if kind == "wrong":
        del shared["temperature"]
    report = SamplesReport(statistical, found, num_repeats=0)
    return make_document(
        "certify-samples",
        options_json(PairOptions("toy", ["small" if kind == "draft" else "none"]), {}, file="texts", significance=1e-3),
        report.to_json() | {"is_text": False, "shared_options": shared | {"top_k": 20}},
        target,
    )


@cache
def _page(render: Callable[[dict[str, Any]], str], document_of: Callable[[str], dict[str, Any]], kind: str) -> Page:
    """Drawn once for all tests, since that takes a second."""
    return Page(render(document_of(kind)))


KINDS = ["right", "gumbel", "greedy", "ngram", "wrong"]
SAMPLED_KINDS = ["draft", "none", "greedy", "wrong"]


@pytest.mark.parametrize(
    ("render", "document_of", "kind"),
    [(render_certificate, _certified, kind) for kind in KINDS]
    + [(render_samples, _sampled, kind) for kind in SAMPLED_KINDS],
)
def test_a_page_is_whole_and_fetches_nothing(
    render: Callable[[dict[str, Any]], str], document_of: Callable[[str], dict[str, Any]], kind: str
) -> None:
    page = _page(render, document_of, kind)
    html = page.html
    assert html.startswith("<!DOCTYPE html>")
    if kind in (KINDS[0], SAMPLED_KINDS[0]):  # to draw one takes a second
        assert html == render(document_of(kind))
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in page.tags}
    for tag, attrs in page.tags:
        links = {name: value for name, value in attrs.items() if name in ("src", "href", "xlink:href", "srcset")}
        assert all(value.startswith("#") for value in links.values()), (tag, links)
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", html)) and "@import" not in html
    assert set(re.findall(r"\bhttps?://[^\"\s<]*", html)) <= _NAMESPACES
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    used = re.findall(r"(?:href=\"#|url\(#)([^\")]*)", html)
    assert set(used) <= set(ids) and (used or kind == "greedy")
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(svg)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_says_what_the_document_says(kind: str) -> None:
    document = _certified(kind)
    page = _page(render_certificate, _certified, kind)
    text = page.text
    assert document["is_certified"] == (kind != "wrong")
    assert text.startswith("Certified: toy with small" if document["is_certified"] else "Not certified: toy with small")
    assert ("Every layer passed" in text) == document["is_certified"]
    for control in document["controls"]:
        assert control["about"] in text and (control["excuse"] or "caught") in text
    assert "1f" * 32 in text and "outrider certify --again" in text
    assert ("2e" * 32 in text) == (kind != "ngram") == ("look-up" not in text)
    assert "rejection" in text if kind != "gumbel" else "Sampled with the same seeds" in text
    statistical = document["statistical"]
    if kind == "greedy":
        assert statistical is None and page.figures == [] and "Limit of detection" not in text
        assert "without randomness" in text
        return
    assert len(page.figures) == 4 and all(page.figures)
    assert "top-k 20" in text and f"{statistical['detectable']:.2%}" in text
    for test in statistical["tests"]:
        assert TESTS[test["name"]][0].format(towards="the draft") in text and f"{test['p']:.3g}" in text
    assert ("ALARM" in text) == (kind == "wrong") and "Limit of detection of reused random numbers" in text


def test_why_it_is_not_certified() -> None:
    """A loop that keeps every draft: each layer that fails is named, and the curve sags as its caption says."""
    document = _certified("wrong")
    text = _page(render_certificate, _certified, "wrong").text
    verdict = text[: text.index("Tested:")]
    assert "pushed towards the draft (score, p = " in verdict and "differ from plain decoding" in verdict
    assert "exact layer" not in verdict and "was not detected" not in verdict
    assert "BUG" in text and "leaves it" in text
    excess = document["statistical"]["pit_excess"]
    assert len(excess) == 101 and excess[0] == excess[-1] == 0
    assert min(excess) < -uniform_distance(1000) and max(excess) < 0.02


def _forbid(document: dict[str, Any]) -> None:
    document["statistical"]["num_forbidden"] = 3


def _want(document: dict[str, Any]) -> None:
    document["statistical"] |= {"wanted": 1e-4, "num_tokens_needed": 9 * 10**7}


def _weaken(document: dict[str, Any]) -> None:
    document["statistical"] |= {"detectable": None, "num_tokens_needed": 1234}


def _reuse(document: dict[str, Any]) -> None:
    document["exact"]["two_rounds"] = 0.0925


def _miss(document: dict[str, Any]) -> None:
    document["controls"][1] |= {"is_caught": False, "p": 0.5, "num_tokens_needed": 7000}


def _idle(document: dict[str, Any]) -> None:
    document["is_idle"] = True


def _break_the_rule(document: dict[str, Any]) -> None:
    document["exact"]["round_law"] = 2e-3


def _break_the_yardstick(document: dict[str, Any]) -> None:
    document["exact"]["forcing"] = None  # not a number


def _differ(document: dict[str, Any]) -> None:
    difference = {"prompt": 1, "position": 7, "plain_id": 5, "other_id": None, "margin": None, "gap": None}
    document["greedy"][0]["differences"] = [difference | {"verdict": "bug"}]
    document["greedy"][0]["is_ok"] = False


@pytest.mark.parametrize(
    ("change", "headline", "reason"),
    [
        (_forbid, "Not certified", "3 generated tokens have probability 0 under the target"),
        (_want, "Inconclusive", "A deviation of 0.01%, the requested limit, might have gone undetected: about 9"),
        (
            _weaken,
            "Inconclusive",
            "follows the draft alone might have gone undetected: about 1,234 tokens",
        ),
        (
            _miss,
            "Inconclusive",
            "(accept-all: every draft accepted), so the tests are too weak here: about 7,000",
        ),
        (_idle, "Inconclusive", "there is nothing to certify"),
        (_break_the_rule, "Not certified", "one round is off by 2e-03, and 1e-09 is allowed"),
        (_reuse, "Not certified", "two rounds is off by 9e-02, and 1e-09 is allowed"),
        (_break_the_yardstick, "Not certified", "teacher forcing is off by –"),
        (_differ, "Not certified", "Of 2 sequences at temperature 0, 1 differ"),
    ],
)
def test_each_reason_has_its_sentence(change: Callable[[dict[str, Any]], None], headline: str, reason: str) -> None:
    document = copy.deepcopy(_certified("right"))
    change(document)
    with pytest.raises(AssertionError):
        render_certificate(document)  # of two minds
    text = Page(render_certificate(document | {"is_certified": False})).text
    assert text.startswith(headline) and reason in text[: text.index("Tested:")]


@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_a_page_of_samples_says_what_the_document_says(kind: str) -> None:
    document = _sampled(kind)
    page = _page(render_samples, _sampled, kind)
    text, statistical = page.text, document["statistical"]
    assert document["is_consistent"] == (kind != "wrong")
    headline = "Consistent" if document["is_consistent"] else "Not consistent"
    assert text.startswith(f"{headline}: texts and toy") and "top-k 20" in text
    assert ("temperature 1, top-k 20:" in text) == (kind != "wrong") == ("each line’s own temperature:" not in text)
    assert "acceptance" not in text and "tokenized again" not in text and "Repeats" not in text
    assert len(page.figures) == (0 if kind == "greedy" else 2)
    assert ("no sequence is labelled as temperature 0" in text) == (kind in ("draft", "none"))
    if kind == "greedy":
        assert statistical is None and "4 greedy sequences." in text and "4 of 4 sequences are" in text
        return
    assert f"{statistical['num_tokens']:,} sampled tokens of 54 sequences" in text
    towards = "the draft" if kind == "draft" else "a sharper distribution"
    for test in statistical["tests"]:
        assert TESTS[test["name"]][0].format(towards=towards) in text and f"{test['p']:.3g}" in text
    assert f"{statistical['detectable']:.2%}" in text and f"{statistical['estimate']:.2%}" in text
    assert ("the draft small" in text) == (kind == "draft") == ("sharper distribution" not in text)


def test_why_texts_are_not_consistent() -> None:
    document = copy.deepcopy(_sampled("wrong")) | {"is_text": True, "num_repeats": 3}
    page = Page(render_samples(document))
    verdict = page.text[: page.text.index("Tested:")]
    assert "pushed towards a sharper distribution (score, p = " in verdict
    assert "sequences at temperature 0, 4 differ" in verdict
    assert "ALARM" in page.text and "BUG" in page.text and "leaves it" in page.text
    assert "tokenized again" in page.text and "Repeats among the sampled sequences: 3." in page.text
    with pytest.raises(AssertionError):
        render_samples(document | {"is_consistent": True})  # of two minds


def test_names_of_samples_are_escaped() -> None:
    document = copy.deepcopy(_sampled("draft"))
    document["options"] |= {"target": "<script>alert(1)</script>", "draft": ['"><img src=x>'], "file": "<b>.jsonl"}
    document["shared_options"] |= {"logit_bias": ["<i>"]}
    page = Page(render_samples(document))
    assert not {"script", "img", "i"} & {tag for tag, _ in page.tags}
    for name in ("<script>alert(1)</script>", '"><img src=x>', "<b>.jsonl", "logit-bias <i>"):
        assert name in page.text


def test_names_are_escaped() -> None:
    document = copy.deepcopy(_certified("right"))
    document["options"] |= {"target": "<script>alert(1)</script>", "draft": ['"><img src=x>'], "prompts": "<b>.txt"}
    document["provenance"]["argv"] = ["certify", "<i>&amp;"]
    page = Page(render_certificate(document))
    assert not {"script", "img", "i"} & {tag for tag, _ in page.tags}
    for name in ("<script>alert(1)</script>", '"><img src=x>', "<b>.txt", "<i>&amp;"):
        assert name in page.text


def test_a_stored_document() -> None:
    """Without what was not there when it was written; with what was, where it is there."""
    document = copy.deepcopy(_certified("right"))
    statistical = document["statistical"]
    del document["verdict"], document["exact"]["two_rounds"], statistical["dependence"], statistical["pit_excess"]
    del statistical["num_tokens_needed"]
    statistical |= {"estimate": None, "estimate_std": None, "detectable": None, "num_at_edge": 2}
    page = Page(render_certificate(document))
    assert len(page.figures) == 3 and "Estimated deviation" not in page.text
    assert "2 more tokens are at the edge" in page.text and "draft alone" in page.text
    statistical |= {"estimate": -0.0123, "estimate_std": 0.0045, "surprise_excess": 0.0321}
    text = Page(render_certificate(document)).text
    assert "-1.23% ± 0.45%" in text and "0.0321 nats" in text


def test_a_k_that_changes() -> None:
    """There is room for a drafted token even if none was ever accepted."""
    document = copy.deepcopy(_certified("right")) | {"prompts_sha256": "3d" * 32}
    document["options"]["num_draft_tokens"] = "auto"
    document["statistical"]["places"] = [{"num_tokens": 1000, "z": 0.0}]
    page = Page(render_certificate(document))
    assert "an adaptive number of drafted tokens" in page.text and "3d" * 32 in page.text and len(page.figures) == 4


def test_the_walk_over_a_page_sees_what_is_open() -> None:
    """The control."""
    for broken in ("<p>", "<p><b></p></b>", "</p>"):
        with pytest.raises((AssertionError, IndexError)):
            Page(broken)
