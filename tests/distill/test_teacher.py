"""The target as training reads it: states that are kept give the logits of a target that is read each time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteConfig, GraniteForCausalLM

from outrider.distill.chains import ChainStudent, new_eagle3
from outrider.distill.student import ModelStudent, Shape, new_draft
from outrider.distill.teacher import Teacher
from outrider.errors import OptionError
from outrider.measure.teacher_forcing import Text
from toys import as_lm, tiny_llama

IDS = torch.randint(60, (3, 10), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("token_ids", [None, torch.tensor([1, 5, 40])], ids=["all", "reduced"])
def test_a_target_reads_each_sequence_once(tmp_path: Path, token_ids: Tensor | None) -> None:
    target = as_lm(tiny_llama(0, num_layers=4).float())
    read: list[int] = []
    target.model.register_forward_hook(
        lambda _, args, kwargs, output: read.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    logits, states = Teacher(target, (1, 3), token_ids).read(IDS)
    assert logits.shape[-1] == (60 if token_ids is None else 3)
    kept = Teacher(target, (1, 3), token_ids, tmp_path)
    for rows, num_read in ((slice(2), 2), (slice(2), 0), (slice(3), 1)):  # the third is new
        read.clear()
        found = kept.read(IDS[rows])
        assert sum(read) == num_read
        for one, other in zip(found, (logits, states), strict=True):
            torch.testing.assert_close(one, other[rows], rtol=0, atol=0.01 * float(other.abs().max()))
    # A damaged file is made anew; other features are other states.
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    read.clear()
    kept.read(IDS)
    Teacher(target, (2,), token_ids, tmp_path).read(IDS)
    assert read == [1, 3]


def test_held_out_sequences_are_read_once(tmp_path: Path) -> None:
    target = as_lm(tiny_llama(0, num_layers=4).float())
    texts = [Text(row[: 10 - i], 2) for i, row in enumerate(IDS.tolist())]
    head = new_eagle3(target, torch.tensor([1, 5, 40]), seed=0)
    alphas, read = [], []
    target.model.register_forward_hook(lambda *_: read.append(1))
    for folder in (None, tmp_path, tmp_path):
        read.clear()
        student = ChainStudent(target, head, 2, folder)
        found = student.alphas(student.as_stored("draft", torch.float32), texts)
        alphas.append([one.value for one in found])
    assert not read and alphas[1] == alphas[2] == pytest.approx(alphas[0], abs=0.01)


def test_a_target_that_scales_its_logits_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(vocab_size=60, num_key_value_heads=2, logits_scaling=8.0, **sizes))
    with pytest.raises(OptionError, match="more than a product in its LM head"):
        Teacher(as_lm(model), folder=tmp_path).read(IDS)
    assert not list(tmp_path.iterdir())


def test_logits_of_few_tokens() -> None:
    """Those of the whole model, with the same gradients; and a draft from its files drafts no other token."""
    target: Any = as_lm(tiny_llama(0).float())
    few = torch.tensor([1, 5, 40])
    found = []
    for token_ids in (None, few):
        draft = new_draft(target.model.config, Shape(1, 32), seed=0)
        student = ModelStudent(target, draft, None, token_ids)
        ((p, q),) = student.pairs(student.module(input_ids=IDS), IDS)
        p, q = (p[..., few], q[..., few]) if token_ids is None else (p, q)
        (q * p).sum().backward()
        found.append([p, q, *(weight.grad for weight in draft.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    drafter = student.as_stored("draft", torch.float32)
    lm: Any = drafter.lm
    logits = lm.forward(IDS, torch.arange(10).expand_as(IDS), lm.new_cache(3, 10), 10)
    assert (logits.softmax(-1) > 0).nonzero()[:, -1].unique().tolist() == few.tolist()
    assert isinstance(draft.get_output_embeddings(), nn.Linear) and "forward" not in vars(draft.get_output_embeddings())
