"""Races in events: the prediction of tau, and the page with a recording in it. (The events: tests/serve.)"""

import base64
import hashlib
import itertools
import json
import re

import pytest
import torch

from outrider.race.events import expected_given_draft
from outrider.race.page import HEADERS, recorded_page
from outrider.records import DraftedToken
from reference import THRESHOLDS


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("seed", range(2))
def test_predicted_tokens_are_those_expected(acceptance: str, seed: int) -> None:
    """Over all drafts of three tokens and all coins, exactly."""
    k, vocab_size = 3, 3
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randn(2, vocab_size, vocab_size, dtype=torch.float64, generator=generator).mul(2).softmax(-1)
    p_table, q_table = tables.tolist()
    predicted = expected = 0.0
    for ids in itertools.product(range(vocab_size), repeat=k):
        before = (0, *ids)
        p_rows, q_rows = [p_table[i] for i in before], [q_table[i] for i in before[:-1]]
        drafted = [DraftedToken(ids[i], p_rows[i][ids[i]], q_rows[i][ids[i]]) for i in range(k)]
        weight = 1.0
        for _, _, q in drafted:
            weight *= q
        predicted += weight * expected_given_draft(drafted, acceptance)
        chances = THRESHOLDS[acceptance](p_rows, q_rows, list(ids))
        expected += weight * sum((n + 1) * chance for n, chance in enumerate(lengths(acceptance, chances)))
    assert predicted == pytest.approx(expected, abs=1e-12)
    assert 1 < predicted < 1 + k


def lengths(acceptance: str, chances: list[float]) -> list[float]:
    """The law of the number of accepted tokens, where the i-th coin comes up with its chance: the first that fails ends
    the prefix (rejection), or the last that comes up decides (block)."""
    law = []
    for n in range(len(chances) + 1):
        chance = 1.0
        if acceptance == "rejection":
            for i in range(n):
                chance *= min(1.0, chances[i])
            law.append(chance * (1 - min(1.0, chances[n]) if n < len(chances) else 1.0))
        else:
            for i in range(n, len(chances)):
                chance *= 1 - chances[i]
            law.append(chance * (chances[n - 1] if n else 1.0))
    return law


def test_plain_rounds_and_certain_drafts() -> None:
    """Block is expected to commit at least as many tokens."""
    assert expected_given_draft([], "block") == 1.0
    assert expected_given_draft([DraftedToken(1, 0.5, 1.0), DraftedToken(2, 1.0, 1.0)], "rejection") == 2.0
    assert expected_given_draft([DraftedToken(1, 0.0, 1.0), DraftedToken(2, 1.0, 0.5)], "block") == 1.0
    drafted = [DraftedToken(0, 0.9, 0.3), DraftedToken(1, 0.2, 0.4), DraftedToken(2, 0.6, 0.3)]
    assert expected_given_draft(drafted, "rejection") == pytest.approx(1 + 1 + 0.5 + 0.5)
    assert expected_given_draft(drafted, "block") == pytest.approx(1 + 1 + 0.5 + 1)


def test_a_recorded_page_allows_its_own_script_and_style_alone() -> None:
    """By their checksums; a text in the recording cannot end the element that it is in."""
    events = [{"type": "start", "prompt": "</script><!-- <script>"}]
    page = recorded_page(events)
    (recording,) = re.findall(r'<script type="application/json" id="recording">(.*?)</script>', page)
    assert json.loads(recording) == events
    (policy,) = re.findall(r'http-equiv="content-security-policy" content="([^"]*)"', page)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, content in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy and "unsafe" not in policy
    assert "import " not in re.sub(r"/\*.*?\*/", "", script, flags=re.DOTALL) and "export " not in script
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "unsafe" not in HEADERS["content-security-policy"]
