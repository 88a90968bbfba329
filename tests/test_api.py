"""The public door, on the embedded pair: text in, chunks out. Nothing here depends on what the pair says."""

import dataclasses
import time
from importlib import import_module
from typing import Any

import pytest
import torch

import outrider
from outrider.decoder import Decoder
from outrider.errors import OptionError, PromptError, UsageError
from outrider.options import Sampling, SamplingChanges
from outrider.records import Chunk, Completion, Stats, Timing
from outrider.sampling.rules import RULES
from pairs import embedded

PROMPT = "Once upon a time there was a miller"
PROMPTS = [PROMPT, "8 * 12 = ", "The king said to his youngest daughter that the road to the sea was long, and"]


def joined(chunks: list[Chunk]) -> dict[str, Any]:
    """What the chunks of one row add up to, under the names of a completion."""
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": tuple(i for chunk in chunks for i in chunk.token_ids),
        "origins": tuple(origin for chunk in chunks for origin in chunk.origins),
        "finish_reason": chunks[-1].finish_reason,
        "stats": sum((chunk.stats for chunk in chunks), Stats()),
    }


def parts(completion: Completion) -> dict[str, Any]:
    return {name: getattr(completion, name) for name in ("text", "token_ids", "origins", "finish_reason", "stats")}


def decoded(decoder: Decoder, ids: Any) -> str:
    tokenizer: Any = decoder.tokenizer
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_stream_is_what_generate_gathers() -> None:
    decoder = embedded()
    options = {"seed": 3, "max_new_tokens": 24}
    chunks = list(decoder.stream(PROMPT, **options))
    (completion,) = decoder.generate(PROMPT, **options)
    assert joined(chunks) == parts(completion)
    assert len(chunks) > 1
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert completion.num_prompt_tokens == len(decoder.encode(PROMPT))
    assert decoded(decoder, decoder.encode(PROMPT) + list(completion.token_ids)) == PROMPT + completion.text


def test_streams_of_many_prompts_are_told_apart_by_row() -> None:
    decoder = embedded()
    options = {"seed": [1, 2, 3], "max_new_tokens": [4, 16, 9]}
    chunks = list(decoder.stream_many(PROMPTS, **options))
    for row, completion in enumerate(decoder.generate(PROMPTS, **options)):
        assert joined([chunk for chunk in chunks if chunk.row == row]) == parts(completion)
        assert 1 <= len(completion.token_ids) <= options["max_new_tokens"][row]


def test_every_row_has_its_own_options() -> None:
    """In float64 a row of a batch says what it says alone."""
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
        assert (completion.logprobs is None) == (options["logprobs"][row] is None)


def test_one_value_is_for_all_rows() -> None:
    """A list of strings under ``stop`` is one value; a list of lists has one for each row."""
    decoder = embedded()
    common = decoder.generate(PROMPTS[:2], stop=["e", "a"], seed=1, max_new_tokens=12)
    listed = decoder.generate(PROMPTS[:2], stop=[["e", "a"], ["e", "a"]], seed=[1, 2], max_new_tokens=12)
    assert [parts(c) for c in common] == [parts(c) for c in listed]
    assert all("e" not in c.text and "a" not in c.text for c in common)


def test_stop_tokens_end_a_row() -> None:
    """With that token, which has no text, for the reason "stop"; an end token of the model keeps its own reason. One
    list of ids is for all rows, a list of lists has one for each."""
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
    """Though the end token is all but certain, and under ``ignore_eos`` it is forbidden too. A limit ends a text in any
    case; what leaves no token at all is refused."""
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


def test_seeds_are_told_and_reproduce() -> None:
    decoder = embedded()
    first, second = decoder.generate([PROMPT, PROMPT], max_new_tokens=16)
    assert first.seed != second.seed
    assert parts(decoder.generate(PROMPT, max_new_tokens=16, seed=first.seed)[0]) == parts(first)
    given, drawn = decoder.generate([PROMPT, PROMPT], max_new_tokens=4, seed=[7, None])
    assert given.seed == 7
    assert 0 <= drawn.seed < 2**63


def test_one_seed_for_several_prompts_counts_on() -> None:
    """Prompt i has seed + i, by every way in, as on the command line: equal prompts give different texts."""
    decoder = embedded()
    options: dict[str, Any] = {"seed": 7, "max_new_tokens": 16}
    texts = decoder.generate([PROMPT] * 3, **options)
    assert [one.seed for one in texts] == [7, 8, 9]
    assert len({one.token_ids for one in texts}) == 3
    assert parts(texts[2]) == parts(decoder.generate(PROMPT, **options | {"seed": 9})[0])
    chunks = list(decoder.stream_many([PROMPT] * 3, **options))
    assert [joined([c for c in chunks if c.row == row])["token_ids"] for row in range(3)] == [
        t.token_ids for t in texts
    ]
    own = dict(decoder.complete([PROMPT, (PROMPT, {"seed": 70}), (PROMPT, {"top_k": 0})], **options))
    assert [own[i].seed for i in range(3)] == [7, 70, 9]  # type: ignore[union-attr]
    assert own[2].token_ids == texts[2].token_ids  # type: ignore[union-attr]
    with pytest.raises(OptionError, match="seed = 9223372036854775808 is invalid"):
        decoder.generate([PROMPT] * 2, seed=2**63 - 1)


def test_logprobs_are_the_target_s_own() -> None:
    """Raw logits, whatever the processors, at the position where the token was verified."""
    decoder = embedded("float64")
    options: dict[str, Any] = {"temperature": 0.7, "top_k": 8, "logit_bias": {300: 1.0}, "seed": 5}
    (completion,) = decoder.generate(PROMPT, logprobs=3, max_new_tokens=12, ignore_eos=True, **options)
    prompt_ids = decoder.encode(PROMPT)
    with torch.inference_mode():
        ids = torch.tensor([prompt_ids + list(completion.token_ids)])
        want = decoder.target.model(ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(dim=-1)
    assert completion.logprobs is not None and len(completion.logprobs) == 12
    for row, token_id, item in zip(want, completion.token_ids, completion.logprobs, strict=True):
        assert item.logprob == pytest.approx(float(row[token_id]), abs=1e-9)
        assert [i for i, _ in item.top] == row.topk(3).indices.tolist()
        assert [value for _, value in item.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-9)


@pytest.mark.parametrize("acceptance", RULES)
def test_stats_and_origins_tell_the_same_story(acceptance: str) -> None:
    """A round is some accepted tokens and then a correction, or a bonus if all that was drafted stood."""
    chunks = list(embedded().stream_many(PROMPTS, seed=[1, 2, 3], max_new_tokens=40, acceptance=acceptance))
    seen = set()
    for chunk in chunks:
        assert len(chunk.origins) == len(chunk.token_ids) >= 1
        assert chunk.stats.num_generated_tokens == len(chunk.token_ids)
        if chunk.stats.num_truncated_rounds:
            assert chunk.finish_reason is not None and chunk.stats.num_rounds == 0
            assert set(chunk.origins) <= {"accepted"}
            continue
        *accepted, last = chunk.origins
        assert set(accepted) <= {"accepted"}
        assert chunk.stats.num_accepted_draft_tokens == len(accepted)
        is_full = chunk.stats.num_draft_tokens == len(accepted)
        assert last == ("bonus" if is_full else "correction")
        assert chunk.stats.acceptance_histogram == (0,) * len(accepted) + (1,)
        assert chunk.stats.drafted_histogram == (0,) * chunk.stats.num_draft_tokens + (1,)
        seen |= set(chunk.origins)
    assert seen == {"accepted", "correction", "bonus"}


def test_pieces_are_the_text_by_origin() -> None:
    """Neighbouring pieces differ in origin; joined they are the text."""
    chunks = list(embedded().stream(PROMPT, seed=4, max_new_tokens=30, ignore_eos=True))
    for chunk in chunks:
        assert "".join(text for text, _ in chunk.pieces) == chunk.text
        origins = [origin for _, origin in chunk.pieces]
        assert all(a != b for a, b in zip(origins, origins[1:], strict=False))
        assert set(origins) <= set(chunk.origins)


def test_the_timings_of_chunks_add() -> None:
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


def test_what_the_reader_does_between_chunks_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the reader puts forward by an hour at every chunk."""
    ahead_s, clock = [0.0], time.perf_counter
    monkeypatch.setattr("outrider.decoding.engine.time.perf_counter", lambda: clock() + ahead_s[0])
    timing = Timing()
    for chunk in embedded().stream(PROMPT, seed=1, max_new_tokens=6, ignore_eos=True):
        timing += chunk.timing
        ahead_s[0] += 3600
    assert ahead_s[0] >= 2 * 3600
    assert timing.total_s < 3600


def test_greedy_is_hugging_face_s_greedy() -> None:
    decoder = embedded("float64")
    model: Any = decoder.target.model
    ids = torch.tensor([decoder.encode(PROMPT)])
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
    for arm in (decoder, decoder.plain()):
        (completion,) = arm.generate(PROMPT, temperature=0.0, max_new_tokens=16)
        assert list(completion.token_ids) == want[0, ids.shape[1] :].tolist()


def test_plain_decoding_drafts_nothing() -> None:
    (completion,) = embedded().plain().generate(PROMPT, seed=1, max_new_tokens=9, ignore_eos=True)
    assert completion.stats.num_draft_tokens == 0 and completion.stats.num_rounds == 9
    assert completion.stats.mean_acceptance_length == 1.0 and completion.stats.draft_acceptance_rate is None
    assert set(completion.origins) == {"bonus"}


def test_no_prompts_no_completions() -> None:
    assert embedded().generate([]) == []
    assert list(embedded().stream_many([])) == []


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature = -0.1 is invalid"),
    ({"temperature": [1.0]}, "one value for each of the 2 prompts"),
    ({"stop": [["a"]]}, "one value for each of the 2 prompts"),
    ({"max_new_token": 5}, "did you mean max_new_tokens"),
    ({"do_sample": True}, "do_sample = True is invalid: there is no such option"),
    ({"suppress_tokens": [1]}, "logit_bias forbids a token"),
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
    ({"num_draft_tokens": 0}, "num_draft_tokens = 0"),
    ({"num_draft_tokens": 2.0}, "num_draft_tokens = 2.0"),
    ({"acceptance": "typical"}, "choose one of rejection, block, gumbel"),
    ({"logprobs": True}, "logprobs = True"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=lambda value: str(value)[:40])
def test_bad_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    """Not at the first chunk; by streams and by ``generate``; and never dropped."""
    with pytest.raises(OptionError) as error:
        embedded().stream_many(PROMPTS[:2], **options)
    assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(OptionError):
        embedded().generate(PROMPTS[:2], **options)


def test_a_bias_that_forbids_every_token_is_refused() -> None:
    """Rather than to say one of the forbidden."""
    bias = dict.fromkeys(range(embedded().target.vocab_size), -float("inf"))
    with pytest.raises(OptionError, match="logit_bias"):
        embedded().generate(PROMPT, logit_bias=bias, max_new_tokens=2)
    del bias[300]
    (completion,) = embedded().generate(PROMPT, logit_bias=bias, max_new_tokens=2, seed=1)
    assert completion.token_ids == (300, 300)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([PROMPT, ""], "prompt 1: the prompt is empty"),
        ([""], "^the prompt is empty"),
        (["word " * 2000], r"^the prompt has \d+ tokens, but fable can take \d+ in all"),
        ([[1, 2, 10**9]], "a token id outside 0"),
        ([1, 2, 3], "prompt 0: a prompt is text, a list of token ids"),
        ([[{"role": "user", "content": "hello"}]], "no chat template"),
    ],
)
def test_bad_prompts_are_refused_at_once(prompts: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        embedded().stream_many(prompts)
    with pytest.raises(PromptError, match=message):
        embedded().generate(prompts)


def test_the_public_door() -> None:
    assert dir(outrider) == list(outrider.__all__) == sorted(outrider.__all__)
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'generat'"):
        _ = outrider.generat
    assert issubclass(UsageError, outrider.OutriderError) and outrider.Sampling is Sampling
    assert import_module("outrider.errors").__all__ == sorted(import_module("outrider.errors").__all__)


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


@pytest.mark.parametrize("sampling", [{"temperature": 0.7}, "greedy", [outrider.Sampling()], [None] * len(PROMPTS)])
def test_what_is_no_sampling_is_refused(sampling: Any) -> None:
    with pytest.raises(OptionError, match="sampling"):
        embedded().generate(PROMPTS, sampling)


def test_keywords_are_the_fields_of_sampling() -> None:
    assert SamplingChanges.__annotations__.keys() == {field.name for field in dataclasses.fields(outrider.Sampling)}


def test_a_placement_is_one_object() -> None:
    placement = outrider.Placement(dtype="float64")
    decoder = outrider.load("fable", "fable-draft", placement=placement)
    assert (decoder.target.dtype, decoder.drafter.models[0].dtype) == (torch.float64, torch.float64)
    with pytest.raises(OptionError, match="placement"):
        outrider.load("fable", dtype="float32", placement=placement)
    with pytest.raises(OptionError, match="no such option: did you mean dtype"):
        outrider.load("fable", torch_dtype="float32")
