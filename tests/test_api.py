"""The public door, on the embedded pair: text in, chunks out. Nothing here depends on what the pair says."""

import dataclasses
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch

import outrider
from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import NumericsError, OptionError, OutriderError, PromptError, UsageError
from outrider.options import Sampling, SamplingChanges
from outrider.records import Chunk, Completion, Stats, Timing
from outrider.sampling.rules import RULES
from pairs import embedded, random_llama, word_tokenizer
from toys import llama_pair

PROMPT = "Once upon a time there was a miller"
PROMPTS = [PROMPT, "8 * 12 = ", "The king said to his youngest daughter that the road to the sea was long, and"]


def parts(one: Completion | list[Chunk]) -> tuple[Any, ...]:
    """Of a completion, and of the chunks of one row: both are the same."""
    if isinstance(one, list):
        ids, origins = (tuple(i for chunk in one for i in getattr(chunk, name)) for name in ("token_ids", "origins"))
        stats = sum((chunk.stats for chunk in one), Stats())
        return "".join(chunk.text for chunk in one), ids, origins, one[-1].finish_reason, stats
    return one.text, one.token_ids, one.origins, one.finish_reason, one.stats


@pytest.mark.parametrize("acceptance", RULES)
def test_streams_are_what_generate_gathers(acceptance: str) -> None:
    """A round is accepted tokens, then a correction or a bonus; joined with the prompt, pieces are the text."""
    decoder = embedded()
    options: dict[str, Any] = {"seed": [1, 2, 3], "max_new_tokens": [4, 40, 30], "acceptance": acceptance}
    chunks = list(decoder.stream_many(PROMPTS, **options))
    for row, completion in enumerate(decoder.generate(PROMPTS, **options)):
        own = [chunk for chunk in chunks if chunk.row == row]
        assert parts(own) == parts(completion) and {chunk.finish_reason for chunk in own[:-1]} <= {None}
        ids = decoder.encode(PROMPTS[row])
        assert completion.num_prompt_tokens == len(ids)
        text = decoder.tokenizer.decode([*ids, *completion.token_ids], skip_special_tokens=True)  # type: ignore[union-attr]
        assert text == PROMPTS[row] + completion.text
    seen = set()
    for chunk in chunks:
        assert len(chunk.origins) == len(chunk.token_ids) == chunk.stats.num_generated_tokens >= 1
        assert "".join(text for text, _ in chunk.pieces) == chunk.text
        by_origin = [origin for _, origin in chunk.pieces]
        assert all(a != b for a, b in zip(by_origin, by_origin[1:], strict=False)) and {*by_origin} <= {*chunk.origins}
        if chunk.stats.num_truncated_rounds:
            assert chunk.finish_reason is not None and chunk.stats.num_rounds == 0
            assert set(chunk.origins) <= {"accepted"}
            continue
        *accepted, last = chunk.origins
        assert set(accepted) <= {"accepted"}
        assert chunk.stats.acceptance_histogram == (0,) * len(accepted) + (1,)
        assert chunk.stats.drafted_histogram == (0,) * chunk.stats.num_draft_tokens + (1,)
        assert last == ("bonus" if chunk.stats.num_draft_tokens == len(accepted) else "correction")
        seen |= set(chunk.origins)
    assert seen == {"accepted", "correction", "bonus"}


def test_every_row_has_its_own_options() -> None:
    """In float64 a row of a batch says what it says alone, with the log-probabilities of Hugging Face's own forward."""
    decoder = embedded("float64")
    options: dict[str, list[Any]] = {
        "seed": [11, 12, 13],
        "temperature": [0.0, 0.8, 1.3],
        "top_k": [0, 5, 0],
        "top_p": [1.0, 1.0, 0.7],
        "min_p": [0.0, 0.02, 0.0],
        "repetition_penalty": [1.2, 1.0, 1.0],
        "presence_penalty": [0.0, 1.5, 0.0],
        "frequency_penalty": [0.5, 0.0, -0.5],
        "min_tokens": [0, 0, 9],
        "stop_token_ids": [(), (), (300, 301)],
        "logit_bias": [None, {300: 2.0}, None],
        "max_new_tokens": [6, 20, 13],
        "stop": [None, ["\n", "."], [","]],
        "ignore_eos": [True, False, True],
        "logprobs": [None, 0, 3],
    }
    together = decoder.generate(PROMPTS, **options)
    for row, completion in enumerate(together):
        (alone,) = decoder.generate(PROMPTS[row], **{name: values[row] for name, values in options.items()})
        assert parts(alone) == parts(completion)
        assert completion.seed == options["seed"][row]
        num_top = options["logprobs"][row]
        assert (completion.logprobs is None) == (num_top is None)
        prompt_ids = decoder.encode(PROMPTS[row])
        with torch.inference_mode():
            ids = torch.tensor([prompt_ids + list(completion.token_ids)])
            want = decoder.target.model(ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(dim=-1)
        for logprobs, token_id, item in zip(want, completion.token_ids, completion.logprobs or (), strict=False):
            best = logprobs.topk(num_top)
            assert item.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-9)
            assert [i for i, _ in item.top] == best.indices.tolist()
            assert [value for _, value in item.top] == pytest.approx(best.values.tolist(), abs=1e-9)
    common = decoder.generate(PROMPTS[:2], stop=["e", "a"], seed=1, max_new_tokens=12)
    listed = decoder.generate(PROMPTS[:2], stop=[["e", "a"], ["e", "a"]], seed=[1, 2], max_new_tokens=12)
    assert [parts(one) for one in common] == [parts(one) for one in listed]
    assert all("e" not in one.text and "a" not in one.text for one in common)


def test_stop_tokens_end_a_row() -> None:
    """For the reason "stop"; an end token of the model keeps its own. One list of ids is for all rows."""
    decoder = embedded("float32", "gumbel")
    options: dict[str, Any] = {"seed": 6, "max_new_tokens": 14, "ignore_eos": True}
    (full,) = decoder.generate(PROMPT, **options)
    at = next(i for i in range(5, 14) if full.token_ids[i] not in full.token_ids[:i])
    token_id = full.token_ids[at]
    (one,) = decoder.generate(PROMPT, stop_token_ids=[token_id], **options)
    assert (one.finish_reason, one.token_ids) == ("stop", full.token_ids[: at + 1])
    assert one.text == decoder.generate(PROMPT, **options | {"max_new_tokens": at})[0].text
    pair = decoder.generate([PROMPT, PROMPT], stop_token_ids=[[token_id], []], **options)
    assert [row.finish_reason for row in pair] == ["stop", "length"]
    (eos,) = decoder.eos_ids
    certain = {"logit_bias": {eos: 1e6}, "max_new_tokens": 3}
    (ended,) = decoder.generate(PROMPT, stop_token_ids=[eos], **certain)
    assert (ended.finish_reason, ended.token_ids) == ("eos", (eos,))


@pytest.mark.parametrize(("acceptance", "k"), [("rejection", 1), ("block", 4), ("gumbel", 4)])
def test_a_row_has_its_least_number_of_tokens(acceptance: str, k: int) -> None:
    """Though the end is all but certain. A limit ends a text in any case; what leaves no token is refused."""
    decoder = embedded()
    (eos,) = decoder.eos_ids
    certain: dict[str, Any] = {"logit_bias": {eos: 1e6}, "acceptance": acceptance, "num_draft_tokens": k, "seed": 1}
    for num_tokens in (0, 1, 6):
        (one,) = decoder.generate(PROMPT, min_tokens=num_tokens, **certain)
        assert (one.finish_reason, one.token_ids.index(eos)) == ("eos", num_tokens)
        assert num_tokens or one.text == ""  # an end token has no text
    (one,) = decoder.generate(PROMPT, min_tokens=3, ignore_eos=True, max_new_tokens=5, **certain)
    assert [token_id == eos for token_id in one.token_ids] == [False] * 3 + [True] * 2
    (one,) = decoder.generate(PROMPT, min_tokens=5, max_new_tokens=3, **certain)
    assert one.finish_reason == "length" and eos not in one.token_ids
    nothing_else = {i: -float("inf") for i in range(decoder.target.vocab_size) if i != eos}
    with pytest.raises(OptionError, match="min_tokens = 2 is invalid: no token is left"):
        decoder.generate(PROMPT, min_tokens=2, logit_bias=nothing_else)


def test_one_seed_for_several_prompts_counts_on() -> None:
    """Prompt i has seed + i, by every way in: equal prompts give different texts. One that is drawn is told."""
    decoder = embedded()
    options: dict[str, Any] = {"seed": 7, "max_new_tokens": 16}
    drawn = decoder.generate([PROMPT] * 2, max_new_tokens=16, seed=[None, None])
    assert drawn[0].seed != drawn[1].seed and 0 <= drawn[0].seed < 2**63
    assert parts(decoder.generate(PROMPT, max_new_tokens=16, seed=drawn[0].seed)[0]) == parts(drawn[0])
    texts = decoder.generate([PROMPT] * 3, **options)
    assert [one.seed for one in texts] == [7, 8, 9]
    assert len({one.token_ids for one in texts}) == 3
    assert parts(texts[2]) == parts(decoder.generate(PROMPT, **options | {"seed": 9})[0])
    chunks = list(decoder.stream_many([PROMPT] * 3, **options))
    assert [parts([c for c in chunks if c.row == row]) for row in range(3)] == [*map(parts, texts)]
    own = dict(decoder.complete([PROMPT, (PROMPT, {"seed": 70}), (PROMPT, {"top_k": 0})], **options))
    assert [own[i].seed for i in range(3)] == [7, 70, 9]  # type: ignore[union-attr]
    assert own[2].token_ids == texts[2].token_ids  # type: ignore[union-attr]
    with pytest.raises(OptionError, match="seed = 9223372036854775808 is invalid"):
        decoder.generate([PROMPT] * 2, seed=2**63 - 1)


def test_the_timings_of_chunks_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first chunk of a round has a timing, and all of them together are no more than went by."""
    begin = time.perf_counter()
    chunks = list(embedded().stream_many(PROMPTS, seed=[1, 2, 3], max_new_tokens=12))
    elapsed_s = time.perf_counter() - begin
    rows = [chunk.row for chunk in chunks]
    is_first = [i == 0 or rows[i] <= rows[i - 1] for i in range(len(rows))]
    assert not all(is_first)
    assert [chunk.timing.total_s > 0 for chunk in chunks] == is_first
    total = sum((chunk.timing for chunk in chunks), Timing())
    assert 0 < total.total_s <= elapsed_s
    assert min(total.prefill_s, total.draft_s, total.verify_s, total.rest_s) > 0
    assert total.decode_s == pytest.approx(total.total_s - chunks[0].timing.prefill_s)
    assert sum(chunk.timing.prefill_s > 0 for chunk in chunks) == 1
    # The reader's time is not: by a clock that the reader puts forward by an hour at every chunk.
    ahead_s, clock, total = [0.0], time.perf_counter, Timing()
    monkeypatch.setattr("outrider.decoding.engine.time.perf_counter", lambda: clock() + ahead_s[0])
    for chunk in embedded().stream(PROMPT, seed=1, max_new_tokens=6, ignore_eos=True):
        total += chunk.timing
        ahead_s[0] += 3600
    assert total.total_s < 3600 < ahead_s[0]


def test_greedy_is_hugging_face_s_greedy() -> None:
    decoder = embedded("float64")
    model: Any = decoder.target.model
    ids = torch.tensor([decoder.encode(PROMPT)])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    for arm in (decoder, decoder.plain()):
        (completion,) = arm.generate(PROMPT, temperature=0.0, max_new_tokens=16)
        assert list(completion.token_ids) == want[0, ids.shape[1] :].tolist()
    assert completion.stats.num_draft_tokens == 0 and set(completion.origins) == {"bonus"}
    assert embedded().generate([]) == [] and list(embedded().stream_many([])) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature = -0.1 is invalid"),
        ({"temperature": [1.0]}, "one value for each of the 2 prompts"),
        ({"stop": [["a"]]}, "one value for each of the 2 prompts"),
        ({"max_new_token": 5}, "did you mean max_new_tokens"),
        ({"do_sample": True}, "do_sample = True is invalid: there is no such option"),
        ({"max_tokens": 5}, "did you mean max_new_tokens?"),
        ({"top_p": 0.0}, "0 < top_p <= 1"),
        ({"top_p": float("nan")}, "top_p = nan"),
        ({"top_k": 2.5}, "top_k = 2.5"),
        ({"stop": ""}, "stop strings are not empty"),
        ({"stop": 5}, "stop = 5"),
        ({"logit_bias": "a"}, "logit_bias = 'a'"),
        ({"logit_bias": {"7": 1.0}}, "token ids"),
        ({"logit_bias": {7: 1e300}}, "finite number up to 1e"),
        ({"logit_bias": {10**9: 1.0}}, "token ids are below"),
        ({"logit_bias": dict.fromkeys(range(4096), -float("inf"))}, "it forbids every token"),
        ({"num_draft_tokens": 0}, "num_draft_tokens = 0"),
        ({"num_draft_tokens": 2.0}, "num_draft_tokens = 2.0"),
        ({"acceptance": "typical"}, "choose one of rejection, block, gumbel"),
        ({"logprobs": True}, "logprobs = True"),
        ({"processor": "nothing"}, "a function of token ids"),
        ({"sampling": {"temperature": 0.7}}, "sampling"),
        ({"sampling": "greedy"}, "sampling"),
        ({"sampling": [outrider.Sampling()]}, "sampling"),
        ({"sampling": [None] * 2}, "sampling"),
        ({"prompts": [PROMPT, ""]}, "prompt 1: the prompt is empty"),
        ({"prompts": [""]}, "the prompt is empty"),
        ({"prompts": ["word " * 2000]}, " tokens, but fable can take "),
        ({"prompts": [[1, 2, 10**9]]}, "a token id outside 0"),
        ({"prompts": [1, 2, 3]}, "prompt 0: a prompt is text, a list of token ids"),
        ({"prompts": [[{"role": "user", "content": "hello"}]]}, "no chat template"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_prompts_and_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    """Not at the first chunk; by streams and by ``generate``; and never dropped."""
    kind = PromptError if "prompts" in options else OptionError
    given: dict[str, Any] = {"prompts": PROMPTS[:2], **options}
    with pytest.raises(kind) as error:
        embedded().stream_many(**given)
    assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(kind):
        embedded().generate(**given)


def test_the_public_door() -> None:
    assert dir(outrider) == list(outrider.__all__) == sorted(outrider.__all__)
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'generat'"):
        _ = outrider.generat
    assert issubclass(UsageError, outrider.OutriderError) and outrider.Sampling is Sampling
    assert import_module("outrider.errors").__all__ == sorted(import_module("outrider.errors").__all__)
    assert SamplingChanges.__annotations__.keys() == {field.name for field in dataclasses.fields(outrider.Sampling)}
    for options in ({"placement": outrider.Placement(), "dtype": "float32"}, {"torch_dtype": "float32"}):
        with pytest.raises(OptionError, match="give it or its fields, not both|no such option: did you mean dtype"):
            outrider.load("fable", **options)


def test_sampling_as_one_object() -> None:
    """For all rows, its seed counting on; for each row; with fields changed; for streams and complete."""
    decoder = embedded()
    sampling = outrider.Sampling(temperature=0.7, max_new_tokens=6, seed=5)
    want = [one.token_ids for one in decoder.generate(PROMPTS, temperature=0.7, max_new_tokens=6, seed=5)]
    assert [one.token_ids for one in decoder.generate(PROMPTS, sampling)] == want
    own = [dataclasses.replace(sampling, seed=5 + i) for i in range(len(PROMPTS))]
    assert [one.token_ids for one in decoder.generate(PROMPTS, own)] == want
    assert [one.token_ids for one in decoder.generate(PROMPTS, own, max_new_tokens=3)] == [ids[:3] for ids in want]
    assert tuple(i for chunk in decoder.stream(PROMPTS[0], sampling) for i in chunk.token_ids) == want[0]
    assert {i: one.token_ids for i, one in decoder.complete(PROMPTS, sampling)} == dict(enumerate(want))


OPTIONS = {"seed": 5, "max_new_tokens": 12}


def _decoder(**model: object) -> Decoder:
    return load(
        random_llama(**model), random_llama(seed=1), tokenizer=word_tokenizer(), draft_tokenizer=word_tokenizer()
    )


def test_each_prompt_as_if_it_were_alone() -> None:
    """With options of its own, in any order, each once. Far fewer are held than there are."""
    decoder, taken = _decoder(), []

    def asked(i: int) -> tuple[str, dict[str, Any]]:
        options = {"max_new_tokens": 1 + i % 12, "seed": i, "temperature": (0.0, 1.0, 0.7)[i % 3]}
        return " ".join(f"w{(7 * i + j) % 90}" for j in range(1 + i % 9)), options

    done = {}
    stream = decoder.complete((taken.append(i) or asked(i) for i in itertools.count()), num_slots=4)
    for number, (i, one) in zip(range(24), stream, strict=False):
        assert len(taken) <= number + 12 and i not in done
        done[i] = one
    stream.close()
    for i, one in done.items():
        prompt, options = asked(i)
        (alone,) = decoder.generate(prompt, **options)
        assert isinstance(one, Completion) and (one.seed, parts(one)) == (i, parts(alone))


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


def test_eight_threads_may_share_a_decoder() -> None:
    """Each gets the texts that it gets alone."""
    target, drafter = llama_pair()
    decoder = Decoder(target, None, frozenset(), drafter, num_draft_tokens=2)

    def write(i: int) -> tuple[int, ...]:
        return decoder.generate([[1 + i, 2, 3]], seed=i, max_new_tokens=12)[0].token_ids

    alone = [write(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(write, [*range(8)] * 2)) == alone * 2
