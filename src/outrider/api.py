"""``load``: a ``Decoder`` from the names of a target and a draft.

decoder = load("fable", "fable-draft")
for chunk in decoder.stream("Once upon a time", seed=1):
    print(chunk.text, end="")
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.corpus import read_corpus
from outrider.drafters.draft_options import DraftOptions, split_name, with_vocab
from outrider.drafters.heads import head_drafter
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import ngram_drafter, suffix_drafter
from outrider.drafters.model import SELF, mask_token_of, model_drafter, self_drafter
from outrider.drafters.translated import translated_drafter
from outrider.errors import DeviceError, ModelError, ModelNotFound, OptionError, TokenizerMismatch, UnsupportedModel
from outrider.models.executions import beside
from outrider.models.heads.loading import MTP, is_head, load_head, load_mtp_of
from outrider.models.loading import Checkpoint, build_lm, load_checkpoint, num_tokens_of, width_of
from outrider.models.pairs import drafts_of, is_local
from outrider.models.placement import DTYPES
from outrider.models.registry import Placement, known_models, resolve
from outrider.models.sampling_defaults import StatedSampling, check_choice, stated_sampling
from outrider.options import (
    AUTO,
    DEFAULT_ACCEPTANCE,
    DEFAULT_NUM_DRAFT_TOKENS,
    HYBRID,
    NumDraftTokens,
    looks_up,
    nearest,
    reads_corpus,
)
from outrider.runtime.lm import LM
from outrider.runtime.weight_tensors import tp_size_of
from outrider.system.files import short_name
from outrider.system.ranks import take_part
from outrider.system.resources import gc_paused
from outrider.text.chat import ends_text, turn_end
from outrider.text.example_prompts import PROMPTS
from outrider.text.spelling import Spelling, spelling_of
from outrider.text.tokenizer import differing_tokens, encode, examples_of, processor_of, tokenizer_of

_LOG = logging.getLogger(__name__)
_CHOICE = logging.getLogger("outrider.draft")  # shown by commands
_ANYWHERE = Placement()
_MOST_UNKNOWN = 0.05  # share of the target's tokens that a draft of its family need not know


@gc_paused()
def load(
    target: str | Path | Any,
    draft: str | Path | Any | None = None,
    *,
    tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
    placement: Placement | None = None,
    draft_placement: Placement | None = None,
    acceptance: str = DEFAULT_ACCEPTANCE,
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS,
    generation_config: str = "auto",
    models_file: Path | None = None,
    corpus: Sequence[str | Path] = (),
    **fields: Any,
) -> Decoder:
    """Load a target and a draft.

    Args:
        target: a known name, a folder, a GGUF file, a hub id (each perhaps with ":int8" or another quantization), or a
            Hugging Face causal language model in memory (it is put into evaluation mode).
        draft: likewise, or a folder or hub id of a head for the target; a name that ends in ":greedy" drafts the most
            probable tokens, one with ":min-prob=P" ends drafts before tokens of which the model is unsure,
            ":vocab=N", ":vocab=FILE" and ":vocab=N@FILE" draft few tokens only (docs/how-it-works/drafters.md),
            ":window=W" reads the last tokens only; or "self", the target with such a window; or "mtp", the layer for
            it in the target's own checkpoint; or "ngram" or "suffix", which look up the text so far; or "suffix+" and
            one of these names, which drafts where "suffix" promises less; or "auto": "mtp" if the target's checkpoint
            has the layers, else a known head or smaller model of its family that is on this machine, else "suffix"; or
            "none" or None for plain decoding.
        tokenizer: for a target in memory: of Transformers, in a processor, or a ``tokenizers.Tokenizer``; without one,
            prompts are token ids and chunks have no text.
        draft_tokenizer: for a draft in memory: compared with the target's; without one they are assumed to agree.
        placement: of the target; models in memory stay where they are.
        draft_placement: the placement of the draft; an "auto" device or dtype is the target's, and so are
            ``allow_pickle`` and "eager" as ``execution``.
        acceptance: "rejection", "block" or "gumbel".
        num_draft_tokens: K; "auto" chooses it each round for the most tokens per second, from costs measured on first
            use for each number of rows (about a second each for small models) and cached.
        generation_config: "auto" takes the sampling defaults of the target's checkpoint (temperature, top_k, top_p,
            min_p and repetition_penalty, as far as its generation_config.json or GGUF file states them) for calls that
            give no ``Sampling``; their keywords are changes to these. "none" does not. A model in memory has none.
        models_file: a TOML file with names of models, beside the user's own.
        corpus: files in which the draft "suffix" looks up the text, too: text, or JSON lines with "prompt" and "text"
            (or "prompt_ids" and "token_ids"), as ``outrider generate --output`` writes them.
        fields: of ``Placement``, in place of ``placement``: ``load(..., device="cuda", dtype="bfloat16")``.

    Raises:
        ModelError: a model cannot be loaded, or its cache cannot be rolled back.
        TokenizerMismatch: the draft has too few of the target's tokens. (Those that it lacks are never drafted.)
        DeviceError, OptionError, FileError, MissingExtra: an option is not possible here.
    """
    if placement is not None and fields:
        raise OptionError("placement", placement, "give it or its fields, not both")
    for name, value in fields.items():
        if name not in Placement.__dataclass_fields__:
            near = nearest(name, (*Placement.__dataclass_fields__, "draft", "num_draft_tokens", "target"))
            remedy = f"did you mean {near}?" if near else "leave it out"
            raise OptionError(name, value, f"'load' has no such option: {remedy}")
    placement = placement or Placement(**fields)
    checkpoint = _checkpoint(target, tokenizer, placement, models_file, is_target=True)
    num_tokens = num_tokens_of(checkpoint)
    check_choice(generation_config)
    stated = StatedSampling()
    if isinstance(target, (str, Path)):
        stated = stated_sampling(resolve(str(target), models_file), generation_config, checkpoint.file)
        if line := stated.text(short_name(checkpoint.name), stated.defaults):
            logging.getLogger("outrider.sampling").info("%s", line)  # shown by the server
    end = turn_end(checkpoint.tokenizer)
    turn_ids = frozenset() if end is None or end >= num_tokens else frozenset([end])
    plain = Decoder(
        target=build_lm(checkpoint, num_tokens),
        tokenizer=checkpoint.tokenizer,
        # Some configurations name end tokens beyond the vocabulary.
        eos_ids=frozenset(i for i in checkpoint.eos_ids if 0 <= i < num_tokens),
        drafter=NO_DRAFTER,
        acceptance=acceptance,
        num_draft_tokens=num_draft_tokens,
        sampling_defaults=stated.defaults,
        processor=checkpoint.processor,
        turn_ids=turn_ids,
    )
    _LOG.info("%s", ends_text(plain.target.name, plain.tokenizer, plain.eos_ids, turn_ids))
    of_draft = (draft_placement or _ANYWHERE).inheriting(placement)
    more: Any = {"tokenizer": draft_tokenizer, "models_file": models_file, "corpus": corpus}
    return replace(plain, drafter=load_drafter(plain, draft, placement=of_draft, **more))


@gc_paused()
def load_drafter(
    decoder: Decoder,
    draft: str | Path | Any | None,
    *,
    tokenizer: Any | None = None,
    placement: Placement = _ANYWHERE,
    models_file: Path | None = None,
    corpus: Sequence[str | Path] = (),
) -> Drafter:
    """Load a drafter for the decoder's target. Arguments and errors: see ``load``."""
    if isinstance(corpus, (str, Path)):
        raise OptionError("corpus", str(corpus), "give a list of files")
    if corpus and not reads_corpus(draft):
        raise OptionError("corpus", [str(path) for path in corpus], "only the draft 'suffix' reads one")
    if tokenizer is not None and (draft is None or isinstance(draft, (str, Path))):
        raise OptionError("draft tokenizer", type(tokenizer).__name__, f"the draft {str(draft)!r} has its own, or none")
    if draft is None or draft == "none":
        return NO_DRAFTER
    if draft == AUTO:
        return load_auto(decoder, placement, models_file)[1]
    if draft == "ngram":
        return ngram_drafter()
    if draft == "suffix":
        return load_suffix(decoder.tokenizer, decoder.target.vocab_size, corpus)
    if isinstance(draft, str) and draft.startswith(HYBRID):
        name = draft.removeprefix(HYBRID)
        if looks_up(name) or name in ("", "none", AUTO):
            raise OptionError("draft", draft, f"give the name of a model after {HYBRID!r}")
        other = load_drafter(decoder, name, placement=placement, models_file=models_file)
        vocab_size = decoder.target.vocab_size
        return hybrid_drafter(load_suffix(decoder.tokenizer, vocab_size, corpus), other, vocab_size)
    model, options = split_name(draft)
    if looks_up(model) or model in ("none", AUTO):
        raise OptionError("draft", draft, f"{model!r} takes no options: a model, a head and 'mtp' do")
    if model == MTP:
        _check_placement(placement, decoder.target)
        return _of_head(load_mtp_of(decoder.target, allow_pickle=placement.allow_pickle), options, decoder)
    if model == SELF:
        _check_placement(placement, decoder.target)
        return self_drafter(*_with_vocab(decoder.target.with_name(SELF), options, decoder))
    quantization = None
    if isinstance(model, (str, Path)):
        spec = resolve(str(model), models_file)
        quantization = placement.over(spec).quantization
        if is_head(spec):
            _check_placement(placement.over(spec), decoder.target)
            head = load_head(spec, decoder.target, allow_pickle=placement.allow_pickle)
            return _of_head(head, options, decoder)
    checkpoint = _checkpoint(model, tokenizer, placement, models_file)
    num_tokens, differing = decoder.target.vocab_size, dict[int, tuple[str, str]]()
    if decoder.tokenizer is not None and checkpoint.tokenizer is not None:  # the target's ids with another token
        found = differing_tokens(decoder.tokenizer, checkpoint.tokenizer)
        differing = {i: tokens for i, tokens in found.items() if i < num_tokens}
    if len(differing) >= _MOST_UNKNOWN * num_tokens:
        spelling = _spelling(decoder, checkpoint, differing)
        own = build_lm(checkpoint, num_tokens_of(checkpoint))
        if mask_token_of(own) is not None:
            raise TokenizerMismatch(f"{checkpoint.name} drafts in one forward (PARD), for its own family only")
        lm, options = _with_vocab(own.with_tokens(spelling.equals), options, decoder, quantization)
        return translated_drafter(lm, spelling, options)
    lm = build_lm(checkpoint, num_tokens, _unknown_ids(decoder, checkpoint, differing))
    return model_drafter(*_with_vocab(lm, options, decoder, quantization))


def _of_head(head: LM, options: DraftOptions, decoder: Decoder) -> Drafter:
    head, options = _with_vocab(head, options, decoder)
    return head_drafter(beside(head, decoder.target), options)


def _with_vocab(
    lm: LM, options: DraftOptions, decoder: Decoder, quantization: str | None = None
) -> tuple[LM, DraftOptions]:
    return with_vocab(lm, options, decoder.tokenizer, decoder.eos_ids | decoder.turn_ids, quantization)


def load_auto(decoder: Decoder, placement: Placement, models_file: Path | None) -> tuple[str, Drafter]:
    """Load the MTP layers of the target's checkpoint; or else the first known draft of the target that is on this
    machine; or else ``suffix``. Returns the name by which ``load_drafter`` loads it, and the drafter."""
    target, name_of_target = decoder.target, short_name(decoder.target.name)
    try:
        found = drafts_of(resolve(target.name, models_file), known_models(models_file))
    except ModelNotFound:  # a model in memory
        found = []
    here = [spec.name for spec in found if is_local(spec)]
    for name in (MTP, *here):
        try:
            drafter = load_drafter(decoder, name, placement=placement, models_file=models_file)
        except (ModelError, TokenizerMismatch, OptionError, DeviceError) as error:
            (_LOG if name == MTP and isinstance(error, UnsupportedModel) else _CHOICE).info("not %s: %s", name, error)
        else:
            _CHOICE.info("draft: %s, which %s has here", name, name_of_target)
            return name, drafter
    far = [spec.name for spec in found if spec.name not in here]
    hint = f" ({', '.join(far)}: by --draft NAME, from the hub)" if far else ""
    _CHOICE.info("draft: suffix (look-ups): no draft for %s is on this machine%s", name_of_target, hint)
    return "suffix", load_suffix(decoder.tokenizer, target.vocab_size, ())


def _check_placement(placement: Placement, target: LM) -> None:
    """Raises OptionError: a head has the device and the type of its target."""
    choices = {
        "quantization": placement.quantization if placement.quantization != "none" else None,
        "device_map": placement.device_map if placement.device_map != "none" else None,
        "tensor_parallel": placement.tensor_parallel,
        "store": placement.store if placement.store not in ("auto", None) else None,
        "device": None if placement.device in ("auto", str(target.device), target.device.type) else placement.device,
        "dtype": None if DTYPES.get(placement.dtype, target.dtype) == target.dtype else placement.dtype,
    }
    for option, value in choices.items():
        if value is not None:
            remedy = "a head has the device and the type of its target, as 'self' does"
            raise OptionError(f"draft {option}", value, remedy)


def _spelling(decoder: Decoder, draft: Checkpoint, differing: Mapping[int, tuple[str, str]]) -> Spelling:
    """The tokens of the target in those of a draft of another family, whose share is reported. Raises
    TokenizerMismatch: it is too small."""
    target, num_tokens = decoder.target, decoder.target.vocab_size
    spelling = spelling_of(decoder.tokenizer, draft.tokenizer, num_tokens, num_tokens_of(draft))
    reason = "they cannot be read as bytes"
    if spelling is not None:
        share = spelling.share_of(encode(decoder.tokenizer, " ".join(PROMPTS)))
        found = f"{spelling.num_equal} of the {num_tokens} tokens of {target.name}, {share:.0%} of those of a text"
        if share >= 0.5:  # else most of a text would not be drafted
            _LOG.warning("the draft %s has another tokenizer, with %s: it never drafts others", draft.name, found)
            return spelling
        reason = f"it has {found}"
    raise TokenizerMismatch(
        f"{target.name} and {draft.name} have different tokenizers: {len(differing)} of {num_tokens} tokens differ "
        f"({examples_of(differing)}), and {reason}; choose a draft of the same family, or the draft 'ngram', which "
        "needs none"
    )


def _unknown_ids(decoder: Decoder, draft: Checkpoint, differing: Mapping[int, tuple[str, str]]) -> tuple[int, ...]:
    """Tokens of the target that are others in the draft, or missing there. A few are reported and never drafted."""
    target, num_tokens = decoder.target, decoder.target.vocab_size
    unknown = tuple(sorted(differing.keys() | range(width_of(draft), num_tokens)))
    if len(unknown) >= _MOST_UNKNOWN * num_tokens:
        return ()  # too few logits, which is reported where the model is built
    if unknown:
        examples = examples_of(differing) or f"it has logits for {width_of(draft)}"
        count = f"{len(unknown)} of the {num_tokens} tokens of {target.name}"
        _LOG.warning("the draft %s does not know %s, and never drafts them (%s)", draft.name, count, examples)
    return unknown


def load_suffix(tokenizer: Any | None, vocab_size: int, corpus: Sequence[str | Path]) -> Drafter:
    """Load the draft "suffix" for a target with this tokenizer. Raises FileError."""
    paths = [Path(path) for path in corpus]
    return suffix_drafter(read_corpus(paths, tokenizer, vocab_size) if paths else None)


def _checkpoint(
    model: Any, tokenizer: Any | None, placement: Placement, models_file: Path | None, *, is_target: bool = False
) -> Checkpoint:
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise OptionError("tokenizer", type(tokenizer).__name__, f"the model {str(model)!r} has its own")
        return load_checkpoint(resolve(str(model), models_file), placement, is_target=is_target)
    config = getattr(model, "config", None)
    if config is None or not isinstance(model, torch.nn.Module):
        remedy = "a name, a folder, a hub id, or a Hugging Face model in memory"
        raise OptionError("model", type(model).__name__, remedy)
    if placement.quantization not in (None, "none") or placement.device_map not in (None, "none"):
        how = placement.quantization or placement.device_map
        raise OptionError("placement", how, "a model in memory stays as it is: pass a name or a folder")
    if tp_size_of(model) > 1:
        take_part(model)
    name = config.name_or_path or type(model).__name__
    execution = "eager" if placement.execution == "auto" else placement.execution  # its weights may be changed
    return Checkpoint(name, model, tokenizer_of(tokenizer), processor_of(tokenizer), execution)
