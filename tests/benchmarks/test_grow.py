"""Growing a checkpoint changes its cost and not its logits."""

import pytest
import torch

from scripts import script
from toys import tiny_llama

grow_script = script("benchmarks/grow.py")


@pytest.mark.parametrize(
    ("is_tied", "num_kv_heads", "width", "depth", "inner"),
    [(True, 4, 64, 2, 48), (False, 2, 32, 5, 48), (False, 1, 96, 7, 200), (True, 2, 96, 7, 200)],
)
@torch.inference_mode()
def test_the_logits_stay(is_tied: bool, num_kv_heads: int, width: int, depth: int, inner: int) -> None:
    """To 1e-6, in width, depth, the feed-forward layers and all together (RMSNorm computes in float32, also here)."""
    options = {"num_key_value_heads": num_kv_heads, "tie_word_embeddings": is_tied, "initializer_range": 0.02}
    small = tiny_llama(vocab_size=61, context_len=64, **options)
    big = grow_script.grow(small, hidden_size=width, num_layers=depth, intermediate_size=inner)
    ids = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))
    assert big.num_parameters() > small.num_parameters()
    torch.testing.assert_close(big(ids).logits, small(ids).logits, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="grow|multiple"):
        grow_script.grow(small, hidden_size=36, num_layers=2, intermediate_size=47)
