"""Tiny multimodal models with random weights, so large that the text depends on the image."""

from collections.abc import Sequence
from typing import Any

import torch
import transformers as tf
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from pairs import NUM_WORDS, word_tokenizer

IMAGE = 90
"""Token in whose places an image stands."""
SIDE = 16
"""Pixels of an image."""
_TEXT = {"vocab_size": NUM_WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
_TEXT |= {"bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_VISION |= {"image_size": SIDE, "patch_size": 8}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 8}
_QWEN_VISION |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1, "vision_start_token_id": IMAGE + 2}
_QWEN_IDS |= {"vision_end_token_id": IMAGE + 3}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections), **more}}


def _config(name: str) -> Any:
    image = {"image_token_index": IMAGE, "image_token_id": IMAGE}
    match name:
        case "llava":
            return tf.LlavaConfig(
                vision_config=tf.CLIPVisionConfig(**_VISION), text_config=tf.LlamaConfig(**_TEXT), **image
            )
        case "qwen2_5_vl":
            vision = {**_QWEN_VISION, "window_size": 32, "fullatt_block_indexes": [0]}
            return tf.Qwen2_5_VLConfig(text_config=_TEXT | _rope(1, 1, 2), vision_config=vision, **_QWEN_IDS)
        case "qwen3_vl":
            vision = {**_QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
            text = _TEXT | _rope(2, 1, 1, mrope_interleaved=True)
            return tf.Qwen3VLConfig(text_config=text, vision_config=vision, **_QWEN_IDS)
        case "gemma3":
            text = {**_TEXT, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
            vision = {**_VISION, "vision_use_head": False}
            more = {"tie_word_embeddings": False, "mm_tokens_per_image": 4, "boi_token_index": IMAGE + 1}
            more |= {"eoi_token_index": IMAGE + 2}
            return tf.Gemma3Config(text_config=text, vision_config=vision, **image, **more)
    raise ValueError(name)


KINDS = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3")


def multimodal(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        model = tf.AutoModelForImageTextToText.from_config(_config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
    return model.eval().to(dtype)


def with_image(name: str, before: Sequence[int], after: Sequence[int], seed: int) -> dict[str, Any]:
    """A processor's output for a prompt with one image, of a colour with noise."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, more = 4, {}
    pixels = 2 * torch.randn(1, 3, 1, 1, generator=generator) + torch.rand(1, 3, SIDE, SIDE, generator=generator)
    if name.startswith("qwen"):  # wider than high: it has fewer places than tokens
        pixels = torch.rand(4 * 6, 3 * 2 * 8 * 8, generator=generator)
        num_tokens, more = 6, {"image_grid_thw": torch.tensor([[1, 4, 6]])}
    ids = torch.tensor([[*before, *[IMAGE] * num_tokens, *after]])
    if name.startswith("qwen"):
        more["mm_token_type_ids"] = (ids == IMAGE).long()
    elif name == "gemma3":
        more["token_type_ids"] = (ids == IMAGE).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, **more}


def llava_processor() -> Any:
    """For the kind "llava", with a chat template."""
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [f"w{IMAGE}"]})
    template = (
        "{% for message in messages %}{% for part in message.content %}"
        "{% if part.type == 'image' %}" + f"w{IMAGE}" + "{% else %} {{ part.text }} {% endif %}"
        "{% endfor %}{% endfor %} w3"
    )
    return tf.LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=template,
        image_token=f"w{IMAGE}",
        num_additional_image_tokens=1,
    )
