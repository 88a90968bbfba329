"""Heads whose logits were computed once by the packages that define their layouts (``make_heads.py``)."""

from pathlib import Path
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from block_heads import frozen_tensors, write_block
from toys import random_model

FILE = Path(__file__).with_name("blocks.safetensors")
TEXT = (7, 3, 19, 3, 11, 0, 22, 8, 8, 14, 5, 1, 17, 20, 9, 2, 13, 6, 21, 10, 4, 18, 12, 16, 15, 7)
ANCHORS = (1, 4, 9, 15)  # positions of the last token
BLOCK_SIZE = 5
NUM_TOKENS = 24
KNOWN = [0, 1, 3, 5, 7, 8, 11, 14, 17, 19, 20, 22]


EAGLE3: dict[str, dict[str, bool]] = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "gpt-oss": {"norm_before_fc": True},
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 4}
_SCALED = {"input_embedding_scale": 2.5, "output_multiplier": 0.6, "final_logit_softcapping": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "speculators, few tokens": {"layout": "speculators", "token_ids": KNOWN},
    "speculators, sliding": {"layout": "speculators", "layers": _SLIDING},
    "speculators, sliding both ways": {"layout": "speculators", "layers": _SLIDING, "sliding_window_non_causal": True},
    "speculators, from the anchor": {"layout": "speculators", "sample_from_anchor": True},
    "zlab": {"layout": "zlab"},
    "zlab, sliding both ways": {"layout": "zlab", "layers": _SLIDING, "is_causal": False},
    "zlab, causal and scaled": {"layout": "zlab", "is_causal": True} | _SCALED,
    "speculators, second": {"layout": "speculators", "is_second": True, "layers": _SLIDING},
    "zlab, second": {"layout": "zlab", "is_second": True},
}


def target() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = random_model(LlamaForCausalLM, config, 0)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    model.load_state_dict(frozen_tensors(shapes, 1, 0.3))
    return model


def write(folder: Path, name: str, model: PreTrainedModel) -> None:
    write_block(folder, model, seed=2, block_size=BLOCK_SIZE, **CASES[name])
