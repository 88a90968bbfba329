"""Writes eagle3.safetensors: a tiny EAGLE-3 head, and its logits as the package ``speculators`` (0.9.0) computes them.

    python tests/golden/make_eagle3.py

The package is needed for this script only. The logits are those of its training forward: step j feeds the given tokens
and, from step 1 on, the head's own outputs.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from heads import write_eagle3  # noqa: E402
from toys import tiny_llama  # noqa: E402

VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "residual": {"norm_before_residual": True},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "gpt-oss": {"norm_before_fc": True},
}
NUM_STEPS = 4


def main() -> None:
    target = tiny_llama(num_layers=4)
    vocab_size, size = target.config.vocab_size, target.config.hidden_size
    token_ids = list(range(1, vocab_size, 2))
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(1, 24, 3 * size, generator=generator).half().double()
    ids = torch.randint(vocab_size, (1, 24), generator=generator)
    golden = {"features": features.half(), "ids": ids}
    for name, options in VARIANTS.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            target.save_pretrained(folder / "target")
            write_eagle3(folder / "head", target, token_ids=token_ids, **options)
            tensors = {
                key: value.half() if value.is_floating_point() else value
                for key, value in load_file(folder / "head" / "model.safetensors").items()
            }
            golden |= {f"head.{key}": value for key, value in tensors.items()}
            stated = json.loads((folder / "head" / "config.json").read_text())
            golden[f"{name}.logits"] = logits_of(stated, tensors, folder / "target", features, ids).float()
    save_file(golden, HERE / "eagle3.safetensors")


def logits_of(stated: dict, tensors: dict, target: Path, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[steps, L-1, D]"""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    model, found = model_of(Eagle3DraftModel, Eagle3SpeculatorConfig, stated, tensors, target)
    with torch.no_grad():
        model(
            hidden_states=features[:, :-1],
            input_ids=ids[:, 1:],
            document_ids=torch.zeros(1, ids.shape[1] - 1, dtype=torch.long),
            position_ids=torch.arange(1, ids.shape[1])[None],
            ttt_steps=NUM_STEPS,
        )
    return torch.stack(found[:NUM_STEPS])


def model_of(
    kind: type, config_of: type, stated: dict, tensors: dict, target: Path
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The package's model, and a list that its logits are added to."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layers = LlamaConfig.from_dict(stated.pop("transformer_layer_config"))
    layers._attn_implementation = "eager"
    known = ("norm_", "fc_norm", "draft_", "eagle_")
    config = config_of(
        transformer_layer_config=layers,
        **{key: value for key, value in stated.items() if key.startswith(known)},
        speculators_config=SpeculatorsConfig(
            algorithm=stated["speculators_model_type"],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"]),
        ),
    )
    model = kind(config).double().eval()
    result = model.load_state_dict(
        {key: value.double() if value.is_floating_point() else value for key, value in tensors.items()}, strict=False
    )
    assert not result.unexpected_keys and all("verifier" in key for key in result.missing_keys), result
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, output: found.append(output.detach()[0]))
    return model, found


if __name__ == "__main__":
    main()
