"""Writes eagle3.safetensors: a tiny EAGLE-3 head, and its logits as the package ``speculators`` (0.9.0) computes them.

    python tests/golden/make_eagle3.py

The package is needed for this script only. The logits are those of its training forward: step j feeds the given tokens
and, from step 1 on, the head's own outputs. P-EAGLE feeds mask tokens then, after each place, all in one forward;
those whose place is beyond the tokens have no logits, here zeros.
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
PARALLEL = {"peagle": {"mask_id": 7}}
NUM_STEPS = 4


def main() -> None:
    target = tiny_llama(num_layers=4)
    vocab_size, size = target.config.vocab_size, target.config.hidden_size
    token_ids = list(range(1, vocab_size, 2))
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(1, 24, 3 * size, generator=generator).half().double()
    ids = torch.randint(vocab_size, (1, 24), generator=generator)
    golden = {"features": features.half(), "ids": ids}
    for name, options in (VARIANTS | PARALLEL).items():
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
            logits = parallel_logits_of if name in PARALLEL else logits_of
            golden[f"{name}.logits"] = logits(stated, tensors, folder / "target", features, ids).float()
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


def parallel_logits_of(
    stated: dict, tensors: dict, target: Path, features: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """[steps, L-1, D]"""
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core

    num = ids.shape[1] - 1
    depths = torch.arange(NUM_STEPS).repeat_interleave(num)
    anchors = torch.arange(num).repeat(NUM_STEPS)
    is_there = anchors + depths < num
    core.generate_cod_sample_indices = lambda **_: (anchors[is_there], depths[is_there])  # all of them
    core.compute_metrics = lambda **_: (None, {})
    model, found = model_of(PEagleDraftModel, PEagleSpeculatorConfig, stated, tensors, target)
    with torch.no_grad():
        model(
            hidden_states=features[:, :-1],
            input_ids=ids[:, 1:],
            document_ids=torch.zeros(1, num, dtype=torch.long),
            verifier_last_hidden_states=features[:, :-1, : model.hidden_size],
            num_depths=NUM_STEPS,
        )
    logits = torch.zeros(NUM_STEPS * num, found[0].shape[-1], dtype=torch.float64)
    logits[is_there] = found[0]
    return logits.view(NUM_STEPS, num, -1)


def model_of(
    kind: type, config_of: type, stated: dict, tensors: dict, target: Path
) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The package's model, and a list that its logits are added to."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layers = LlamaConfig.from_dict(stated.pop("transformer_layer_config"))
    layers._attn_implementation = "eager"
    known = ("norm_", "fc_norm", "draft_", "eagle_", "mask_")
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
