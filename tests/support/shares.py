"""Run by torchrun (models/test_parallel.py): a target shared by two processes, against the same one whole. The first
process writes what it finds to a JSON file for each. The folder holds two models, and a file of names (``shared``)."""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hybrids import hybrid
from multimodal import multimodal, with_image
from outrider.api import load
from outrider.certify import run as certifying
from outrider.certify.controls import CONTROLS
from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.lookups import ngram_drafter
from outrider.errors import OptionError, OutriderError
from outrider.models.weights import weights_checksum
from outrider.options import Sampling
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.lm import LM
from outrider.sampling.rules import RULES
from outrider.system.ranks import Ranks, current_ranks, take_part
from pairs import save, word_tokenizer
from weight_bytes import num_bytes

torch.set_num_threads(1)
PROMPTS = ["w1 w2 w3 w1 w2", "w5", "w9 w8 w7 w6"]


def main(folder: Path) -> None:
    ranks = take_part()
    names = folder / "names.toml"
    shared = load("shared", str(folder / "draft"), dtype="float64", models_file=names)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    whole = replace(load(model, tokenizer=shared.tokenizer), drafter=shared.drafter)
    own = ranks.lead(_share, (shared.target, shared.target.model))
    _check_states_and_images(folder)
    found = {
        "checksums": [weights_checksum(one.target.model) for one in (shared, whole)],
        "tokens": _tokens(shared, whole),
        "captured": _captured(shared, whole),
        "drawn_seed": shared.generate(PROMPTS[0], max_new_tokens=4)[0].seed,
        "certificate": _certificate(shared),
        "learned": _learned(shared),
        # The first process's value, its error, and all values
        "first": [ranks.lead(_rank, ())[0], _error(lambda: ranks.lead(_fail, ())), ranks.lead(_rank, ())],
        "quantized": _quantized(folder, names),
        "refused": _refused(folder, names),
        "parted": _parted(shared, ranks),
    }
    for rank, (num_shares, heads, size) in enumerate(own):
        about = {"num_shares": num_shares, "heads": heads, "bytes": [size, num_bytes(model)]}
        (folder / f"found-{rank}.json").write_text(json.dumps(found | about))


def _share(lm: LM, model: Any) -> tuple[int, int, int]:
    return lm.num_shares, lm.layer_shapes[0].num_heads, num_bytes(model)


def _check_states_and_images(folder: Path) -> None:
    """The same text, too, with states that are kept at anchors, and after an image."""
    image = with_image("llava", [1, 2, 3], [4, 5], 0)
    for name, model, prompt in (
        ("states", hybrid("qwen3_5_text"), [1, 2, 3] * 5),
        ("images", multimodal("llava", dtype=torch.float64), image),
    ):
        save(folder / name, model, word_tokenizer())
        pair = [load(str(folder / name), "ngram", tensor_parallel=2, dtype="float64"), load(model, "ngram")]
        texts = [one.generate([prompt], seed=1, max_new_tokens=16, ignore_eos=True)[0].token_ids for one in pair]
        assert texts[0] == texts[1], name


def _tokens(shared: Decoder, whole: Decoder) -> dict[str, bool]:
    """Whether the texts are those of the whole target: under each rule, without a draft model, in a row alone."""
    model, default = shared.drafter, shared.acceptance
    cases = [(model, rule, 3) for rule in RULES]
    cases += [(model, default, 1), (ngram_drafter(), default, 3), (NO_DRAFTER, default, 3)]
    same = {}
    for drafter, rule, num_rows in cases:
        options: dict[str, Any] = {"seed": list(range(num_rows)), "max_new_tokens": 12, "acceptance": rule}
        texts = [
            [one.token_ids for one in replace(decoder, drafter=drafter).generate(PROMPTS[:num_rows], **options)]
            for decoder in (shared, whole)
        ]
        same[f"{drafter.name}, {rule}, {num_rows}"] = texts[0] == texts[1]
    return same


def _captured(shared: Decoder, whole: Decoder) -> bool:
    """Whether outputs are equal with the steps captured for a CUDA device, here without recording."""
    target = copy.copy(shared.target)
    target.execution = CapturedExecution()
    options: dict[str, Any] = {"seed": 5, "max_new_tokens": 12}
    texts = [one.generate(PROMPTS[0], **options)[0].token_ids for one in (replace(shared, target=target), whole)]
    return texts[0] == texts[1]


def _certificate(decoder: Decoder) -> dict[str, Any]:
    """With one deliberate mistake. False alarm: 1e-6."""
    certifying.NUM_PILOT_TOKENS, certifying._NUM_CONTEXTS = 128, 2
    job = certifying.CertifyTask(decoder, Sampling(max_new_tokens=16), [(1, 2), (3,)], 1e-6, batch_size=16, seed=7)
    pilot = certifying.run_pilot(job)
    certificate = certifying.certify(job, pilot, 400, controls=CONTROLS[:1])
    return {
        "is_ok": certificate.verdict == "passed",
        "is_caught": [control.is_caught for control in certificate.controls],
        "seconds": pilot.seconds,
    }


def _learned(decoder: Decoder) -> dict[str, Any]:
    """The seconds of rounds that ``-k auto`` learns, by the number of rows."""
    for num_rows in (1, 2):
        decoder.generate(PROMPTS[:num_rows], max_new_tokens=24, num_draft_tokens="auto")
    assert decoder.pair_state is not None
    loads = decoder.pair_state.estimates(RULES["block"])._loads
    return {"seconds": {2**size: load.seconds(2**size, 0) for (size, _), load in loads.items()}}


def _rank() -> int:
    return current_ranks().rank


def _fail() -> None:
    raise OptionError("a", "b", f"process {_rank()} cannot")


def _quantized(folder: Path, names: Path) -> dict[str, Any]:
    decoder = load("shared:int8", str(folder / "draft"), models_file=names)
    text = decoder.generate(PROMPTS[0], seed=1, max_new_tokens=8)[0].token_ids
    return {"text": text, "checksum": weights_checksum(decoder.target.model)}


def _refused(folder: Path, names: Path) -> dict[str, str]:
    target = str(folder / "target")
    return {
        "alone": _error(lambda: load(target, tensor_parallel=1)),
        "three": _error(lambda: load(target, tensor_parallel=3)),
        "device map": _error(lambda: load(target, device_map="auto")),
        "8bit": _error(lambda: load(target, quantization="8bit")),
    }


def _parted(decoder: Decoder, ranks: Ranks) -> str:
    """The processes have different files."""
    ranks.lead(_spoil, (decoder.target.model,))
    return _error(lambda: replace(decoder).generate(PROMPTS[0], seed=1, max_new_tokens=8))


@torch.no_grad()
def _spoil(model: Any) -> None:
    if _rank():
        model.get_decoder().norm.weight.neg_()


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except OutriderError as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
