"""Commands on quantized models: by a name that ends in :int8, or by --quantize."""

import pytest

from commands import Outrider, only_document

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao and bitsandbytes warn of what they will change


def test_a_quantized_target_is_another_target(outrider: Outrider) -> None:
    """alpha tells how far it is from the one in float32."""
    words = ("alpha", "--target", "fable", "--draft", "fable", "--draft-quantize", "int8", "-t", "1", "--json", "-")
    (row,) = only_document(outrider(*words).out, "alpha")["alphas"]
    assert 0.95 < row["alpha"]["value"] < 1


def test_drafts_of_a_plan_are_quantized_by_name(outrider: Outrider) -> None:
    words = ("plan", "--target", "fable", "--draft", "fable-draft", "--draft", "fable-draft:int8", "-k", "1,2")
    document = only_document(outrider(*words, "-n", 8, "--json", "-").out, "plan")
    drafts = {choice["draft"] for choice in document["settings"][0]["choices"]}
    assert drafts == {"fable-draft", "fable-draft:int8"}


@pytest.mark.slow
def test_a_certificate_names_the_quantization(outrider: Outrider) -> None:
    words = ("certify", "--target", "fable", "--quantize", "int8", "--draft", "fable-draft:int8")
    ended = outrider(*words, "--num-tokens", 2000, "-n", 16, "--json", "-")
    document = only_document(ended.out, "certify")
    assert ended.code == 0 and document["is_certified"]
    assert document["options"]["quantize"] == "int8" and document["options"]["draft"] == ["fable-draft:int8"]


def test_a_target_that_drafts_for_itself_in_fewer_bits_is_no_sanity_check(outrider: Outrider) -> None:
    words = ("compare", "--target", "fable", "--draft", "fable:int8", "-n", 8, "--num-runs", 1)
    assert "Sanity check" not in outrider(*words).out
    assert "Sanity check" in outrider(*words[:4], "fable", *words[5:]).out
