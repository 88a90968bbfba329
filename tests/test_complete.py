"""Many prompts through few slots, taken as slots become free; and threads that share one decoder."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import toys
from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import NumericsError, OptionError, OutriderError, PromptError
from outrider.records import Completion
from pairs import random_llama, word_tokenizer
from toys import llama_pair

OPTIONS = {"seed": 5, "max_new_tokens": 12}


def _decoder(**model: object) -> Decoder:
    return load(
        random_llama(**model), random_llama(seed=1), tokenizer=word_tokenizer(), draft_tokenizer=word_tokenizer()
    )


def _prompts(num_prompts: int) -> list[str]:
    return [" ".join(f"w{(7 * i + j) % 90}" for j in range(1 + i % 9)) for i in range(num_prompts)]


def test_each_prompt_as_if_it_were_alone() -> None:
    """With options of its own, in any order, each once."""
    decoder = _decoder()
    own = [{"max_new_tokens": 1 + i % 12, "seed": i, "temperature": (0.0, 1.0, 0.7)[i % 3]} for i in range(15)]
    done = dict(decoder.complete(zip(_prompts(15), own, strict=True), num_slots=4))
    assert sorted(done) == list(range(15))
    for i, prompt in enumerate(_prompts(15)):
        (alone,) = decoder.generate(prompt, **own[i])
        one = done[i]
        assert isinstance(one, Completion)
        found = one.token_ids, one.text, one.seed, one.finish_reason
        assert found == (alone.token_ids, alone.text, i, alone.finish_reason)


def test_prompts_are_taken_as_slots_become_free() -> None:
    """Far fewer are held than there are."""
    taken = 0

    def endless() -> Iterator[list[int]]:
        nonlocal taken
        while True:
            taken += 1
            yield [taken % 90]

    stream = _decoder().complete(endless(), num_slots=2, seed=5, max_new_tokens=4)
    for number, _ in zip(range(24), stream, strict=False):
        assert taken <= number + 8
    stream.close()


def test_errors_of_single_prompts_do_not_end_the_others() -> None:
    """A model that gives NaN after one word, an option that is out of range, a prompt that is too long."""
    decoder = _decoder(tie_word_embeddings=False)
    with torch.no_grad():
        decoder.target.model.get_input_embeddings().weight[77] = torch.nan
    prompts = ["w1 w2", "w77", ("w3", {"top_p": 7}), "w1 " * 100, "", "w4", ("w5", {"wrong": 1})]
    bias = {"logit_bias": {77: -1e9}}
    done = dict(decoder.complete(prompts, num_slots=2, **OPTIONS, **bias))
    kinds: dict[int, type] = {1: NumericsError, 2: OptionError, 3: PromptError, 4: PromptError, 6: OptionError}
    for i in range(len(prompts)):
        one = done[i]
        assert isinstance(one, kinds.get(i, Completion)), (i, one)
    assert isinstance(done[1], OutriderError) and "position 1 of the text" in str(done[1])
    assert done[0].token_ids == decoder.generate(["w1 w2"], **OPTIONS, **bias)[0].token_ids
    # Options of the call are checked at once.
    for options in ({"temprature": 1.0}, {"num_slots": 0}, {"num_draft_tokens": "much"}):
        with pytest.raises(OptionError, match="did you mean temperature|num_slots = 0|num_draft_tokens = 'much'"):
            decoder.complete([], **options)
    with pytest.raises(PromptError, match="prompts are one or several"):
        decoder.complete(5)
    assert list(decoder.complete([])) == []


@pytest.mark.parametrize("execution", ["eager", pytest.param("captured", marks=pytest.mark.slow)])
def test_eight_threads_may_share_a_decoder(execution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the texts that it gets alone."""
    monkeypatch.setattr(toys, "execution", toys.EXECUTIONS[execution])
    target, drafter = llama_pair()
    decoder = Decoder(target, None, frozenset(), drafter, num_draft_tokens=2)
    jobs = [[1 + i, 2, 3] for i in range(8)]

    def write(i: int) -> tuple[int, ...]:
        return decoder.generate([jobs[i]], seed=i, max_new_tokens=12)[0].token_ids

    alone = [write(i) for i in range(len(jobs))]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            assert list(pool.map(write, range(len(jobs)))) == alone
