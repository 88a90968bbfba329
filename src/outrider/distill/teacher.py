"""The target along training sequences: its logits, and the hidden states that a head reads.

The target's forward is the larger part of a training step. Where sequences repeat, hidden states may be kept in files,
so that the target reads each sequence once: then a step computes the LM head alone, for the tokens that the draft has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import OptionError
from outrider.models.weights import widened_weights
from outrider.runtime.lm import LM
from outrider.runtime.modules import recorded_states
from outrider.system.files import write_whole

_TOLERANCE = 0.02  # of logits from states in bfloat16, as a share of the largest


def read_target(target: LM, features: Sequence[int], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits after each token, hidden states, and the input of the LM head: [B, T] -> [B, T, V], [B, T, F], [B, T, H]

    Args:
        features: hidden state i is the input of decoder layer i.
    """
    model = target.model
    inputs: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad(), recorded_states(model, features) as found:
        try:
            logits = model(input_ids=ids, use_cache=False).logits[..., : target.vocab_size].to(ids.device)
        finally:
            hook.remove()
    states = [found[i].to(ids.device) for i in features]
    last = inputs[0].to(ids.device)
    return logits, torch.cat(states, dim=-1) if states else last[..., :0], last


class Teacher:
    """A target as training reads it.

    Args:
        features: the hidden states that are wanted.
        token_ids: the tokens whose logits are wanted; None for all. D numbers
        folder: for hidden states that are kept; None to read the target each time.
    """

    def __init__(
        self, target: LM, features: Sequence[int] = (), token_ids: Tensor | None = None, folder: Path | None = None
    ) -> None:
        self.target, self.features, self.token_ids, self.folder = target, tuple(features), token_ids, folder
        self._head: Tensor | None = None

    def read(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits after each token, and hidden states: [B, T] -> [B, T, D], [B, T, F]"""
        if self.folder is not None:
            return self._kept(ids, self.folder)
        logits, states, _ = read_target(self.target, self.features, ids)
        return self._wanted(logits), states

    def _wanted(self, logits: Tensor) -> Tensor:
        return logits if self.token_ids is None else logits[..., self.token_ids]

    def _kept(self, ids: Tensor, folder: Path) -> tuple[Tensor, Tensor]:
        """As ``read``, from states in bfloat16."""
        paths = [folder / f"{self._name(row)}.safetensors" for row in ids.tolist()]
        found = {i: states for i, path in enumerate(paths) if (states := _stored(path)) is not None}
        if missing := [i for i in range(len(paths)) if i not in found]:
            logits, states, last = read_target(self.target, self.features, ids[missing])
            self._check(self._wanted(logits[:1]), last[:1])
            del logits
            folder.mkdir(parents=True, exist_ok=True)
            for i, row in zip(missing, torch.cat((states, last), dim=-1).to("cpu", torch.bfloat16), strict=True):
                write_whole(paths[i], save({"states": row}))
                found[i] = row
        both = torch.stack([found[i] for i in range(len(paths))]).to(ids.device, self.target.dtype)
        size = both.shape[-1] // (len(self.features) + 1)
        return self._logits(both[..., -size:]), both[..., :-size]

    def _name(self, row: Sequence[int]) -> str:
        """Name of the file of a sequence."""
        return hashlib.sha256(f"{self.target.name} {self.features} {row}".encode()).hexdigest()[:32]

    def _logits(self, last: Tensor) -> Tensor:
        lm_head = self.target.model.get_output_embeddings()
        if self.token_ids is None:
            with torch.no_grad():
                logits: Tensor = lm_head(last)[..., : self.target.vocab_size]
            return logits
        if self._head is None:
            weight = widened_weights(nn.ModuleDict({"head": lm_head}))["head.weight"][self.token_ids]
            self._head = weight.to(last.device, last.dtype)
        return functional.linear(last, self._head)

    def _check(self, logits: Tensor, last: Tensor) -> None:
        """Raises OptionError: the target does more to its logits (scales or bounds them)."""
        found = self._logits(last.bfloat16().to(last.dtype))
        if float((found - logits).abs().max()) > _TOLERANCE * float(logits.abs().max()):
            raise OptionError("keep_states", True, f"{self.target.name} has more than a product in its LM head")


def _stored(path: Path) -> Tensor | None:
    try:
        states: Tensor = load_file(path)["states"]
    except (OSError, SafetensorError, KeyError):
        return None
    return states
