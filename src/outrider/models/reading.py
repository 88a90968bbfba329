"""Reads what a checkpoint states besides its weights: configuration, tokenizer and processor of images. (Defaults of
sampling: sampling_defaults.py.)"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ModelCorrupt, ModelNotFound, OutriderError, UnsupportedModel
from outrider.models import kinds
from outrider.models.registry import ModelSpec
from outrider.native.plan import NotPlanned
from outrider.system.resources import memory_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from outrider.models.gguf.file import GgufFile

_LOG = logging.getLogger(__name__)
_TOKENIZER = "tokenizer.json"
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_BPE = (
    *("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"),
    "ignore_merges",
)
# Keys of tokenizer_config.json, the part that they change, and its own key.
_SWITCHES = {
    "add_prefix_space": ("pre_tokenizer", "add_prefix_space"),
    "do_lower_case": ("normalizer", "lowercase"),
    "strip_accents": ("normalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "handle_chinese_chars"),
}
# Notices of libraries while a model is loaded, about which its user can do nothing: logger, and how they begin.
_NOTICES = {
    "torchao": ("Failed to load ",),  # kernels for other devices
    "torchao.kernel.intmm": ("Warning: Detected no triton",),
    "torch.utils._pytree": ("<enum ",),  # torchao's call is deprecated
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),  # an optional kernel
    "bitsandbytes.autograd._functions": ("MatMul8bitLt: inputs will be cast",),  # in every forward
}


def read_config(spec: ModelSpec, file: GgufFile | None = None) -> Any:
    """Read Transformers' configuration of a model, and nothing else; refuse kinds that do not work. Raises
    ModelNotFound, ModelCorrupt, UnsupportedModel, MissingExtra.

    Args:
        file: if it is a GGUF file, which is opened if it is not given.
    """
    import transformers

    with reading(spec, "adapter"):
        kinds.check_adapter(spec.name, _adapter_of(spec))
    if spec.path is not None and spec.gguf is None and not (spec.path / "config.json").is_file():
        raise ModelCorrupt(f"{spec.path} is not a model folder: there is no config.json in it")
    with reading(spec, "configuration"):
        if spec.gguf is None:
            stated = transformers.PreTrainedConfig.get_config_dict(spec.location)[0]
            kinds.check_head(spec.name, stated)
            kinds.check_counts(spec.name, stated)
            config = transformers.AutoConfig.from_pretrained(spec.location, trust_remote_code=False)
        else:
            from outrider.models.gguf.checkpoint import gguf_config, gguf_file

            file = file or gguf_file(spec)
            kinds.check_head(spec.name, {"model_type": file.metadata.get("general.architecture")})
            config = gguf_config(file, spec.name)
        kinds.check_kind(spec.name, config)
        kinds.auto_class(spec.name, config)
        if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
            config._attn_implementation = "eager"  # some releases of Transformers leave the cap out of "sdpa"
    return config


def _adapter_of(spec: ModelSpec) -> Path | None:
    """The adapter_config.json beside or instead of a model; None if there is none."""
    from transformers.utils.peft_utils import find_adapter_config_file

    if spec.path is not None:
        file = spec.path / kinds.ADAPTER_CONFIG
        return file if file.is_file() else None
    found = find_adapter_config_file(spec.location)
    return None if found is None else Path(found)


def stored_dtype(spec: ModelSpec) -> torch.dtype:
    """Type of a checkpoint's weights on disk, by its configuration; float32 if it states none; bfloat16 of a GGUF
    file, whose blocks have no type."""
    dtype: torch.dtype | None = torch.bfloat16 if spec.gguf else read_config(spec).dtype
    return dtype or torch.float32


def load_tokenizer(spec: ModelSpec, file: GgufFile | None = None) -> Any:
    """Load the tokenizer alone, as its files state it. Raises ModelNotFound, ModelCorrupt.

    Args:
        file: if it is a GGUF file, which is opened if it is not given.
    """
    import transformers

    location = spec.location
    with reading(spec, "tokenizer"):
        if spec.gguf is not None:
            from outrider.models.gguf.checkpoint import gguf_file
            from outrider.models.gguf.vocabulary import gguf_tokenizer

            return gguf_tokenizer((file or gguf_file(spec)).metadata, spec.name)
        return as_stated(transformers.AutoTokenizer.from_pretrained(location, trust_remote_code=False), location)


def as_stated(tokenizer: Any, location: str) -> Any:
    """The tokenizer of a folder or hub id, which now has the parts that its ``tokenizer.json`` states.

    Many classes of Transformers take the vocabulary from that file, and build anew what cuts a text into words and
    joins tokens to a text: as the class does it, whatever the file says. What ``tokenizer_config.json`` states stands
    beside the file: switches that change a part of it (``_SWITCHES``), added tokens, and whether texts begin with BOS.
    Chat template and roles of tokens are of no concern here.
    """
    from transformers.models.auto.tokenization_auto import get_tokenizer_config
    from transformers.utils import cached_file

    backend = getattr(tokenizer, "backend_tokenizer", None)
    file = cached_file(location, _TOKENIZER, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    if backend is None or file is None:
        return tokenizer
    config = get_tokenizer_config(location, local_files_only=True)
    parts = _parts(Path(file).read_text(encoding="utf-8"), config)
    if not config.get("fix_mistral_regex"):  # a mended splitter of Mistral's is stated, too
        _take(backend, parts, location)
    template = parts.post_processor
    if template is not None and not config.keys() & {"add_bos_token", "add_eos_token"}:
        if template.process(backend.encode("a", add_special_tokens=False)).ids != backend.encode("a").ids:
            _LOG.warning("%s: texts begin and end as in %s", location, _TOKENIZER)
            backend.post_processor = template
    return tokenizer


def _take(backend: Tokenizer, parts: Tokenizer, location: str) -> None:
    from tokenizers.models import BPE

    others = [part for part in _PARTS if _state(getattr(backend, part)) != _state(getattr(parts, part))]
    for part in others:
        setattr(backend, part, getattr(parts, part))
    if isinstance(backend.model, BPE):
        for key in _BPE:
            stated = getattr(parts.model, key)
            if (getattr(backend.model, key) or None) != (stated or None):  # no suffix is written in two ways
                setattr(backend.model, key, stated)
                others.append(key)
    if others:
        _LOG.info("%s: %s of the tokenizer as in %s", location, ", ".join(others), _TOKENIZER)
        backend.add_tokens([*backend.get_added_tokens_decoder().values()])  # to be found in text normalized anew


def _state(part: Any) -> bytes | None:
    return None if part is None else part.__getstate__()


def _parts(text: str, config: Mapping[str, Any]) -> Tokenizer:
    """The parts that a tokenizer.json states, without its vocabulary, which is most of it and comes last."""
    from tokenizers import Tokenizer

    last = max(text.find(f'"{part}"') for part in (*_PARTS, "post_processor"))
    try:
        document = json.loads(text[: text.find('"vocab"', last)] + '"vocab": {}}}')
    except ValueError:  # in another order
        document = json.loads(text)
    model = document["model"] if document["model"].get("type") == "BPE" else {"type": "BPE"}
    document |= {"added_tokens": [], "model": {**model, "vocab": {}, "merges": []}}
    for key, (part, name) in _SWITCHES.items():
        stated = document.get(part) or {}
        if config.get(key) is not None and name in stated:
            document[part] = {**stated, name: config[key]}
    return Tokenizer.from_str(json.dumps(document))


@contextlib.contextmanager
def reading(spec: ModelSpec, what: str, config: Any | None = None) -> Iterator[None]:
    """Translate errors of reading; show no progress bars for small models.

    Args:
        config: that may have led to an error.
    """
    from safetensors import SafetensorError

    weights = [] if spec.path is None else spec.path.glob(spec.gguf or "*.safetensors")
    where = spec.location if spec.gguf is None else f"{spec.location}/{spec.gguf}"
    is_quiet = spec.path is not None and sum(file.stat().st_size for file in weights) < 2**30
    try:
        drop_notices()
        bars = without_bars() if is_quiet and "transformers" in sys.modules else contextlib.nullcontext()
        with bars, memory_errors():
            yield
    except (OutriderError, NotPlanned, torch.OutOfMemoryError):
        raise
    except SafetensorError as error:
        raise ModelCorrupt(f"the weights of {where} cannot be read ({error}): download them again") from None
    except Exception as error:  # for damaged files the libraries may raise anything
        reason = " ".join(str(error).split())[:300]
        if "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"the {what} of {spec.name} needs code of its own, which is never run here: if you trust it, load "
                "model and tokenizer yourself (from_pretrained with trust_remote_code=True) and pass them to "
                "outrider.load"
            ) from None
        if spec.hub is not None and "gated" in reason:
            raise ModelNotFound(
                f"the hub model {spec.hub!r} is gated: accept its licence on its page, then run 'hf auth login' or set "
                "HF_TOKEN"
            ) from None
        if spec.hub is not None and isinstance(error, OSError):
            raise ModelNotFound(
                f"the hub model {spec.hub!r} cannot be fetched, and is not in the local cache: check its name and the "
                f"network, or give a local folder ({reason})"
            ) from None
        kind = type(error).__name__
        odd = kinds.odd_numbers(config) if isinstance(error, kinds.FAILURES) else ""
        raise ModelCorrupt(f"the {what} of {where} cannot be loaded ({kind}: {reason}){odd}") from None


def load_processor(spec: ModelSpec) -> Any | None:
    """Load the processor of a model of text and images; None without one, or without its packages. Text needs none."""
    import transformers

    try:
        processor = transformers.AutoProcessor.from_pretrained(spec.location, trust_remote_code=False)
        as_stated(getattr(processor, "tokenizer", None), spec.location)
        return processor
    except Exception as error:  # whatever its libraries raise
        _LOG.info("%s reads no images in chats: %s", spec.name, " ".join(str(error).split())[:300])
        return None


def open_file(spec: ModelSpec) -> GgufFile | None:
    """Read the header of a checkpoint's GGUF file; None if it is none."""
    if spec.gguf is None:
        return None
    from outrider.models.gguf.checkpoint import gguf_file

    with reading(spec, "file"):
        return gguf_file(spec)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    from transformers.utils import logging as of_transformers

    had_bars = of_transformers.is_progress_bar_enabled()
    of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            of_transformers.enable_progress_bar()


def drop_notices() -> None:
    """Drop, from now on, the notices of libraries that quantize."""
    for name in _NOTICES:
        logging.getLogger(name).addFilter(_is_no_notice)


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOTICES[record.name])
