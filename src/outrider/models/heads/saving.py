"""Writes heads in the layouts of other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.heads.eagle3 import LAYER_IDS, Eagle3Head
from outrider.runtime.lm import LM


def save_speculators(head: Eagle3Head, target: LM, folder: Path, *, num_draft_tokens: int, dtype: torch.dtype) -> None:
    """Write an EAGLE-3 head in the speculators layout, which vLLM reads too. Its embedding is left to the target.

    Args:
        num_draft_tokens: K, a proposal for those who load it.
    """
    tensors = {name: value for name, value in head.state_dict().items() if not name.startswith("embed_tokens.")}
    tensors = {name: value.to("cpu", dtype).contiguous() for name, value in tensors.items()}
    num_tokens = len(tensors["lm_head.weight"])
    if head.token_ids is not None:
        tensors |= token_tables(head.token_ids.cpu(), head.config.vocab_size)
    own = head.config.to_dict()
    for key in ("_name_or_path", "architectures", "dtype", "transformers_version"):
        own.pop(key, None)
    model: Any = target.model
    stated = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",  # the only one that the format has
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": model.config.architectures or []},
        },
        # Older readers look for the base beside the parameters.
        "transformer_layer_config": own | {"rope_theta": own["rope_parameters"]["rope_theta"]},
        "draft_vocab_size": num_tokens,
        "target_hidden_size": None,  # that of the head
        LAYER_IDS: list(head.features),
        "norm_before_residual": head.norm_before_residual,
        "norm_output": head.norm_output,
        "norm_before_fc": False,
        "fc_norm": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def token_tables(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The reduced vocabulary as the layouts state it: offsets of the target's ids, and which ids are known."""
    is_known = torch.zeros(vocab_size, dtype=torch.bool)
    is_known[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": is_known}
