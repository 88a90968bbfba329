"""Computes the logits of heads with the packages that define their layouts: eagle3.safetensors, blocks.safetensors.

    PYTHONPATH=tests:tests/support python tests/golden/make_heads.py SPECULATORS DFLASH

The arguments are folders of unpacked wheels: speculators 0.9.0 and dflash 0.1.0 (z-lab's). Neither need be installed.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

import golden.blocks as blocks
from heads import write_eagle3
from toys import tiny_llama

_NOTHING = -1e4  # logit of tokens that cannot be drawn


def _features(model: PreTrainedModel, layers: Sequence[int]) -> Tensor:
    """Hidden states of the text, as of Transformers. [1, L, F]"""
    states = model(input_ids=torch.tensor([blocks.TEXT]), output_hidden_states=True).hidden_states
    return torch.cat([states[i] for i in layers], dim=-1)


def _speculators(folder: Path, model: PreTrainedModel) -> Tensor:
    from speculators import SpeculatorModelConfig
    from speculators.model import SpeculatorModel

    model.save_pretrained(folder / "target")
    stated = json.loads((folder / "config.json").read_text())
    stated["speculators_config"] = {
        "algorithm": stated["speculators_model_type"],
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": blocks.BLOCK_SIZE - 1}],
        "verifier": {"name_or_path": str(folder / "target"), "architectures": ["LlamaForCausalLM"]},
    }
    (folder / "config.json").write_text(json.dumps(stated))
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = SpeculatorModel.from_pretrained(folder, config=config)
    head.load_verifier_weights()
    head = head.double().eval()
    ids, length = torch.tensor([blocks.TEXT]), len(blocks.TEXT)
    features = _features(model, config.aux_hidden_state_layer_ids)
    hidden, logits, _, _, places = head._backbone_forward(
        features,
        ids,
        torch.ones(1, length),
        torch.zeros(1, length, model.config.hidden_size).double(),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=length - blocks.BLOCK_SIZE,
    )
    size = blocks.BLOCK_SIZE
    rows = [places.view(-1, size)[:, 0].tolist().index(anchor) for anchor in blocks.ANCHORS]
    hidden, logits = hidden.view(-1, size, hidden.shape[-1])[rows], logits.view(-1, size, logits.shape[-1])[rows]
    first = 0 if config.sample_from_anchor else 1
    text = torch.tensor([blocks.TEXT[anchor : anchor + size] for anchor in blocks.ANCHORS])
    before = torch.cat((text[:, :1], text[:, :-1]), dim=1) if first else text
    if config.speculators_model_type == "dflash2":
        candidates, scores = head.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, _NOTHING).scatter(-1, candidates, scores)
    return logits[:, first:]


def _zlab(folder: Path, model: PreTrainedModel) -> Tensor:
    from dflash.model import (
        DFlash2DraftModel,
        DFlashDraftModel,
        _draft_value,
        _raw_input_embeddings,
        extract_context_feature,
    )

    is_second = "DFlash2" in (folder / "config.json").read_text()
    kind = DFlash2DraftModel if is_second else DFlashDraftModel
    head = kind.from_pretrained(folder, dtype=torch.float64).eval()
    states = model(input_ids=torch.tensor([blocks.TEXT]), output_hidden_states=True).hidden_states
    features = extract_context_feature(states, head.target_layer_ids)
    found = []
    for anchor in blocks.ANCHORS:
        ids = torch.tensor([[blocks.TEXT[anchor], *[head.mask_token_id] * (head.block_size - 1)]])
        embedded = _raw_input_embeddings(model, ids, float(_draft_value(head.config, "input_embedding_scale", 1.0)))
        hidden = head(
            position_ids=torch.arange(anchor + head.block_size)[None],
            noise_embedding=embedded,
            target_hidden=features[:, :anchor],
        )[:, 1:]
        logits = head.compute_logits(hidden, model.lm_head)
        if is_second:  # it draws, so that each slot is computed for itself, after the token of the text
            for i in range(logits.shape[1]):
                before = torch.tensor([blocks.TEXT[anchor + i]])
                _, candidates, q = head.candidate_selector.select(
                    hidden[:, i : i + 1], logits[:, i : i + 1], before, 1.0
                )
                logits[:, i] = torch.full_like(logits[:, i], _NOTHING).scatter(
                    -1, candidates[:, 0], q[:, 0].double().log()
                )
        found.append(logits)
    return torch.cat(found)


def eagle3_tensors() -> dict[str, Tensor]:
    """Features, tokens, and logits of each variant along them [steps, L-1, D]: step j feeds the head's own outputs."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    target = tiny_llama(num_layers=4)
    vocab_size, size = target.config.vocab_size, target.config.hidden_size
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(1, 24, 3 * size, generator=generator).half()
    golden = {"features": features, "ids": torch.randint(vocab_size, (1, 24), generator=generator)}
    for name, options in blocks.EAGLE3.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            target.save_pretrained(folder / "target")
            write_eagle3(folder / "head", target, token_ids=list(range(1, vocab_size, 2)), **options)
            tensors = load_file(folder / "head" / "model.safetensors")
            tensors = {key: one.half() if one.is_floating_point() else one for key, one in tensors.items()}
            stated = json.loads((folder / "head" / "config.json").read_text())
            layers = LlamaConfig.from_dict(stated.pop("transformer_layer_config"))
            layers._attn_implementation = "eager"
            known = ("norm_", "fc_norm", "draft_", "eagle_")
            verifier = VerifierConfig(name_or_path=str(folder / "target"), architectures=["LlamaForCausalLM"])
            how = SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=verifier,
            )
            own = {key: value for key, value in stated.items() if key.startswith(known)}
            config = Eagle3SpeculatorConfig(transformer_layer_config=layers, speculators_config=how, **own)
            model = Eagle3DraftModel(config).double().eval()
            result = model.load_state_dict(tensors, strict=False)
        assert not result.unexpected_keys and all("verifier" in key for key in result.missing_keys), result
        found: list[Tensor] = []
        model.lm_head.register_forward_hook(lambda module, args, output, found=found: found.append(output[0]))
        model(
            hidden_states=features[:, :-1].double(),
            input_ids=golden["ids"][:, 1:],
            document_ids=torch.zeros(1, 23, dtype=torch.long),
            position_ids=torch.arange(1, 24)[None],
            ttt_steps=4,
        )
        golden |= {f"head.{key}": value for key, value in tensors.items()}
        golden[f"{name}.logits"] = torch.stack(found[:4]).float()
    return golden


@torch.inference_mode()
def main() -> None:
    sys.path[:0] = sys.argv[1:]
    unused = ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "hs_connectors", "aiohttp")
    sys.modules |= {name: MagicMock() for name in unused}
    version = metadata.version
    metadata.version = lambda name: "0.9.0" if name == "speculators" else version(name)
    makers = {"speculators": _speculators, "zlab": _zlab}
    model, found = blocks.target(), {}
    for name, case in blocks.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            blocks.write(Path(folder), name, model)
            found[f"{name}: logits"] = makers[case["layout"]](Path(folder), model).float().contiguous()
    save_file(found, blocks.FILE)
    save_file(eagle3_tensors(), blocks.FILE.with_name("eagle3.safetensors"))


if __name__ == "__main__":
    main()
