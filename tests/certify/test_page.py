"""Certificates, and findings about texts, as pages: whole, closed in themselves, of one mind with the document. The
documents are golden examples, to which those of the commands are like."""

import copy
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from documents import examples
from outrider.certify.page import TESTS, render_certificate, render_samples

_CLOSED_BY_NOTHING = {"meta", "br"}
_NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
_Render = Callable[[dict[str, Any]], str]


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


def _certified(kind: str) -> dict[str, Any]:
    """The document of a certificate: "right" (by gumbel, with an adaptive K), "greedy" (of a look-up) or "wrong"."""
    examples_by_verdict = {one["verdict"]: one for one in examples()["certify"]}
    verdict = {"right": "inconclusive", "greedy": "passed", "wrong": "failed"}[kind]
    document = copy.deepcopy(examples_by_verdict[verdict])
    document["options"]["top_k"] = 20
    if kind == "right":  # but for the limit that was asked for
        document["statistical"]["wanted"] = None
        document |= {"verdict": "passed", "is_certified": True}
    if kind == "greedy":
        document["weights"]["draft"] = None
    return document


def _sampled(kind: str) -> dict[str, Any]:
    """The document of findings about sampled texts with a draft, about greedy ones, or about "wrong" ones of both kinds
    without a draft."""
    sampled, greedy = (copy.deepcopy(one) for one in examples()["certify-samples"])
    sampled["statistical"]["wanted"] = None
    sampled["shared_options"]["top_k"] = 20
    if kind == "draft":
        sampled["options"]["draft"] = ["small"]
        return sampled | {"is_consistent": True}
    if kind == "greedy":
        greedy["greedy"][0] |= {"differences": [], "is_ok": True}
        return greedy | {"is_consistent": True, "is_text": False}
    sampled["statistical"]["tests"][0]["is_alarm"] = True
    del sampled["shared_options"]["temperature"]
    return sampled | {"greedy": greedy["greedy"], "is_text": True, "num_repeats": 3}


@cache
def _page(render: _Render, document_of: Callable[[str], dict[str, Any]], kind: str) -> Page:
    """Drawn once for all tests, since that takes a second."""
    return Page(render(document_of(kind)))


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bins", "excess", "acceptance", "z"):
        monkeypatch.setattr(f"outrider.certify.page.svg_of_{name}", lambda *_: "<svg></svg>")


KINDS = ["right", "greedy", "wrong"]
SAMPLED_KINDS = ["draft", "greedy", "wrong"]


@pytest.mark.parametrize(
    ("render", "document_of", "kind"),
    [(render_certificate, _certified, kind) for kind in KINDS]
    + [(render_samples, _sampled, kind) for kind in SAMPLED_KINDS],
)
def test_a_page_is_whole_and_fetches_nothing(
    render: _Render, document_of: Callable[[str], dict[str, Any]], kind: str
) -> None:
    page = _page(render, document_of, kind)
    html = page.html
    assert html.startswith("<!DOCTYPE html>")
    if kind == "right":  # to draw one takes a second
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
    text, statistical = page.text, document["statistical"]
    headline = "Not certified" if kind == "wrong" else "Certified"
    assert text.startswith(f"{headline}: fable with fable-draft")
    assert ("Every layer passed" in text) == (kind != "wrong")
    for control in document["controls"]:
        assert control["about"] in text
    assert "caught" in text and document["weights"]["target"] in text and "outrider certify --again" in text
    assert f"the acceptance rule {document['options']['acceptance']}" in text
    assert (document["weights"]["draft"] or "it is a look-up") in text
    assert ("Sampled with the same seeds" in text) == ("an adaptive number" in text) == (kind == "right")
    if kind == "greedy":
        assert page.figures == [] and "Limit of detection" not in text and "without randomness" in text
        return
    assert len(page.figures) == 4 and all(page.figures)
    assert "top-k 20" in text and f"{statistical['detectable']:.2%}" in text
    for test in statistical["tests"]:
        assert TESTS[test["name"]][0].format(towards="the draft") in text and f"{test['p']:.3g}" in text
    assert ("ALARM" in text) == (kind == "wrong") and "Limit of detection of reused random numbers" in text
    if kind == "wrong":  # each layer that fails is named
        verdict = text[: text.index("Tested:")]
        assert "pushed towards the draft (score, p = " in verdict and "differ from plain decoding" in verdict
        assert "exact layer" not in verdict and "was not detected" not in verdict and "BUG" in text


_BUG = {"prompt": 1, "position": 7, "plain_id": 5, "other_id": None, "margin": None, "gap": None, "verdict": "bug"}
FAULTS = [
    ("statistical", {"num_forbidden": 3}, "3 generated tokens have probability 0 under the target"),
    ("exact", {"two_rounds": 0.0925}, "two rounds is off by 9e-02, and 1e-09 is allowed"),
    ("exact", {"forcing": None}, "teacher forcing is off by –"),  # not a number
    ("greedy", {"differences": [_BUG], "is_ok": False}, "Of 2 sequences at temperature 0, 1 differ"),
]
DOUBTS = [
    ("document", {"is_idle": True}, "there is nothing to certify"),
    ("statistical", {"detectable": None, "num_tokens_needed": 1234}, "might have gone undetected: about 1,234 tokens"),
    ("statistical", {"wanted": 1e-4, "num_tokens_needed": 9}, "of 0.01%, the requested limit, might have gone undet"),
    ("controls", {"is_caught": False, "num_tokens_needed": 7000}, "every draft accepted), so the tests are too weak"),
]


@pytest.mark.parametrize(
    ("headline", "where", "change", "reason"),
    [("Not certified", *fault) for fault in FAULTS] + [("Inconclusive", *doubt) for doubt in DOUBTS],
)
@pytest.mark.usefixtures("without_figures")
def test_each_reason_has_its_sentence(headline: str, where: str, change: dict[str, Any], reason: str) -> None:
    document = _certified("right")
    part = document if where == "document" else document[where]
    (part[0] if isinstance(part, list) else part).update(change)
    with pytest.raises(AssertionError):
        render_certificate(document)  # of two minds
    text = Page(render_certificate(document | {"is_certified": False})).text
    assert text.startswith(headline) and reason in text[: text.index("Tested:")]


@pytest.mark.parametrize("kind", SAMPLED_KINDS)
def test_a_page_of_samples_says_what_the_document_says(kind: str) -> None:
    document = _sampled(kind)
    page = _page(render_samples, _sampled, kind)
    text, statistical = page.text, document["statistical"]
    headline = "Not consistent" if kind == "wrong" else "Consistent"
    assert text.startswith(f"{headline}: {document['options']['file']} and fable") and "acceptance" not in text
    assert ("each line’s own temperature" in text) == (kind != "draft")
    assert ("tokenized again" in text) == ("Repeats among the sampled sequences: 3." in text) == (kind == "wrong")
    assert ("no sequence is labelled as temperature 0" in text) == (kind == "draft")
    assert len(page.figures) == (0 if kind == "greedy" else 2)
    if kind == "greedy":
        assert "9 greedy sequences." in text and "9 of 9 sequences are" in text
        return
    assert f"{statistical['num_tokens']:,} sampled tokens of 8 sequences" in text and "top-k 20" in text
    towards = "the draft" if kind == "draft" else "a sharper distribution"
    for test in statistical["tests"]:
        assert TESTS[test["name"]][0].format(towards=towards) in text and f"{test['p']:.3g}" in text
    assert f"{statistical['detectable']:.2%}" in text and f"{statistical['estimate']:.2%}" in text
    assert ("the draft small" in text) == (kind == "draft") == ("sharper distribution" not in text)
    if kind == "wrong":
        verdict = text[: text.index("Tested:")]
        assert "pushed towards a sharper distribution (score, p = " in verdict and "ALARM" in text
        assert "sequences at temperature 0, 1 differ" in verdict and "BUG" in text
        with pytest.raises(AssertionError):
            render_samples(document | {"is_consistent": True})  # of two minds


@pytest.mark.parametrize(
    ("render", "document", "name"),
    [
        (render_certificate, _certified("right"), "<b>.txt"),
        (render_samples, _sampled("draft"), "logit-bias <i>"),
    ],
)
@pytest.mark.usefixtures("without_figures")
def test_names_are_escaped(render: _Render, document: dict[str, Any], name: str) -> None:
    document["options"] |= {"target": "<script>alert(1)</script>", "draft": ['"><img src=x>'], "prompts": "<b>.txt"}
    document["provenance"]["argv"] = ["certify", "<i>&amp;"]
    document["shared_options"] = document.get("shared_options", {}) | {"logit_bias": ["<i>"]}
    page = Page(render(document))
    assert not {"script", "img", "i"} & {tag for tag, _ in page.tags}
    for one in ("<script>alert(1)</script>", '"><img src=x>', "<i>&amp;", name):
        assert one in page.text


@pytest.mark.usefixtures("without_figures")
def test_a_stored_document() -> None:
    """Without what was not there when it was written; with what was, where it is there."""
    document = _certified("right") | {"prompts_sha256": "3d" * 32}
    statistical = document["statistical"]
    del document["verdict"], document["exact"]["two_rounds"], statistical["dependence"], statistical["pit_excess"]
    del statistical["num_tokens_needed"]
    statistical |= {"estimate": None, "estimate_std": None, "detectable": None, "num_at_edge": 2}
    page = Page(render_certificate(document))
    assert len(page.figures) == 3 and "Estimated deviation" not in page.text and "3d" * 32 in page.text
    assert "2 more tokens are at the edge" in page.text and "draft alone" in page.text
    statistical |= {"estimate": -0.0123, "estimate_std": 0.0045, "surprise_excess": 0.0321}
    text = Page(render_certificate(document)).text
    assert "-1.23% ± 0.45%" in text and "0.0321 nats" in text


def test_a_k_that_changes() -> None:
    """There is room for a drafted token even if none was ever accepted."""
    document = _certified("right")
    document["statistical"]["places"] = [{"num_tokens": 1000, "z": 0.0}]
    assert len(Page(render_certificate(document)).figures) == 4


def test_the_walk_over_a_page_sees_what_is_open() -> None:
    """The control."""
    for broken in ("<p>", "<p><b></p></b>", "</p>"):
        with pytest.raises((AssertionError, IndexError)):
            Page(broken)
