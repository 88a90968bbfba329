"""`model.generate` with `custom_generate=outrider.assisted(...)` gives what `model.generate` gives, padded too."""

import copy
import gc
import weakref
from functools import cache
from typing import Any

import pytest
import scipy.stats
import torch
import transformers as tf
from torch import Tensor

import outrider
from hybrids import tiny_models
from outrider import assisted
from outrider.errors import OptionError, PromptError, UnsupportedModel
from outrider.runtime.modules import cache_argument
from pairs import embedded, random_llama, zoo
from toys import perturbed

CACHE = cache_argument(tf.LlamaForCausalLM)
PAD, END = 0, 9
IDS = torch.tensor([[PAD, PAD, PAD, 5, 6, 7, 5, 6], [PAD] * 7 + [4], [2, 3, 2, 3, 2, 3, 2, 3]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0] * 7 + [1], [1] * 8])
INPUTS = {"input_ids": IDS, "attention_mask": MASK, "pad_token_id": PAD, "eos_token_id": None, "max_new_tokens": 12}


@cache
def _pair(name: str = "llama") -> tuple[Any, Any]:
    model = tiny_models.tiny(name).double().eval()
    return model, perturbed(copy.deepcopy(model), 0.05)


def _same(name: str = "llama", draft: Any = None, **options: Any) -> Any:
    """Greedy output of both, which agrees."""
    model, own = _pair(name)
    given = {**INPUTS, "do_sample": False, "return_dict_in_generate": True, "output_scores": True, **options}
    plain = model.generate(**given, output_logits=True)
    found = model.generate(**given, output_logits=True, custom_generate=assisted(draft or own))
    assert type(found) is type(plain) and found.sequences.equal(plain.sequences)
    assert len(found.scores) == len(found.logits) == len(plain.scores)
    num_given = given["input_ids"].shape[1]
    ends = list(given["eos_token_id"] or [])
    ends += [int(token) for one in given.get("stopping_criteria", ()) for token in one.tokens] if ends else []
    is_open = torch.ones(len(plain.sequences), dtype=torch.bool)  # what is said of padding is not compared
    for i, ids in enumerate(plain.sequences.T[num_given:]):
        for ours, theirs in ((found.scores[i], plain.scores[i]), (found.logits[i], plain.logits[i])):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float32
            assert torch.allclose(ours[is_open], theirs[is_open], rtol=1e-3, atol=1e-3)
        is_open &= ~torch.isin(ids, torch.tensor(ends))
    return found


class At(tf.StoppingCriteria):
    """Stops a row after a token of its own."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = torch.tensor(tokens)

    def __call__(self, ids: Tensor, scores: Any, **more: Any) -> Tensor:
        return torch.isin(ids[:, -1], self.tokens)


CASES: list[dict[str, Any]] = [
    {"name": "gpt2"},
    {"name": "gemma3_text"},
    {"draft": "ngram", "repetition_penalty": 1.3},
    {"max_length": 15, "max_new_tokens": None},
    {"repetition_penalty": 0.7, "no_repeat_ngram_size": 3, "renormalize_logits": True},
    {"sequence_bias": {(6, 23): -60.0, (35,): -90.0, (7,): 2.0}, "begin_suppress_tokens": list(range(70))},
    {"prefix_allowed_tokens_fn": lambda row, ids: [1 + row, 20 + int(ids[-1]) % 50, 90]},
    {"forced_eos_token_id": END, "eos_token_id": [END]},
    {"logits_processor": tf.LogitsProcessorList([tf.RepetitionPenaltyLogitsProcessor(3.0, 8)])},
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_greedy_output_is_that_of_generate(case: dict[str, Any]) -> None:
    """And options, those of llama, act on the text."""
    assert _same(**case).sequences.tolist() != _same().sequences.tolist()


def test_ends_act_token_by_token() -> None:
    """Without end tokens nothing is padded: rows go on until the criteria of the caller are met in all."""
    plain = _same().sequences
    ends = [int(plain[0, 11]), int(plain[1, 14])]
    assert (_same(eos_token_id=ends).sequences[0, 12:] == PAD).all()
    _same(eos_token_id=ends, min_new_tokens=7)
    _same(eos_token_id=ends, exponential_decay_length_penalty=(2, 1.5))
    criteria = tf.StoppingCriteriaList([At([int(plain[0, 9]), int(plain[1, 12]), int(plain[2, 10])])])
    _same(stopping_criteria=criteria)
    _same(stopping_criteria=criteria, eos_token_id=ends)
    words = [[int(plain[0, 8])], plain[1, 9:11].tolist()]
    _same(bad_words_ids=words, eos_token_id=ends)


class Shy(tf.LogitsProcessor):
    """Depends on the drafted token before."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 3.0 * torch.nn.functional.one_hot((ids[:, -1] + 1) % 7, 7)


SAMPLED = {"temperature": 0.8, "top_k": 6, "top_p": 0.95, "repetition_penalty": 1.2, "typical_p": 0.9}
SAMPLED |= {"logits_processor": tf.LogitsProcessorList([Shy()])}


def test_samples_follow_the_law_of_generate() -> None:
    """The first two of three tokens. False alarm: 1e-6. The law without the options is another."""
    model, draft = (random_llama(7, seed).eval() for seed in (0, 1))  # of few tokens
    for one in (model, draft):
        one.config.eos_token_id = one.generation_config.eos_token_id = None
    prompt, common = [1, 4, 2], {"do_sample": True, "pad_token_id": 0}

    def law(**options: Any) -> Tensor:
        """Of two tokens, by the scores of `generate`."""
        given = common | options | {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}

        def probs(*text: int) -> Tensor:
            return model.generate(torch.tensor([[*prompt, *text]]), **given).scores[0][0].softmax(-1)

        return torch.stack([prob * probs(token) for token, prob in enumerate(probs())]).flatten()

    torch.manual_seed(0)
    own = assisted(draft, num_draft_tokens=2)
    given = {"max_new_tokens": 3, "num_return_sequences": 600, "custom_generate": own}
    rows = model.generate(torch.tensor([prompt]), **common, **SAMPLED, **given)
    counts = torch.bincount(rows[:, 3] * 7 + rows[:, 4], minlength=49)

    def pvalue(law: Tensor) -> float:
        often = law * 600 >= 5
        observed, expected = ([*of[often].tolist(), float(of[~often].sum())] for of in (counts, 600 * law))
        kept = slice(None if expected[-1] >= 5 else -1)
        return float(scipy.stats.chisquare(observed[kept], expected[kept], sum_check=False).pvalue)

    assert (counts[(right := law(**SAMPLED)) == 0] == 0).all()
    assert pvalue(right) > 1e-6 > pvalue(law(top_k=0))


def test_the_callers_seed_governs() -> None:
    model, draft = _pair()
    own = assisted(draft)

    def sampled() -> list[list[list[int]]]:
        torch.manual_seed(1)
        return [model.generate(**INPUTS, do_sample=True, custom_generate=own).tolist() for _ in range(2)]

    first, second = sampled()
    assert first != second and sampled() == [first, second]
    state = torch.random.get_rng_state()
    model.generate(**INPUTS, custom_generate=own)  # greedy output takes no noise
    assert torch.random.get_rng_state().equal(state)


class Written(tf.TextStreamer):
    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.ids.append(-1)


def test_streamer_and_stop_strings_are_arguments_of_ours() -> None:
    model, tokenizer = embedded().target.model, tf.AutoTokenizer.from_pretrained(zoo("fable"))
    given = {**tokenizer("Once upon a time", return_tensors="pt"), "max_new_tokens": 16, "pad_token_id": PAD}
    stop = tokenizer.decode(model.generate(**given)[0, -4:])
    stopped = model.generate(**given, stop_strings=[stop], tokenizer=tokenizer)
    written = Written()
    own = assisted("ngram", tokenizer=tokenizer, stop_strings=[stop], streamer=written)
    assert model.generate(**given, custom_generate=own).equal(stopped)
    assert written.ids == [*stopped[0].tolist(), -1]
    config = copy.deepcopy(model.generation_config)
    config.stop_strings = [stop]
    with_config = outrider.generate(model, draft="ngram", generation_config=config, tokenizer=tokenizer, **given)
    assert with_config.equal(stopped) and config.stop_strings == [stop]


class Counting(tf.LogitsProcessor):
    num_calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.num_calls += 1
        return scores


class Sticky(tf.StoppingCriteria):
    """Has a state of its batch."""

    met = torch.zeros(3, dtype=torch.bool)

    def __call__(self, ids: Tensor, scores: Any, **more: Any) -> Tensor:
        self.met = self.met | (ids[:, -1] % 5 == 0)
        return self.met


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams = 2"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens = 3 is invalid: give the draft 'ngram'"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states = True"),
        ({"logits_processor": tf.LogitsProcessorList([Counting()])}, "'Counting' is invalid: it changes itself"),
        ({"stopping_criteria": tf.StoppingCriteriaList([Sticky()])}, r"'Sticky' .* gave shape \[3\] for one row"),
        ({CACHE: tf.DynamicCache()}, f"{CACHE} = 'DynamicCache'"),
        ({"max_new_tokens": 400}, "the context of the model is 256"),
        ({"position_ids": torch.zeros_like(IDS)}, "position_ids"),
        ({"attention_mask": MASK.flip(1)}, "the attention mask has zeros after a one"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, dict) else "",
)
def test_other_searches_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    model, draft = _pair()
    with pytest.raises((OptionError, PromptError), match=message):
        model.generate(**{**INPUTS, **options}, custom_generate=assisted(draft))


def test_arguments_that_contradict_each_other_are_refused() -> None:
    model, draft = _pair()
    for more in ({"assistant_model": draft, "draft": draft}, {"custom_generate": print}, {"synced_gpus": True}):
        with pytest.raises(OptionError, match=next(iter(more))):
            outrider.generate(model, IDS, **more)
    with pytest.raises(OptionError, match=r"model\.training"):
        outrider.generate(copy.deepcopy(model).train(), IDS, draft="ngram", max_new_tokens=2)
    with pytest.raises(OptionError, match="stop_strings .* need the tokenizer"):
        assisted(draft, stop_strings="a")
    with pytest.raises(OptionError, match="streamer = 'Written' is invalid: for one row, not 3"):
        outrider.generate(model, draft="ngram", streamer=Written(), **INPUTS)
    sizes: dict[str, int] = {"vocab_size": 9, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    encoder = tf.T5ForConditionalGeneration(tf.T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        encoder.generate(torch.tensor([[1, 2]]), max_new_tokens=2, custom_generate=assisted("ngram"))


def test_a_model_is_let_go() -> None:
    model, own = random_llama(30).eval(), assisted("ngram")
    model.generate(IDS[2:], max_new_tokens=2, custom_generate=own)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
