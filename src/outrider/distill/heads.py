"""Training of EAGLE-3 heads, by unrolling: as in a round, each later token is drafted from the head's own states.

The head that runs is that of inference (models/heads), over another cache. For every position of a sequence at once, a
round that begins there is followed along the sequence: step d reads the token at d places further on, attends to the
entries with the target's states up to the beginning of the round, and to the d entries of its own round since then.

Source: training-time test, Li et al. 2503.01840, section 3.2.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, LlamaConfig

from outrider.distill.student import Pair, Student, head_size, read_target
from outrider.drafters.base import Drafter
from outrider.drafters.heads import head_drafter
from outrider.errors import NumericsError
from outrider.measure.along import overlap
from outrider.measure.intervals import bounded_mean
from outrider.measure.teacher_forcing import Text
from outrider.models.heads.base import Head, embedding_of, head_lm, layer_config
from outrider.models.heads.chains import LAYER_IDS, Eagle3Head
from outrider.models.heads.loading import check_target
from outrider.models.weights import widened_weights
from outrider.records import Interval
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import spread

_BATCH = 8  # sequences whose alpha is measured together


def default_features(num_layers: int) -> tuple[int, int, int]:
    """Hidden states that a head reads: those of EAGLE-3; in a shallow target the inputs of other layers."""
    first, middle, last = 2, num_layers // 2, num_layers - 3
    return (first, middle, last) if first < middle < last else (min(1, num_layers - 1), middle, num_layers - 1)


def unroll(head: Head, ids: Tensor, target_logits: Tensor, features: Tensor, depth: int) -> Iterator[Pair]:
    """Follow rounds of ``depth`` drafted tokens along sequences [B, T], with the target's logits [B, T, V] and features
    [B, T, F].

    Yields:
        For each drafted token d = 0, 1, ...: logits of the target [B, T-1-d, V] and of the head [B, T-1-d, D], for the
        token at i + d + 2 in row i: the first token that the round can draft is at i + 2.
    """
    states = head.fuse(features.to(next(head.parameters()).dtype))
    cache, seen = DynamicCache(), torch.empty(0)
    for d in range(depth):
        num = ids.shape[1] - 1 - d  # rounds that have not reached the end of the sequence
        own = torch.eye(num, dtype=torch.bool, device=ids.device)
        # A round sees the same entries of earlier steps as before, and its own of this step.
        seen = torch.ones_like(own).tril() if d == 0 else torch.cat((seen[:num], own), dim=1)
        mask = torch.zeros(seen.shape, dtype=states.dtype, device=ids.device)
        mask = mask.masked_fill_(~seen, torch.finfo(states.dtype).min)[None, None]
        positions = torch.arange(d, d + num, device=ids.device).expand(len(ids), -1)
        outputs, states = head(ids[:, 1 + d :], states[:, :num], positions, mask, cache)
        yield target_logits[:, 1 + d :], head.lm_head(outputs)


def new_eagle3(target: LM, token_ids: Tensor | None, seed: int) -> Eagle3Head:
    """Create an EAGLE-3 head of one layer for a target, in float32. It drafts the tokens with these ids, ascending, or
    all.

    It begins with the deepest of the target's states, and with the target's norm and LM head, which turn that state
    into logits; its layer is random. Its embedding is the target's: seen, and not a part of it, so that it is neither
    trained nor stored.
    """
    check_target(target)
    model, size = target.model, embedding_of(target).shape[1]
    source = model.config.get_text_config(decoder=True)
    rope_theta = (getattr(source, "rope_parameters", None) or {}).get("rope_theta", 10_000.0)
    config = LlamaConfig(  # known to the engines as EAGLE-3
        vocab_size=len(embedding_of(target)),
        hidden_size=source.hidden_size,
        intermediate_size=getattr(source, "intermediate_size", None) or 4 * source.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=source.num_attention_heads,
        num_key_value_heads=getattr(source, "num_key_value_heads", None) or source.num_attention_heads,
        head_dim=head_size(source),
        max_position_embeddings=target.context_len,
        rms_norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=False,
    )
    features = default_features(len(model.get_decoder().layers))
    output = widened_weights(nn.ModuleDict({"head": model.get_output_embeddings()}))["head.weight"]
    given = {
        "fc.weight": torch.cat((torch.zeros(size, (len(features) - 1) * size), torch.eye(size)), dim=1),
        # The weight of an RMS norm, however its kind stores it.
        "norm.weight": model.get_decoder().norm(torch.ones(1, 1, size, dtype=target.dtype, device=target.device))[0, 0],
        "lm_head.weight": output if token_ids is None else output[token_ids.to(output.device)],
    }
    head = Eagle3Head(layer_config(config, 1, model), {LAYER_IDS: features}, given, target)
    vars(head)["embed_tokens"] = head._modules.pop("embed_tokens")
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in head.state_dict().items():
        if name in given:
            tensors[name] = given[name].detach().to("cpu", torch.float32).clone()
        elif weight.ndim == 1:  # of a norm
            tensors[name] = torch.ones(weight.shape)
        else:
            tensors[name] = 0.02 * torch.randn(weight.shape, generator=generator)  # as in Llama
    head.load_state_dict(tensors, assign=True)
    head.register_buffer("token_ids", token_ids, persistent=False)
    return head.to(target.device)


class _Unrolled(nn.Module):
    """A head that runs along sequences with its target, which is no part of it."""

    def __init__(self, target: LM, head: Eagle3Head, depth: int) -> None:
        super().__init__()
        self.head, self._target, self._depth = head, target, depth

    def forward(self, input_ids: Tensor) -> list[Pair]:
        head = self.head
        read = read_target(self._target, input_ids, head.features, head.token_ids)
        return list(unroll(head, input_ids, *read, self._depth))


class HeadStudent(Student):
    """An EAGLE-3 head, from ``new_eagle3``, that is trained to draft ``depth`` tokens of a round."""

    later = 0.8  # Li et al.

    def __init__(self, target: LM, head: Eagle3Head, depth: int) -> None:
        self.target, self.head, self.depth = target, head, depth
        self.module = _Unrolled(target, head, depth)

    def pairs(self, outputs: list[Pair], ids: Tensor) -> list[Pair]:
        """The target's distribution among the head's tokens: alpha is highest where q is in proportion to it."""
        return [(target_logits, logits[..., : target_logits.shape[-1]]) for target_logits, logits in outputs]

    def as_stored(self, name: str, dtype: torch.dtype) -> Drafter:
        own = {id(self.head.embed_tokens): self.target.model.get_input_embeddings()}
        head = copy.deepcopy(self.head, own)
        for parameter in head.parameters():  # not buffers, which are not stored
            parameter.data = parameter.to(dtype).to(self.target.dtype)
        return head_drafter(head_lm(head, name, self.target))

    @torch.inference_mode()
    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        head = drafter.models[0].model
        sums: list[Tensor] = []  # of alpha over the tokens of each text, and their number [K, 2, B]
        for begin in range(0, len(texts), _BATCH):
            batch, found = texts[begin : begin + _BATCH], []
            ids = pad_sequence([torch.tensor(text.ids) for text in batch], batch_first=True)  # padding is not read
            ids = ids.to(self.target.device)
            ends = torch.tensor([(text.num_given, len(text.ids)) for text in batch], device=ids.device)
            steps = unroll(head, ids, *read_target(self.target, ids, head.features), self.depth)
            for d, (target_logits, logits) in enumerate(steps):
                logits = spread(logits, head.token_ids, self.target.vocab_size)
                both = overlap(target_logits.float().softmax(-1), logits.float().softmax(-1))
                places = torch.arange(2, 2 + both.shape[1], device=ids.device)  # of the first drafted tokens
                is_scored = (places >= ends[:, :1]) & (places + d <= ends[:, 1:])
                found.append(torch.stack((torch.where(is_scored, both, 0.0).sum(1), is_scored.sum(1))))
            sums.append(torch.stack(found).to("cpu", torch.float64))
        by_text = torch.cat(sums, dim=-1)
        if not bool(by_text.isfinite().all()):
            raise NumericsError(f"the head {drafter.name} gave NaN or infinite logits")
        return tuple(bounded_mean(step[0].tolist(), step[1].tolist(), (0.0, 1.0)) for step in by_text)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the head in the speculators layout, which vLLM reads too."""
        head, target = self.head, self.target
        tensors = {name: value.to("cpu", dtype).contiguous() for name, value in head.state_dict().items()}
        if head.token_ids is not None:
            ids = head.token_ids.cpu()
            is_known = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
            tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": is_known}
        left_out = "_name_or_path", "architectures", "dtype", "transformers_version"
        own = {key: value for key, value in head.config.to_dict().items() if key not in left_out}
        # "greedy" is the only type that the format has.
        proposal = {"proposal_type": "greedy", "speculative_tokens": self.depth}
        proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
        stated = {
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": target.name, "architectures": target.model.config.architectures or []},
            },
            # Older readers look for the base beside the parameters.
            "transformer_layer_config": own | {"rope_theta": own["rope_parameters"]["rope_theta"]},
            "draft_vocab_size": len(head.lm_head.weight),
            "target_hidden_size": None,  # that of the head
            "tie_word_embeddings": False,
            "dtype": str(dtype).removeprefix("torch."),
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            LAYER_IDS: list(head.features),
            "norm_before_residual": head.norm_before_residual,
            "norm_output": head.norm_output,
            "norm_before_fc": False,
            "fc_norm": False,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
