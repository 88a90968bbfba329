"""The keys of a GGUF file's architecture, as fields of Transformers' configurations: those that families share.

Every key is read, or known to be without effect; a file with any other is refused by name, since it states a model that
would not be the one that runs.

Source: ``load_hparams`` in llama.cpp's src/llama-model.cpp, and src/llama-context.cpp for what scalings mean, in the
build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.gguf.file import GgufFile
from outrider.models.kinds import check_counts

# Keys without effect, whatever they state: llama.cpp takes the vocabulary from its tokens, the kind of norms from the
# architecture (converters may write what both kinds add), and nothing from the others.
_WITHOUT_EFFECT = {
    *("vocab_size", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "rope.scaling.finetuned"),
    *("tensor_data_layout", "pooling_type"),  # the latter of embeddings
    *("mrope_sections", "rope.mrope_section", "rope.mrope_interleaved"),  # of Ollama, which are stated elsewhere
}
# Keys without effect if they have this value.
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("attention.causal", "norm_top_k_prob", "ssm.v_head_reordered"), True),  # two of Ollama
    **dict.fromkeys(("attention.max_alibi_bias", "attention.sliding_window"), 0),
    **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count"), 0),
    **dict.fromkeys(("expert_weights_scale", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"), 1.0),
}
# Keys of encoders of images and sounds, which Ollama writes to the file of the model.
_OF_IMAGES = ("vision.", "audio.", "mm.")


class Stated:
    """The keys of a file's architecture, and the tensors that are part of a configuration; ``read_tensors`` names those
    that were read, or have no effect. Layers of an assistant are all counted as layers for later tokens."""

    def __init__(self, file: GgufFile, name: str, *, is_assistant: bool = False) -> None:
        self.file, self.name, self._is_assistant = file, name, is_assistant
        self.architecture: str = file.metadata.get("general.architecture", "")
        prefix = f"{self.architecture}."
        self._values = {key.removeprefix(prefix): file.metadata[key] for key in file.metadata if key.startswith(prefix)}
        check_counts(name, self._values)
        self._unread = {*self._values}
        self.read_tensors: set[str] = set()

    @property
    def num_layers(self) -> int:
        """Layers of the model itself, which come first; a head for later tokens (MTP) has the others. Of an
        assistant, all layers."""
        number: int = self.take("block_count")
        num_others: int = self.take("nextn_predict_layers", 0)
        return number if self._is_assistant else number - num_others

    def take(self, key: str, default: Any = None) -> Any:
        """Value of a key. Raises ModelCorrupt: the file lacks it, and there is no default."""
        self._unread.discard(key)
        value = self._values.get(key, default)
        if value is None:
            raise ModelCorrupt(f"{self.name}: the file states no {self.architecture}.{key}")
        return value

    def each(self, key: str, default: Any = None) -> list[Any]:
        """Values of a key for each layer of the model, which may have one for all."""
        value = self.take(key, default)
        if not isinstance(value, list):
            return [value] * self.num_layers
        if len(value) < self.num_layers:
            raise self.refusal(key, value)
        return value[: self.num_layers]

    def single(self, key: str, default: Any = None) -> Any:
        """Value of a key that may have one for each layer. Raises UnsupportedModel: they differ."""
        values = self.each(key, default)
        if len({*values}) != 1:
            raise self.refusal(key, values)
        return values[0]

    def check(self, key: str, value: Any) -> None:
        """Raises UnsupportedModel: the file states another value of a key than this one."""
        if (own := self.take(key, value)) != value:
            raise self.refusal(key, own)

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def rows(self, tensor: str) -> int:
        """First size of a tensor. Raises ModelCorrupt: there is none."""
        if not self.has(tensor):
            raise ModelCorrupt(f"{self.name}: the file has no tensor {tensor}")
        return self.file.tensors[tensor].shape[0]

    def check_shape(self, tensor: str, *shape: int) -> None:
        """Raises ModelCorrupt: the keys state another shape than a tensor has."""
        if (own := self.file.tensors[tensor].shape if self.has(tensor) else ()) != shape:
            told = f"by the file's keys {tensor} has the shape {list(shape)}; it has {list(own)}"
            raise ModelCorrupt(f"{self.name}: {told}")

    def numbers(self, tensor: str, count: int) -> list[float]:
        """Numbers of a tensor. Raises ModelCorrupt: they are not ``count``, or there is none."""
        if not self.has(tensor) or self.file.tensors[tensor].shape != (count,):
            raise ModelCorrupt(f"{self.name}: the file lacks {tensor}, of {count} numbers, which its scaling needs")
        self.read_tensors.add(tensor)
        return [float(number) for number in self.file.tensors[tensor].numbers()]

    def refusal(self, key: str, value: Any) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.name}: the file states {self.architecture}.{key} = {value!r:.60}, which is not known for this "
            "architecture: its effect would be missing"
        )

    def check_all_read(self) -> None:
        """Raises UnsupportedModel: a key has an effect that is not known here."""
        for key in sorted(self._unread - _WITHOUT_EFFECT):
            value = self._values[key]
            if not key.startswith(_OF_IMAGES) and (key not in _NEUTRAL or value != _NEUTRAL[key]):
                raise self.refusal(key, value)


def head_fields(stated: Stated) -> dict[str, Any]:
    num_heads = stated.single("attention.head_count")
    counts = stated.each("attention.head_count_kv", num_heads)
    if len({*counts} - {0}) != 1:  # 0 in layers without attention
        raise stated.refusal("attention.head_count_kv", counts)
    head_dim = stated.take("attention.key_length", stated.take("embedding_length") // num_heads)
    stated.check("attention.value_length", head_dim)
    return {"num_attention_heads": num_heads, "num_key_value_heads": max(counts), "head_dim": head_dim}


def rope_parameters(stated: Stated, head_dim: int, *, is_partial: bool = False) -> dict[str, Any]:
    """Base and scaling of rotary positions, of a part of each head if the model may rotate a part."""
    found = {"rope_theta": stated.take("rope.freq_base", 10_000.0)}
    if (num_rotated := stated.take("rope.dimension_count", head_dim)) != head_dim:
        if not is_partial:
            raise stated.refusal("rope.dimension_count", num_rotated)
        found["partial_rotary_factor"] = num_rotated / head_dim
    return found | _scaling(stated, num_rotated // 2)


def _scaling(stated: Stated, num_frequencies: int) -> dict[str, Any]:
    kind = stated.take("rope.scaling.type", "linear")
    factor = stated.take("rope.scaling.factor", stated.take("rope.scale_linear", 0.0)) or 1.0  # 0: not scaled
    if factor < 1.0:
        raise stated.refusal("rope.scaling.factor", factor)
    longest = stated.take("context_length")
    original = stated.take("rope.scaling.original_context_length", longest)
    attention_factor = stated.take("rope.scaling.attn_factor", 1.0)
    tensors = {name for name in _DIVISORS if stated.has(name)}
    if kind == "longrope" or tensors == {_SHORT, _LONG}:
        if factor != 1.0:
            raise stated.refusal("rope.scaling.factor", factor)
        divisors = {"short_factor": _SHORT, "long_factor": _LONG}
        found: dict[str, Any] = {key: stated.numbers(name, num_frequencies) for key, name in divisors.items()}
        found |= {"factor": longest / original, "attention_factor": attention_factor}
        return found | {"rope_type": "longrope", "original_max_position_embeddings": original}
    betas = {name: stated.take(f"rope.scaling.yarn_{name}", value) for name, value in _BETAS.items()}
    if kind == "yarn" and factor != 1.0 and not tensors:
        usual = 0.1 * math.log(factor) + 1.0
        own = stated.take("rope.scaling.yarn_attn_factor", 1.0)  # if any, converters write the usual factor here
        if own != 1.0 and not math.isclose(own, usual, rel_tol=1e-3):
            raise stated.refusal("rope.scaling.yarn_attn_factor", own)
        found = {"factor": factor, "attention_factor": attention_factor * usual, **betas}
        return found | {"rope_type": "yarn", "original_max_position_embeddings": original}
    if attention_factor != 1.0:
        raise stated.refusal("rope.scaling.attn_factor", attention_factor)
    if kind == "linear" and factor != 1.0 and not tensors:
        return {"rope_type": "linear", "factor": factor}
    if kind not in ("linear", "yarn", "none") or (kind != "none" and factor != 1.0):
        raise stated.refusal("rope.scaling.type", kind)
    if not tensors:
        return {"rope_type": "default"}
    # Llama 3's scaling, as divisors of the frequencies: longrope whose long and short ones are equal.
    found = dict.fromkeys(("short_factor", "long_factor"), stated.numbers(_ALL, num_frequencies))
    found |= {"attention_factor": 1.0, "factor": 1.0, "original_max_position_embeddings": longest}
    return found | {"rope_type": "longrope"}


def proportional_rope(stated: Stated, head_dim: int) -> dict[str, Any]:
    """Rotary positions of a part of each head, by the frequencies that the whole head would have. The file has
    divisors: 1, and one beyond all bounds for what is not rotated."""
    divisors, base = stated.numbers(_ALL, head_dim // 2), stated.take("rope.freq_base", 10_000.0)
    num_rotated = divisors.count(1.0)
    if divisors[:num_rotated] != [1.0] * num_rotated or any(one < 1e20 for one in divisors[num_rotated:]):
        raise UnsupportedModel(f"{stated.name}: the file has a tensor {_ALL} of other numbers than 1 and 1e30")
    stated.check("rope.dimension_count", head_dim)
    return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": 2 * num_rotated / head_dim}


def two_ropes(stated: Stated, full: dict[str, Any], theta: float = 10_000.0) -> dict[str, Any]:
    """Field of the ropes of layers without and with a window, the latter of another base."""
    local = {"rope_type": "default", "rope_theta": stated.take("rope.freq_base_swa", theta)}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # functions that weigh experts, by llama.cpp's numbers
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_ALL, _SHORT, _LONG = _DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def layer_types(stated: Stated, period: int) -> list[str]:
    """Layers with a window, and each ``period``-th one without; or as the file states."""
    pattern = stated.take("attention.sliding_window_pattern", period)
    if isinstance(pattern, int):
        has_window = [pattern == 0 or (i + 1) % pattern != 0 for i in range(stated.num_layers)]
    else:
        has_window = stated.each("attention.sliding_window_pattern")
    return ["sliding_attention" if one else "full_attention" for one in has_window]


def decoder_fields(stated: Stated, *, is_partial: bool = False) -> dict[str, Any]:
    """Heads, rotary positions and the width of the MLP."""
    heads = head_fields(stated)
    rope = rope_parameters(stated, heads["head_dim"], is_partial=is_partial)
    width = stated.single("feed_forward_length", 0)  # 0 in models of experts alone
    return heads | {"intermediate_size": width, "rope_parameters": rope}


def whole_fields(stated: Stated, *, is_partial: bool = False) -> dict[str, Any]:
    """Fields of a decoder whose configuration has no size of heads, since heads share the hidden size."""
    fields = decoder_fields(stated, is_partial=is_partial)
    head_dim = fields.pop("head_dim")
    if head_dim * fields["num_attention_heads"] != stated.take("embedding_length"):
        raise stated.refusal("attention.key_length", head_dim)
    return fields


def expert_fields(
    stated: Stated,
    *,
    number: str = "num_experts",
    is_normalized: bool = True,
    gate: int = SOFTMAX,
    has_groups: bool = False,
) -> dict[str, Any]:
    """Numbers and width of experts. ``number`` names the field for their number; the weights of the chosen ones are
    divided by their sum if ``is_normalized``; ``gate`` is llama.cpp's number of the function that makes weights of
    scores."""
    stated.check("expert_weights_norm", is_normalized)
    stated.check("expert_gating_func", gate)
    for key in ("expert_group_count", "expert_group_used_count"):
        if (own := stated.take(key, 1)) > 1 and not has_groups:
            raise stated.refusal(key, own)
    num_used, width = stated.single("expert_used_count"), stated.single("expert_feed_forward_length", 0)
    width = width or stated.single("feed_forward_length") // max(num_used, 1)
    return {number: stated.take("expert_count"), "num_experts_per_tok": num_used, "moe_intermediate_size": width}


def routed_fields(stated: Stated, is_normalized: bool | None = None) -> dict[str, Any]:
    """Experts whose scores are logistic, some shared by all tokens, in a model whose file says how weights are scaled.
    Whether they are divided by their sum is given if the file need not say."""
    is_normalized = stated.take("expert_weights_norm", is_normalized)
    options: Any = {"is_normalized": bool(is_normalized), "gate": SIGMOID, "has_groups": True}
    fields = expert_fields(stated, number="n_routed_experts", **options)
    number, num_groups = fields["n_routed_experts"], max(stated.take("expert_group_count", 1), 1)
    num_used = stated.take("expert_group_used_count", 0)
    if num_groups > 1 and (number % num_groups or num_groups >= number or not 0 < num_used < num_groups):
        raise ModelCorrupt(
            f"{stated.name}: the file states {number} experts in {num_groups} groups, {num_used} of them used "
            f"({stated.architecture}.expert_group_count, expert_group_used_count)"
        )
    return {
        **fields,
        "n_group": num_groups,
        "topk_group": num_used if num_groups > 1 else 1,
        "n_shared_experts": stated.take("expert_shared_count"),
        "norm_topk_prob": is_normalized,
        "routed_scaling_factor": stated.take("expert_weights_scale", 1.0),
    }


def query_scale(stated: Stated, fields: Mapping[str, Any], num_layers_of_largest: int) -> dict[str, Any]:
    """Scale of Gemma's queries. That of the largest models is the hidden size over the heads, which no key states:
    llama.cpp counts layers, too."""
    is_largest, width = stated.num_layers == num_layers_of_largest, stated.take("embedding_length")
    return {"query_pre_attn_scalar": width // fields["num_attention_heads"] if is_largest else fields["head_dim"]}
