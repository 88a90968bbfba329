"""Startup log: memory per slot, drafts, and where texts end."""

from __future__ import annotations

from outrider.decoder import Decoder
from outrider.decoding.schedule import Schedule
from outrider.models.reading import defaults_text
from outrider.system.resources import size_text
from outrider.text.chat import ends_text


def about(decoder: Decoder, schedule: Schedule, num_slots: int, capacity: int) -> list[str]:
    """Lines for the log.

    Args:
        schedule: of the engine.
        capacity: maximum tokens of a sequence, prompt included.
    """
    lms = [decoder.target, *decoder.drafter.models]
    bytes_ = 0
    for lm in lms:
        length = lm.execution.round_length(capacity)
        bytes_ += sum(shape.bytes_per_token * (length + 1) + shape.bytes_per_row for shape in lm.layer_shapes)
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    lines = [
        f"{num_slots} slots of {capacity} tokens: {size_text(bytes_)} each, {size_text(num_slots * bytes_)} in all, "
        f"for {' and '.join(lm.name for lm in lms)}",
        f"drafts by {decoder.drafter.name}, K = {decoder.num_draft_tokens} (at most {schedule.max_k}), acceptance "
        f"{decoder.acceptance}, {dtype}",
    ]
    lines.append(ends_text(decoder.target.name, decoder.tokenizer, decoder.eos_ids, decoder.turn_ids))
    if decoder.sampling_defaults:
        lines.append(defaults_text(decoder.target.name, decoder.sampling_defaults))
    return lines
