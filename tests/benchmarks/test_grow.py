"""Growing a checkpoint changes its cost and not its logits."""

import pytest
import torch
from transformers import PreTrainedModel

from scripts import script
from toys import tiny_llama

grow_script = script("benchmarks/grow.py")


def small_llama(*, is_tied: bool, num_kv_heads: int) -> PreTrainedModel:
    options = {"num_key_value_heads": num_kv_heads, "tie_word_embeddings": is_tied, "initializer_range": 0.02}
    return tiny_llama(vocab_size=61, context_len=64, **options)


@pytest.mark.parametrize(
    ("is_tied", "num_kv_heads", "width", "depth", "inner"),
    [(True, 4, 64, 2, 48), (False, 2, 32, 5, 48), (True, 1, 32, 2, 99), (False, 1, 96, 7, 200), (True, 2, 96, 7, 200)],
)
@torch.inference_mode()
def test_the_logits_stay(is_tied: bool, num_kv_heads: int, width: int, depth: int, inner: int) -> None:
    """To 1e-6, in width, depth, the feed-forward layers and all together (RMSNorm computes in float32, also here)."""
    small = small_llama(is_tied=is_tied, num_kv_heads=num_kv_heads)
    big = grow_script.grow(small, hidden_size=width, num_layers=depth, intermediate_size=inner)
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    assert big.num_parameters() > small.num_parameters()
    torch.testing.assert_close(big(ids).logits, small(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [(16, 2, 48), (36, 2, 48), (32, 1, 48), (32, 2, 47)])
def test_a_model_only_grows(sizes: tuple[int, int, int]) -> None:
    width, depth, inner = sizes
    small = small_llama(is_tied=True, num_kv_heads=2)
    with pytest.raises(ValueError, match="grow|multiple"):
        grow_script.grow(small, hidden_size=width, num_layers=depth, intermediate_size=inner)
