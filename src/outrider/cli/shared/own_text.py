"""Outputs of the target, recorded or generated for a command as if recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.shared.progress import progress
from outrider.errors import OptionError

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.measure.log import Header, Log, Record
    from outrider.offline.prompt_row import PromptLine


def open_log(path: Path, target: str, tokenizer: Any, option: str = "--log") -> Log:
    """Open a log of a target's outputs.

    Args:
        tokenizer: the target's; None if it has none.
        option: that names the log.

    Raises:
        OptionError: it is of another target.
        FileError: it is damaged, or empty.
    """
    from outrider.measure.log import Log
    from outrider.text.tokenizer import fingerprint

    log = Log.open(path)
    is_same = tokenizer is None or log.header.tokenizer in (None, fingerprint(tokenizer))
    if log.header.target != target or not is_same:
        raise OptionError(option, str(path), f"it was recorded from {log.header.target}, not from this {target}")
    return log


def own_text(
    decoder: Decoder, lines: Sequence[PromptLine], prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> tuple[list[Record], Header]:
    """Generate the target's outputs for prompts, as records of a log.

    Args:
        lines, prompts: the prompts, and their tokens.
        options: sampling options, with the seed of the first prompt.
    """
    from outrider.measure.log import Header, record_outputs

    decoder = decoder.of_one_kind(prompts)
    with progress("generating with the target", len(lines)) as advance:
        categories = [line.category for line in lines]
        records = record_outputs(decoder, prompts, options, categories=categories, on_done=advance)
    return records, Header.of(decoder, options, has_probs=True)
