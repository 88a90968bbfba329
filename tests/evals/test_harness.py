"""Outrider as a model of the harness: held against the harness's own ``hf`` model, on real tasks, in float64."""

import sys
import tomllib
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing

from harness_tasks import PROMPTS, write_tasks
from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import OptionError, PromptError
from outrider.evals.harness import OutriderLM, main, task_sampling
from outrider.options import Sampling
from pairs import byte_level_tokenizer, embedded, metaspace_tokenizer, random_llama, save, word_tokenizer
from toys import perturbed

BOS, EOS = 256, 257
CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


@cache
def tokenizer_of(adds_bos: bool) -> Any:
    """A token for each byte; with or without a BOS before every text, as Llama's or GPT-2's."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    if adds_bos:
        template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
        tokenizer.backend_tokenizer.post_processor = template
    tokenizer.chat_template = CHAT + "{% if add_generation_prompt %}[assistant] {% endif %}"
    return tokenizer


@cache
def model_of(seed: int = 0) -> Any:
    return random_llama(258, seed, eos_token_id=EOS)


@cache
def decoder_of(adds_bos: bool = False) -> Decoder:
    draft = perturbed(model_of(), 0.05)
    return load(model_of(), draft, tokenizer=tokenizer_of(adds_bos), num_draft_tokens=3)


@pytest.fixture(name="folder", scope="module")
def folder_of_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def responses(lm: Any, folder: Path, task: str, *, is_chat: bool = False) -> list[Any]:
    """What a model answers to all requests of a task, document by document."""
    tasks = TaskManager(include_path=str(folder), include_defaults=False).load([task])
    found = lm_eval.evaluate(lm, tasks, apply_chat_template=is_chat, fewshot_as_multiturn=is_chat, bootstrap_iters=0)
    return [request[0] for sample in found["samples"][task] for request in sample["resps"]]


def generate(lm: OutriderLM, prompts: list[str], **gen_kwargs: Any) -> list[str]:
    return lm.generate_until(
        [Instance("generate_until", {}, (prompt, gen_kwargs), 0, ("task", i, 1)) for i, prompt in enumerate(prompts)]
    )


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("task", ["endings", "pages", "answers"])
def test_answers_are_those_of_the_hf_model(folder: Path, task: str, adds_bos: bool) -> None:
    """Contexts that are empty, too long, or begin with a BOS of their own; pages just as long as the context, too.

    (``hf`` takes one prompt at a time here: it looks at the first of a batch alone to see whether a BOS is there.)
    """
    want = responses(HFLM(model_of(), tokenizer=tokenizer_of(adds_bos), batch_size=1), folder, task)
    got = responses(OutriderLM(decoder_of(adds_bos), batch_size=3), folder, task)  # with a draft
    if task == "endings":
        assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in want]
        got, want = ([logprob for logprob, _ in pairs] for pairs in (got, want))
    assert got == (want if task == "answers" else pytest.approx(want, abs=1e-6))
    assert len(set(map(str, got))) == len(got)  # no two are alike: the requests are not mixed up


def test_text_is_decoded_as_the_hf_model_does(folder: Path) -> None:
    """With a tokenizer that drops a leading space, as Llama 2's: of the generated tokens by themselves."""
    tokenizer = metaspace_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    model = random_llama(len(tokenizer), 5, eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        model.lm_head.weight[257:264] *= 3  # whole words, so that some texts begin with a space
    decoder = load(model, tokenizer=tokenizer)
    want = responses(HFLM(model, tokenizer=tokenizer, batch_size=1), folder, "answers")
    assert responses(OutriderLM(decoder), folder, "answers") == want
    texts = [done.text for done in decoder.generate(["w s", "a"], temperature=0, max_new_tokens=12)]
    assert any(text.startswith(" ") for text in texts), texts


def test_a_chat_is_put_into_the_template(folder: Path) -> None:
    hf = HFLM(model_of(), tokenizer=tokenizer_of(True))
    lm = OutriderLM(decoder_of(True))
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The"}]
    for adds_prompt in (True, False):
        want = hf.apply_chat_template(messages, add_generation_prompt=adds_prompt)
        assert lm.apply_chat_template(messages, add_generation_prompt=adds_prompt) == want
    assert lm.tokenizer_name == hf.tokenizer_name
    assert lm.chat_template(True) == hf.chat_template(True)
    assert responses(lm, folder, "answers", is_chat=True) == responses(hf, folder, "answers", is_chat=True)
    bare = OutriderLM(replace(decoder_of(), tokenizer=word_tokenizer()))
    with pytest.raises(PromptError, match="no chat template"):
        bare.apply_chat_template(messages)


def test_request_i_samples_with_seed_plus_i() -> None:
    """Whatever the batch and the order of lengths; under gumbel whatever the draft."""
    prompts = [*PROMPTS, "a longer prompt than the others"]
    options = {"temperature": 1.5, "do_sample": True, "max_gen_toks": 9}
    decoder = replace(decoder_of(), acceptance="gumbel")
    got = generate(OutriderLM(decoder, batch_size=2, seed=7), prompts, **options)
    ids = [tokenizer_of(False)(prompt).input_ids[-55:] for prompt in prompts]
    want = [
        decoder.plain().generate([row], temperature=1.5, max_new_tokens=9, seed=7 + i)[0].text
        for i, row in enumerate(ids)
    ]
    assert got == want


def test_a_stop_string_that_is_a_special_token() -> None:
    """It has no text of its own, but ends the row; and only the rows of tasks that say so."""
    decoder = decoder_of().plain()
    special = byte_level_tokenizer()
    special.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    (ids,) = (
        done.token_ids for done in decoder.generate(["The fox"], temperature=0, max_new_tokens=12, ignore_eos=True)
    )
    word = special.convert_ids_to_tokens(ids[4])
    special.add_special_tokens({"additional_special_tokens": [word]})
    lm = OutriderLM(replace(decoder, tokenizer=special), batch_size=2)
    requests = [
        Instance("generate_until", {}, ("The fox", {"until": until, "max_gen_toks": 12}), 0, ("task", 0, 1))
        for until in ([], [word, "</s>"])
    ]
    first = ids.index(ids[4])
    free, stopped = lm.generate_until(requests)
    assert stopped == special.decode(ids[:first], skip_special_tokens=True)
    assert free != stopped and free.startswith(stopped)


@pytest.mark.parametrize(
    ("gen_kwargs", "want"),
    [
        ({}, Sampling(temperature=0, max_new_tokens=256)),
        ({"until": "\n", "max_gen_toks": 5}, Sampling(temperature=0, stop=("\n",), max_new_tokens=5)),
        ({"until": ["", "a"], "do_sample": False, "temperature": 0.7}, {"temperature": 0, "stop": ("a",)}),
        ({"temperature": 0.7, "max_tokens": 8}, {"temperature": 0.7, "max_new_tokens": 8}),
        ({"do_sample": True, "temperature": 0.2, "top_k": 40, "num_beams": 1}, {"temperature": 0.2, "top_k": 40}),
        ({"do_sample": True, "temperature": 0.0, "min_p": None}, {"temperature": 0}),
        ({"num_beams": 10}, "num_beams = 10 is invalid: Outrider has no such option"),
        ({"do_sample": True}, "the task must set a temperature"),
        ({"temperature": -1.0}, "temperature = -1.0 is invalid"),
    ],
)
def test_how_a_task_is_sampled(gen_kwargs: dict[str, Any], want: Sampling | dict[str, Any] | str) -> None:
    if isinstance(want, str):
        with pytest.raises(OptionError, match=want):
            task_sampling(gen_kwargs)
        return
    want = want if isinstance(want, Sampling) else Sampling(**{"max_new_tokens": 256} | want)
    assert task_sampling(gen_kwargs) == want


def test_what_does_not_fit_the_context_is_refused() -> None:
    lm = OutriderLM(decoder_of())
    with pytest.raises(OptionError, match="max_gen_toks = 64 is invalid: .* takes 64 tokens in all"):
        generate(lm, ["a"], max_gen_toks=64)
    for continuation in ("", "x" * 65):
        with pytest.raises(PromptError, match=f"a continuation of {len(continuation)} tokens cannot be scored"):
            lm.loglikelihood([Instance("loglikelihood", {}, ("a", continuation), 0)])


def test_prompts_that_are_cut_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """At the beginning, as the harness cuts them."""
    lm = OutriderLM(decoder_of().plain())
    cut, whole = generate(lm, ["x" * 60 + "The fox", "x" * 53 + "The fox"], max_gen_toks=4)
    assert cut == whole and caplog.messages == [
        "1 of 2 prompts were truncated at the beginning: with the tokens to generate they exceed the context "
        f"of {lm.decoder.target.name}, 64 tokens"
    ]


def test_what_a_model_needs() -> None:
    with pytest.raises(OptionError, match="batch_size = 'auto'"):
        OutriderLM(decoder_of(), batch_size="auto")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="with a tokenizer"):
        OutriderLM(replace(decoder_of(), tokenizer=None))
    nameless = byte_level_tokenizer()
    with pytest.raises(PromptError, match="neither BOS nor EOS"):
        OutriderLM(replace(decoder_of(), tokenizer=nameless)).loglikelihood_rolling(
            [Instance("loglikelihood_rolling", {}, ("a",), 0)]
        )


def test_a_model_by_its_arguments(tmp_path: Path) -> None:
    """As the harness makes it, from text or from a mapping; its own options come beside."""
    target, draft = (save(tmp_path / name, random_llama(seed=seed)) for seed, name in enumerate(("target", "draft")))
    arguments = f"target={target},draft={draft},num_draft_tokens=2,acceptance=block,dtype=float64,seed=5"
    config = {"batch_size": "4", "max_batch_size": None, "device": "cuda:0"}  # what its command line gives by itself
    lm = OutriderLM.create_from_arg_string(arguments, config)
    assert (lm.batch_size, lm.decoder.num_draft_tokens, lm.decoder.acceptance) == (4, 2, "block")
    assert (lm.decoder.target.name, lm.decoder.drafter.name) == (str(target), str(draft))
    assert str(lm.decoder.target.dtype) == "torch.float64"
    assert OutriderLM.create_from_arg_obj({"target": str(target)}).decoder.drafter.name == "none"
    with pytest.raises(TypeError, match="unexpected keyword argument 'drft'"):
        OutriderLM.create_from_arg_string("drft=x")


def test_the_entry_point() -> None:
    """By which versions of the harness that look for models in other packages find this one."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["lm_eval.models"].items()
    assert name == "outrider" and EntryPoint(name, value, "lm_eval.models").load() is OutriderLM


def test_the_command_line_of_the_harness(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With Outrider in it, and its own models still there."""
    target = save(tmp_path / "target", model_of(), tokenizer_of(False))
    manager = partial(lm_eval.tasks.TaskManager, include_defaults=False)  # reading all of the harness's takes seconds
    monkeypatch.setattr("lm_eval.tasks.TaskManager", manager)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # so does asking the machine

    def run(model: str, *model_args: str) -> list[str]:
        arguments = ["--model", model, "--model_args", ",".join(model_args), "--include_path", str(folder)]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments, "--tasks", "endings,pages,answers"])
        main()
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]

    rows = run("outrider", f"target={target}", "draft=ngram", "num_draft_tokens=3", "dtype=float64")
    assert len(rows) == 2 + 5
    assert rows == run("hf", f"pretrained={target}", "dtype=float64")
    with pytest.raises(SystemExit) as stop:
        run("outrider", "target=nowhere")
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_greedy_continuation_is_known() -> None:
    """What the model itself would say is greedy; with another last letter it is not."""
    decoder = embedded("float64").plain()
    (said,) = decoder.generate(["Once upon a time"], temperature=0, max_new_tokens=8)
    requests = [
        Instance("loglikelihood", {}, ("Once upon a time", text), 0) for text in (said.text, said.text[:-1] + "#")
    ]
    lm = OutriderLM(decoder)
    assert [is_greedy for _, is_greedy in lm.loglikelihood(requests)] == [True, False]
    assert lm.loglikelihood([]) == [] and lm.prefix_token_id == lm.eot_token_id == 0
