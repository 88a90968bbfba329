"""A draft with another tokenizer beside the same draft with the target's.

    python benchmarks/other_tokens.py stories.txt > benchmarks/results/other_tokens.txt

The draft is the embedded one: with the target's tokens, and with those of byte-level BPEs of other sizes, trained on
the text. (Its weights are not trained again. The embedding of a token that the target has, too, is the draft's, else
the mean over its parts.) It drafts for the embedded target, K = 4, `block`. The prompts are paragraphs of the text, cut
after 40 tokens. Shared mass: of p, on the target's output. Overlap: mean of sum min(p, q), where the draft reads the
output token by token, as it does, or tokenized as a whole. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.drafters.translated import TranslatedDrafter
from outrider.models.registry import resolve
from outrider.stats.counts import tau_interval
from outrider.system.provenance import provenance
from outrider.text.spelling import spelling_of

_SIZES = (1024, 2048, 8192)
_END = "<|endoftext|>"
_GIVEN = 40  # tokens of a prompt
_EVERY = 8  # tokens between the places at which the overlap is computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("-n", "--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    decoder = load("fable", device="cpu")
    text = arguments.text.read_text()
    prompts = _prompts(decoder, text, arguments.num_prompts)
    console, rows = Console(width=110), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        names = ["fable-draft", *(_with_other_tokens(Path(folder), size, text) for size in _SIZES)]
        for temperature in (1.0, 0.0):
            options = {"temperature": temperature, "max_new_tokens": arguments.max_new_tokens, "ignore_eos": True}
            seeds = list(range(len(prompts)))
            outputs = decoder.generate(prompts, seed=seeds, **options)
            written = [(prompt, output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
            found: list[dict[str, Any]] = []
            for name in names:
                drafter = load_drafter(decoder, name)
                pair = replace(decoder, drafter=drafter)
                done = [one for seed in seeds for one in pair.generate([prompts[seed]], seed=1000 + seed, **options)]
                tau = tau_interval([one.stats for one in done])
                assert tau is not None
                row = {"draft": Path(name).name, "temperature": temperature, "tau": tau.to_json()}
                if isinstance(drafter, TranslatedDrafter):
                    row |= _shared(decoder, drafter, name, written, temperature)
                found.append({**row, "ratio": row["tau"]["value"] / (found or [row])[0]["tau"]["value"]})
            rows += found
            console.print(_table(f"temperature {temperature:g}, {len(prompts)} prompts", found))
    print(json.dumps({"results": rows, "provenance": provenance("cpu")}))


def _prompts(decoder: Decoder, text: str, num: int) -> list[list[int]]:
    """Long paragraphs from all parts of the text."""
    paragraphs = [one for one in text.split("\n\n") if len(one) > 400]
    chosen = paragraphs[:: len(paragraphs) // num][:num]
    return [decoder.encode(paragraph)[:_GIVEN] for paragraph in chosen]


def _with_other_tokens(folder: Path, size: int, text: str) -> str:
    """The embedded draft with a BPE of this size."""
    folder, source = folder / f"BPE of {size}", resolve("fable-draft").path
    letters = Tokenizer(BPE())
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    letters.train_from_iterator(text.split("\n\n"), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=_END, bos_token=_END)
    draft, own = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32), AutoTokenizer.from_pretrained(source)
    rows = draft.get_input_embeddings().weight.data
    spelling = spelling_of(tokenizer, own, len(tokenizer), len(own))
    assert spelling is not None
    rows = torch.stack([rows[list(ids)].mean(dim=0) for ids in spelling.spelled])
    draft.resize_token_embeddings(len(tokenizer))
    draft.get_input_embeddings().weight.data.copy_(rows)
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def _shared(
    decoder: Decoder,
    drafter: TranslatedDrafter,
    folder: str,
    written: Sequence[tuple[list[int], Sequence[int]]],
    temperature: float,
) -> dict[str, float]:
    """Shared ids and mass, own tokens for each of the target's, and the overlap with both contexts."""
    spelling, model, tokenizer = drafter.spelling, drafter.model.model, AutoTokenizer.from_pretrained(folder)
    equals = torch.tensor(spelling.equals)
    mass, overlaps, num_own, num_tokens = [], list[tuple[float, float]](), 0, 0
    for prompt, output in written:
        ids, begin = [*prompt, *output], len(prompt)
        p = _probs(decoder.target.model(torch.tensor([ids])).logits[0, begin - 1 : -1], temperature)
        mass.append(float((p * (equals >= 0)).sum(-1).mean()))
        num_own += sum(len(spelling.spelled[i]) for i in ids)
        num_tokens += len(ids)
        for place in range(begin, len(ids), _EVERY):
            spelled = [own for i in ids[:place] for own in spelling.spelled[i]]
            whole = tokenizer(decoder.tokenizer.decode(ids[:place]), add_special_tokens=False).input_ids
            both = []
            for own in (spelled, whole):
                logits = model(torch.tensor([own])).logits[0, -1]
                q = _probs(logits[equals.clamp_min(0)].masked_fill(equals < 0, -torch.inf), temperature)
                both.append(float(torch.minimum(p[place - begin], q).sum()))
            overlaps.append((both[0], both[1]))
    spelled_overlap, whole_overlap = (sum(values) / len(overlaps) for values in zip(*overlaps, strict=True))
    return {
        "equal_ids": spelling.num_equal,
        "shared_mass": sum(mass) / len(mass),
        "own_per_token": num_own / num_tokens,
        "overlap": spelled_overlap,
        "overlap_whole": whole_overlap,
    }


def _probs(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    if temperature > 0:
        return (logits / temperature).softmax(-1)
    return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()


def _table(title: str, found: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=title, caption="tau with 95% interval; overlap: token by token / as a whole")
    for name in ("draft", "shared ids", "shared mass", "own per token", "tau", "of equal", "overlap"):
        table.add_column(name, justify="right")
    for one in found:
        tau = one["tau"]
        table.add_row(*_cells(one), f"{tau['value']:.2f} [{tau['low']:.2f}, {tau['high']:.2f}]", *_rest(one))
    return table


def _cells(one: dict[str, Any]) -> Iterator[str]:
    yield one["draft"]
    is_other = "equal_ids" in one
    yield f"{one['equal_ids']}" if is_other else "all"
    yield f"{one['shared_mass']:.3f}" if is_other else ""
    yield f"{one['own_per_token']:.2f}" if is_other else ""


def _rest(one: dict[str, Any]) -> Iterator[str]:
    yield f"{one['ratio']:.2f}"
    yield f"{one['overlap']:.3f} / {one['overlap_whole']:.3f}" if "overlap" in one else ""


if __name__ == "__main__":
    main()
