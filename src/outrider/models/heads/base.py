"""Heads as modules: the interface that their sessions use, and the parts that they borrow from their target.

A head is built of Transformers' own layer classes, so that attention kernels and quantized weights work as
in models. Embedding, LM head and rotary embedding are mostly those of the target: the same modules, not copies.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.families.table import plan_of
from outrider.native.plan import AttentionPlan, MatrixPlan, NotPlanned, Plan, rename
from outrider.runtime.attention_mask import Visibility
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.forward import Results
from outrider.runtime.lm import LM


class Head(nn.Module, ABC):
    """A head for one target. One that drafts token by token has a ``forward`` of

        (ids [B, T], states [B, T, H], positions [B, T], additive mask [B, 1, T, view_len], cache) -> (hidden states
        from which the LM head computes logits [B, T, H], the states to be fed with the drafted tokens [B, T, H])

    Entry i of a sequence is the token at i + 1 together with the state of the token at i; its output predicts the token
    at i + 2. While drafting, the head's own output takes the place of the state. For heads that draft a block in one
    forward see block.py.

    Attributes:
        config: of its own decoder layers.
        features: the hidden states of the target that it reads: index i is the input of decoder layer i.
        window: the tokens that a token sees in its layers, itself included: its own context, if that of the target
            is longer; None for all.
        shared_layers: layers of the target whose keys and values it reads, in place of its own.
        state_size: H, numbers that it keeps of each token of the target, besides keys and values; may be 0.
        block_size: slots that it fills in one forward; 0 for a head that continues a sequence of entries.
        norm_output: while drafting token by token, the normed output takes the place of the state.
        layers: its decoder layers.
        cache_name: the argument of these that takes the cache.
        embed_tokens, lm_head, rotary_emb: its own, or those of the target.
        token_ids: the target's ids of its tokens, ascending, D numbers; None if it has the target's tokens. Logits are
            those of a smaller vocabulary.
    """

    config: Any
    features: tuple[int, ...]
    window: int | None = None
    shared_layers: tuple[int, ...] = ()
    state_size: int
    block_size: int = 0
    norm_output: bool = False
    layers: nn.ModuleList
    cache_name: str
    embed_tokens: Any
    lm_head: Any
    rotary_emb: Any
    token_ids: Tensor | None

    @property
    def token_weights(self) -> list[str]:
        """Names of its parameters with a row for each of its tokens."""
        return [f"lm_head.{name}" for name, _ in self.lm_head.named_parameters()]

    def fuse(self, features: Tensor) -> Tensor:
        """States of tokens, from the target's hidden states; here after its last norm. [B, T, F] -> [B, T, H]"""
        normed: Tensor = cast(Any, self.target_norm)(features)
        return normed

    @abstractmethod
    def plan(self) -> Plan:
        """Plan of the forward and the LM head for the native engine. Raises NotPlanned."""

    def about(self, states: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> dict[str, Any]:
        """Arguments of its layers beside the hidden states."""
        return {
            "attention_mask": mask,
            self.cache_name: cache,
            "position_ids": positions,
            "position_embeddings": rotation(self.rotary_emb, states, positions),
        }

    def layer_shapes(self, target: LM) -> list[LayerShape]:
        config, first = self.config, cast(Any, self.layers[0])
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = first.self_attn.head_dim
        return [LayerShape(num_heads, size, size, target.dtype, target.device)] * len(self.layers)

    def get_output_embeddings(self) -> Any:
        return self.lm_head


class HeadForward:
    """A head that runs in its own code. Attributes as of ``Forward``. The last layer of its cache holds the states of
    the target's tokens by place, if it keeps any, so that they are shared, moved and rolled back like keys."""

    num_shares, is_stepped, is_batch_invariant = 1, False, False

    def __init__(self, head: Head, target: LM) -> None:
        self.model: Any = head.eval().requires_grad_(False)
        self.weights = self.model
        self.device, self.dtype = target.device, target.dtype
        states = [LayerShape(1, head.state_size, 0, self.dtype, self.device)] if head.state_size else []
        self.layer_shapes = (*head.layer_shapes(target), *states)
        self.num_embedded = len(head.embed_tokens.weight)
        self.lock = target.lock  # they share modules, and the target's have hooks while it runs
        self.visibility = Visibility.of(head)
        if head.window is not None and not head.block_size:
            self.visibility = Visibility(("sliding_attention",), head.window, None)

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        columns: Tensor | None = None,
        num_logits: int | None = None,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
        states: Tensor | None = None,
    ) -> Results:
        """Feed entries, or a block. The only features are the states to be fed with the drafted tokens; of a block the
        outputs of its slots, without logits."""
        cache.at(positions, view_len, is_single=False, keeps_finite=keeps_finite)
        with self.lock:
            if states is None:
                return Results(ids.new_empty(0), (self.model(ids, positions, view_len, cache.argument),), None)
            mask = self.visibility.masks(positions, view_len, self.dtype)
            normed, outputs = self.model(ids, states, positions.clamp_min(0), mask, cache.argument)
            logits = self.model.lm_head(normed[:, -(num_logits or 0) :])
            return Results(logits, (outputs,), None)


def head_lm(head: Head, name: str, target: LM) -> LM:
    """The ``LM`` of a head, for its weights, cache and programs; its ``forward`` is never called."""
    backend = HeadForward(head, target)
    lm = LM(backend, name=name, vocab_size=target.vocab_size, context_len=target.context_len)
    lm.token_ids = head.token_ids
    return lm


def window_of(stated: Mapping[str, Any], target: LM) -> int | None:
    """The context that the configuration of a head's layers states, where that of the target is longer: a head that was
    trained on short texts drafts badly beyond it. Else None."""
    own: int | None = stated.get("max_position_embeddings")
    return own if own is not None and own < target.context_len else None


def plan_of_layers(head: Head, attention: Sequence[Mapping[str, Any]]) -> Plan:
    """Plan of a head's own layers, with these fields of the attention of each. Raises NotPlanned."""
    config, layers = head.config, []
    known = type(config)().to_dict()  # a checkpoint states more in the same place
    stated = {name: value for name, value in config.to_dict().items() if name in known}
    plan = rename(plan_of(type(config).from_dict(stated)), "model.", "")
    for layer, fields in zip(plan.layers, attention, strict=True):
        if not isinstance(layer.mixer, AttentionPlan):
            raise NotPlanned("its layers are no attention")
        layers.append(replace(layer, mixer=replace(layer.mixer, **fields)))
    return plan_of_head(replace(plan, layers=tuple(layers)), head)


def plan_of_head(plan: Plan, head: Head) -> Plan:
    """Plan with the embedding and the LM head of a head, whose logits are not scaled."""
    scale = float(getattr(head.embed_tokens, "scalar_embed_scale", 1.0))
    return replace(
        plan,
        embedding="embed_tokens.weight",
        lm_head=MatrixPlan("lm_head.weight"),
        embedding_scale=scale,
        logit_scale=1.0,
        logit_softcap=None,
    )


def layer_config(config: Any, num_layers: int, like: Any) -> Any:
    """Configuration of a head's layers: full attention, in the implementation of the target ``like``."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * num_layers
    config._attn_implementation = like.config._attn_implementation
    return config


def decoder_of(config: Any, name: str) -> Any:
    """Transformers' decoder of a configuration, without weights: for its layers and norms. Raises UnsupportedModel: its
    parts have other names."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        decoder = AutoModel.from_config(config)
    if not all(hasattr(decoder, part) for part in ("layers", "norm", "rotary_emb")):
        raise UnsupportedModel(f"{name} has layers of a {config.model_type}, which heads cannot be built of here")
    return decoder


def rotation(rotary: Any, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines at positions [B, T]. Where a multimodal rotary embedding has sections (time, height, width),
    text has one position in all: some releases of Transformers want one for each."""
    sections = getattr(rotary, "mrope_section", None)
    cos, sin = rotary(states, positions.expand(len(sections), -1, -1) if sections else positions)
    return cos, sin


def embedding_of(target: LM) -> Any:
    """Weight of the target's embedding. [V, H]"""
    return target.model.get_input_embeddings().weight


def own_tensors(stored: Mapping[str, Tensor], target: LM) -> tuple[dict[str, Tensor], Tensor | None]:
    """Tensors of a head's checkpoint, named as in the speculators layout, without those for training and without an
    embedding that is the target's; and ``d2t``: ids of the target less those of the head, D numbers, None if the head
    has the target's tokens."""
    unused = ("t2d", "verifier_norm.", "verifier_lm_head.")  # for training
    kept = {key: value for key, value in stored.items() if not key.startswith(unused)}
    tensors = {key.replace("midlayer.", "layers.0."): value for key, value in kept.items()}
    own, weight = embedding_of(target), tensors.get("embed_tokens.weight")
    # Not that of a skeleton, which has no values.
    if weight is not None and not own.is_meta and type(own) is nn.Parameter and weight.shape == own.shape:
        if bool(torch.equal(weight.to(own.device, own.dtype), own)):
            del tensors["embed_tokens.weight"]
    return tensors, tensors.pop("d2t", None)


def set_vocabulary(head: Head, tensors: Mapping[str, Tensor], target: LM) -> None:
    """Give a head the embedding and the LM head that its checkpoint has, else those of the target."""
    model = target.model
    head.embed_tokens, head.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    with torch.device("meta"):
        if (weight := tensors.get("embed_tokens.weight")) is not None:
            head.embed_tokens = nn.Embedding(*weight.shape)
        if (weight := tensors.get("lm_head.weight")) is not None:
            head.lm_head = nn.Linear(head.config.hidden_size, len(weight), bias=False)


def complete(head: Any, tensors: Mapping[str, Tensor], offsets: Tensor | None, name: str, target: LM) -> None:
    """Give a head its weights and its tokens, and check that it is for this target. Logits of tokens that the target
    does not have are dropped; ``tensors`` and ``offsets`` are those of ``own_tensors``. Raises ModelCorrupt."""
    num_layers, width = len(target.model.get_decoder().layers), len(head.features) * embedding_of(target).shape[1]
    if head.fc.in_features != width:
        raise ModelCorrupt(
            f"{name} is for another target: it reads {head.fc.in_features} numbers of each token, and "
            f"{len(head.features)} hidden states of {target.name} have {width}"
        )
    if any(not 0 <= i <= num_layers for i in head.features):
        raise ModelCorrupt(f"{name} is for another target: it reads layers {head.features} of {num_layers}")
    shared = [part for part in ("embed_tokens.", "lm_head.") if f"{part}weight" not in tensors]
    fill(head, tensors, name, target, shared=shared)
    size, embedding = head.config.hidden_size, head.embed_tokens.weight
    if "embed_tokens." in shared and embedding.shape[1] != size:
        raise ModelCorrupt(f"{name} has no embedding of its own, and hidden states of {size} numbers")
    if len(embedding) < target.vocab_size:
        raise ModelCorrupt(f"{name} has {len(embedding)} tokens; {target.name} has {target.vocab_size}")
    num_tokens, ids = len(head.lm_head.weight), None
    if offsets is None and num_tokens < target.vocab_size:
        raise ModelCorrupt(f"{name} has logits for {num_tokens} tokens, and no d2t that names them")
    if offsets is not None:
        if "lm_head." in shared:
            raise ModelCorrupt(f"{name} has a d2t and no LM head of its own")
        if num_tokens != len(offsets):
            raise ModelCorrupt(f"{name} has logits for {num_tokens} tokens, and d2t names {len(offsets)}")
        ids = torch.arange(len(offsets)) + offsets.long()
        is_token = (ids >= 0) & (ids < len(embedding_of(target)))
        is_known = is_token & (ids < target.vocab_size)  # others are padding of the target's embedding
        if not bool(is_token.all()) or not bool(is_known.any()) or len(ids.unique()) < len(ids):
            raise ModelCorrupt(f"{name} is for another target: its d2t does not name tokens of {target.name}")
        rows = is_known.nonzero()[:, 0]
        rows = rows[ids[rows].argsort()]  # ascending
        if not torch.equal(rows, torch.arange(len(ids))):
            weight = head.lm_head.weight
            head.lm_head.weight = nn.Parameter(weight[rows.to(weight.device)], requires_grad=False)
        ids = ids[rows].to(target.device)
    head.register_buffer("token_ids", ids, persistent=False)


def fill(head: Head, tensors: Mapping[str, Tensor], name: str, target: LM, *, shared: Sequence[str]) -> None:
    """Give a head its weights, in the type and on the device of its target, some of whose modules it shares, by
    beginnings of names. Raises ModelCorrupt: a weight is missing or left over; of another shape: RuntimeError."""
    placed = {
        key: value.to(target.device, target.dtype if value.is_floating_point() else value.dtype)
        for key, value in tensors.items()
    }
    found = head.load_state_dict(placed, strict=False, assign=True)
    if lacking := sorted(key for key in found.missing_keys if not key.startswith(tuple(shared))):
        raise ModelCorrupt(f"{name} lacks {len(lacking)} weights of the head, {lacking[0]} among them")
    if any("weight_scale" in key for key in found.unexpected_keys):
        raise UnsupportedModel(f"{name} has quantized weights, which heads cannot have here")
    if strange := sorted(found.unexpected_keys):
        raise ModelCorrupt(
            f"{name} has {len(strange)} weights that do not belong to a head of this kind, {strange[0]} among them"
        )
