"""Reads what a checkpoint states besides its weights: configuration, tokenizer and processor of images. (Defaults of
sampling: sampling_defaults.py.)"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from outrider.errors import ModelCorrupt, ModelNotFound, OutriderError, UnsupportedModel, reason_of
from outrider.models import kinds
from outrider.models.registry import ModelSpec
from outrider.models.tokenizers import folder_tokenizer, restate
from outrider.native.plan import NotPlanned
from outrider.system.resources import memory_errors

if TYPE_CHECKING:
    from outrider.models.gguf.file import GgufFile

_LOG = logging.getLogger(__name__)


def read_config(spec: ModelSpec, file: GgufFile | None = None) -> Any:
    """Read Transformers' configuration of a model, and nothing else; refuse kinds that do not work. A GGUF file is
    opened if it is not given. Raises ModelNotFound, ModelCorrupt, UnsupportedModel, MissingExtra."""
    import transformers

    with reading(spec, "adapter"):
        kinds.check_adapter(spec.name, spec.file(kinds.ADAPTER_CONFIG))
    if spec.path is not None and spec.gguf is None and not (spec.path / "config.json").is_file():
        raise ModelCorrupt(f"{spec.path} is not a model folder: there is no config.json in it")
    with reading(spec, "configuration"):
        if spec.gguf is None:
            stated = transformers.PreTrainedConfig.get_config_dict(spec.location)[0]
            kinds.check_head(spec.name, stated)
            kinds.check_counts(spec.name, stated)
            config = transformers.AutoConfig.from_pretrained(spec.location, trust_remote_code=False)
        else:
            from outrider.models.gguf.checkpoint import gguf_file
            from outrider.models.gguf.model import stated_model, transformers_config

            file = file or gguf_file(spec)
            kinds.check_head(spec.name, {"model_type": file.metadata.get("general.architecture")})
            config = transformers_config(stated_model(file, spec.name), spec.name)
        kinds.check_kind(spec.name, config)
        kinds.auto_class(spec.name, config)
        if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None:
            config._attn_implementation = "eager"  # some releases of Transformers leave the cap out of "sdpa"
    return config


def stored_dtype(spec: ModelSpec) -> torch.dtype:
    """Type of a checkpoint's weights on disk, by its configuration; float32 if it states none; bfloat16 of a GGUF
    file, whose blocks have no type."""
    dtype: torch.dtype | None = torch.bfloat16 if spec.gguf else read_config(spec).dtype
    return dtype or torch.float32


def load_tokenizer(spec: ModelSpec, file: GgufFile | None = None) -> Any:
    """Load the tokenizer alone, as its files state it. A GGUF file is opened if it is not given. Raises ModelNotFound,
    ModelCorrupt, UnsupportedModel."""
    with reading(spec, "tokenizer"):
        if spec.gguf is None:
            tokenizer = folder_tokenizer(spec.path, spec.hub)
        else:
            from outrider.models.gguf.checkpoint import gguf_file
            from outrider.models.gguf.vocabulary import gguf_tokenizer

            tokenizer = gguf_tokenizer((file or gguf_file(spec)).metadata, spec.name)
        own = tokenizer.chat_template or ""
        if not all(isinstance(one, str) for one in (own.values() if isinstance(own, dict) else [own])):
            raise ModelCorrupt(f"{spec.name} has the chat template {own!r:.60}, which is no text: correct the file")
        return tokenizer


@contextlib.contextmanager
def reading(spec: ModelSpec, what: str, config: Any | None = None) -> Iterator[None]:
    """Translate errors of reading; show no progress bars for small models."""
    from safetensors import SafetensorError

    weights = [] if spec.path is None else spec.path.glob(spec.gguf or "*.safetensors")
    where = spec.location if spec.gguf is None else f"{spec.location}/{spec.gguf}"
    # A link may lead nowhere.
    is_quiet = spec.path is not None and sum(file.stat().st_size for file in weights if file.is_file()) < 2**30
    try:
        # Libraries that quantize, whose warnings (kernels for other devices, deprecated calls) are nothing for users:
        for noisy in ("torchao", "torch.utils._pytree", "bitsandbytes"):
            logging.getLogger(noisy).setLevel(logging.ERROR)
        bars = without_bars() if is_quiet and "transformers" in sys.modules else contextlib.nullcontext()
        with bars, memory_errors():
            yield
    except (OutriderError, NotPlanned, torch.OutOfMemoryError):
        raise
    except SafetensorError as error:
        raise ModelCorrupt(f"the weights of {where} cannot be read ({error}): download them again") from None
    except Exception as error:  # for damaged files the libraries may raise anything
        reason = reason_of(error)
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
        odd = kinds.odd_numbers(config) if isinstance(error, kinds.FAILURES) else ""
        raise ModelCorrupt(f"the {what} of {where} cannot be loaded ({type(error).__name__}: {reason}){odd}") from None


def load_processor(spec: ModelSpec) -> Any | None:
    """Load the processor of a model of text and images; None without one, or without its packages. Text needs none."""
    import transformers

    try:
        processor = transformers.AutoProcessor.from_pretrained(spec.location, trust_remote_code=False)
        restate(getattr(processor, "tokenizer", None), load_tokenizer(spec))
        return processor
    except Exception as error:  # whatever its libraries raise
        _LOG.info("%s reads no images in chats: %s", spec.name, reason_of(error))
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
