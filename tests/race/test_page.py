"""The page with a recorded race in it. (The events: tests/serve.)"""

import base64
import hashlib
import json
import re

from outrider.race.page import HEADERS, recorded_page


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
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "unsafe" not in HEADERS["content-security-policy"]
