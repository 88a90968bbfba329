"""Writes heads in the layouts of other libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.errors import UnsupportedModel
from outrider.models.heads.base import Head
from outrider.models.heads.chains import LAYER_IDS, stated_features
from outrider.models.heads.loading import find_tensors, read_config, read_tensors
from outrider.runtime.lm import LM


def save_speculators(
    head: Head, target: LM, folder: Path, settings: Mapping[str, Any], *, num_draft_tokens: int, dtype: torch.dtype
) -> None:
    """Write a head in the speculators layout, which vLLM reads too. Its embedding is left to the target.

    Args:
        settings: those of its kind.
        num_draft_tokens: K, a proposal for those who load it.
    """
    tensors = {name: value for name, value in head.state_dict().items() if not name.startswith("embed_tokens.")}
    tensors = {name: value.to("cpu", dtype).contiguous() for name, value in tensors.items()}
    if head.token_ids is not None:
        ids = head.token_ids.cpu()
        is_known = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_known}
    own = head.config.to_dict()
    for key in ("_name_or_path", "architectures", "dtype", "transformers_version"):
        own.pop(key, None)
    stated = {
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": settings["speculators_model_type"],
            "default_proposal_method": "greedy",  # the only one that the format has
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target.name, "architectures": target.model.config.architectures or []},
        },
        # Older readers look for the base beside the parameters.
        "transformer_layer_config": own | {"rope_theta": own["rope_parameters"]["rope_theta"]},
        "draft_vocab_size": len(head.lm_head.weight),
        "target_hidden_size": None,  # that of the head
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        **settings,
    }
    _write(folder, stated, tensors)


def convert_to_specforge(location: str, num_layers: int, folder: Path, name: str) -> None:
    """Write a head in SpecForge's layout, which SGLang reads.

    Args:
        location: a head in another layout; a folder or hub id.
        num_layers: of the target.
        name: for messages.

    Raises:
        UnsupportedModel: SGLang does not know a part of it.
        ModelNotFound, ModelCorrupt
    """
    stated, tensors = read_config(location), read_tensors(location, find_tensors(location))
    inner = dict(stated.get("transformer_layer_config") or stated)
    strange = [key for key in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm") if stated.get(key)]
    strange += [key for key in tensors if key == "mask_hidden"]
    if stated.get("speculators_model_type") == "eagle3" and "norm_before_residual" not in stated:
        strange.append("norm_before_residual")  # see ``Eagle3Head``
    if strange:
        raise UnsupportedModel(f"{name} has {', '.join(strange)}, which SGLang's EAGLE-3 heads have not")
    inner |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "tie_word_embeddings": False,
        # Counted by the outputs of layers.
        "eagle_config": {
            LAYER_IDS: [i - 1 for i in stated_features(stated, num_layers)],
            "use_aux_hidden_state": True,
        },
    }
    renamed = {key.replace("layers.0.", "midlayer."): value.contiguous() for key, value in tensors.items()}
    _write(folder, inner, renamed)


def convert_to_zlab(location: str, num_layers: int, folder: Path, name: str) -> None:
    """Write a DFlash head in z-lab's layout, which SGLang reads: its embedding and LM head are the target's.

    Args:
        location: a head in the speculators layout; a folder or hub id.
        num_layers: of the target.
        name: for messages.

    Raises:
        UnsupportedModel: the layout cannot state a part of it.
        ModelNotFound, ModelCorrupt
    """
    stated, tensors = read_config(location), read_tensors(location, find_tensors(location))
    inner = dict(stated["transformer_layer_config"])
    # The output of layer i is the input of layer i + 1.
    layer_ids = [i - 1 for i in stated["aux_hidden_state_layer_ids"]]
    obstacles = {
        "a reduced vocabulary": "d2t" in tensors,
        "sliding windows": "sliding_attention" in (inner.get("layer_types") or ()),
        "the embedding of the target among its hidden states": min(layer_ids) < 0,
    }
    if strange := [part for part, is_there in obstacles.items() if is_there]:
        raise UnsupportedModel(f"{name} has {' and '.join(strange)}, which z-lab's layout of DFlash cannot state")
    inner |= {
        "architectures": ["DFlashDraftModel"],
        "block_size": stated["block_size"],
        "num_target_layers": num_layers,
        "dflash_config": {"mask_token_id": stated["mask_token_id"], "target_layer_ids": layer_ids},
        "tie_word_embeddings": False,
        "dtype": stated.get("dtype"),
    }
    theirs = ("embed_tokens.", "lm_head.", "verifier_", "t2d")
    own = {key: value.contiguous() for key, value in tensors.items() if not key.startswith(theirs)}
    _write(folder, inner, own)


def _write(folder: Path, stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
