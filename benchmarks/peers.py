"""Outrider beside other programs, same weights and same prompts: tokens per second on the CPU, all in float32.

    pip install gguf xllamacpp openvino-genai     # each may be missing; what is, is left out and named
    python benchmarks/grow.py fable grown-110m --hidden-size 768 --num-layers 14 --intermediate-size 2304
    python benchmarks/peers.py --target grown-110m --openvino-target ov-target --openvino-draft ov-draft > peers.txt

OpenVINO wants its own format. ``optimum-cli`` makes it, best from another virtual environment (``pip install
optimum-intel``), where each MODEL is a folder:

    optimum-cli export openvino --model MODEL --task text-generation-with-past --weight-format fp32 ov-target

Every arm takes and gives token ids, the same number whatever the tokens are, on the same number of threads. A time is
the wall clock of one whole call, prefill included. Each prompt is one measurement of each arm, in turn. Each program
has a process of its own: in one process their pools of threads get in each other's way (Outrider took four times as
long beside idle llama.cpp servers and OpenVINO pipelines), which says nothing of any of them.
Temperature 1 is pure sampling: no top-k, top-p, min-p or penalties. (llama.cpp forbids end tokens where the others take
them as tokens like all; "f16" is the type of its cache.) Peers draft with the same K as Outrider.

"plain / it" is the speed of Outrider's compiled plain arm over the arm's, with its 95% interval: above 1, Outrider is
faster. "best" is the compiled speculative arm of Outrider that was fastest in this measurement, which flatters it a
little. "as HF" counts the prompts whose greedy tokens are those of HF generate. "law" says whether the rule of the arm
samples from the model's own distribution: "other" is not the published rule. The last line of standard output is one
JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, GenerationConfig

from outrider.api import Decoder, load, load_drafter
from outrider.bench.report import interval_text, new_table
from outrider.evals.prompts import PROMPTS
from outrider.models.registry import resolve
from outrider.options import DEFAULT_ACCEPTANCE
from outrider.sampling.rules import RULES
from outrider.stats.intervals import paired_ratio
from outrider.system.provenance import provenance

_PAUSE_S = 0.1  # idle threads of one arm spin for a while before they sleep, and would slow the next
_EXACT = "exact"
_OTHER = "not the published rule"
_TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Output:
    """What one call gave, in how many forwards of the target."""

    token_ids: list[int]
    num_forwards: float


Run = Callable[[Sequence[int], float, int], Output]
"""(token ids of the prompt, temperature, seed) -> output"""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate.

    Attributes:
        law: at temperature 1, what the output's distribution is to that of the model.
        temperatures: those at which it differs from the other arms.
    """

    name: str
    package: str
    law: str = _EXACT
    temperatures: Sequence[float] = _TEMPERATURES


@dataclass(slots=True)
class Record:
    """What was measured of an arm at one temperature, an entry for each prompt."""

    arm: Arm
    seconds: list[float] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(len(o.token_ids) / s for o, s in zip(self.outputs, self.seconds, strict=True))

    @property
    def tau(self) -> float:
        """Tokens per forward of the target."""
        return sum(len(o.token_ids) for o in self.outputs) / sum(o.num_forwards for o in self.outputs)


Runs = list[tuple[Arm, Run]]


def outrider_arms(target: Path, draft: Path, ks: Sequence[int], num_tokens: int, acceptance: str) -> Runs:
    plain = replace(load(target, dtype="float32", acceptance=acceptance), tokenizer=None)
    eager = replace(plain, drafter=load_drafter(plain, draft, dtype="float32"))
    compiled = eager.compiled()

    def arm(name: str, decoder: Decoder, k: int | None = None) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int) -> Output:
            options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True}
            [completion] = decoder.generate([list(ids)], num_draft_tokens=k, seed=seed, **options)
            return Output(list(completion.token_ids), num_tokens / (completion.stats.mean_acceptance_length or 1))

        return Arm(name, "outrider"), run

    arms = []
    for name, decoder in (("compiled", compiled), ("eager", eager)):
        arms.append(arm(f"Outrider {name}, plain", decoder.plain()))
        arms += [arm(f"Outrider {name}, draft, K = {k}", decoder, k) for k in ks]
    return arms


def hf_arms(target: Path, draft: Path, ks: Sequence[int], num_tokens: int) -> Runs:
    model, assistant = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (target, draft))
    # Without an end token none ends the text; what the files say of sampling is set aside.
    model.generation_config = GenerationConfig(pad_token_id=0)
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.register_forward_pre_hook(count)

    def arm(name: str, drafting: dict[str, Any] | None = None, **options: Any) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int) -> Output:
            nonlocal num_forwards
            num_forwards = 0
            torch.manual_seed(seed)
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
            if drafting is not None:
                # Read from the assistant's own configuration, not from the arguments of ``generate``.
                assistant.generation_config = GenerationConfig(pad_token_id=0, **drafting)
            prompt = torch.tensor([ids])
            given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": num_tokens, **sampling, **options}
            output = model.generate(prompt, **given)
            return Output(output[0, len(ids) :].tolist(), num_forwards)

        return Arm(f"HF, {name}", "transformers"), run

    arms = [arm("plain")]
    for k in ks:
        # With the default threshold it stops early, and K is only the most that it drafts.
        drafting = {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant"}
        drafting["assistant_confidence_threshold"] = 0.0
        arms.append(arm(f"assistant, K = {k}", drafting, assistant_model=assistant))
    arms.append(arm("assistant, defaults", {}, assistant_model=assistant))
    arms.append(arm("prompt lookup, K = 4", prompt_lookup_num_tokens=4))
    return arms


def llama_cpp_arms(
    target: Path, draft: Path, ks: Sequence[int], num_tokens: int, num_threads: int, context_len: int, folder: Path
) -> Runs:
    import xllamacpp
    from gguf_of import write_gguf

    files = folder / "target.gguf", folder / "draft.gguf"
    for path, file in zip((target, draft), files, strict=True):
        write_gguf(path, file)

    def arm(name: str, cache: str, k: int = 0, *, is_sampled: bool = False) -> tuple[Arm, Run]:
        params = xllamacpp.CommonParams()
        params.verbosity = 0
        params.n_ctx = context_len
        params.n_parallel = 1
        params.model.path = str(files[0])
        drafting = params.speculative.draft
        for part in (params, drafting):
            part.cpuparams.n_threads = part.cpuparams_batch.n_threads = num_threads
            part.cache_type_k = part.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache.upper()}")
        if cache == "f32":
            # On the CPU its flash attention is the slower one with a float32 cache, and the faster one with float16.
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if k:
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            drafting.mparams.path = str(files[1])
            drafting.n_max = k
            drafting.probabilistic = is_sampled
        server = xllamacpp.Server(params)

        def run(ids: Sequence[int], temperature: float, seed: int) -> Output:
            options = {"temperature": temperature, "samplers": ["temperature"], "seed": seed, "ignore_eos": True}
            body = {"prompt": list(ids), "n_predict": num_tokens, "cache_prompt": False, "return_tokens": True}
            # By its address: only this form of the answer has token ids. It costs about a millisecond.
            request = urllib.request.Request(
                f"{server.listening_address}/completion",
                data=json.dumps(body | options).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
            return Output(answer["tokens"], len(answer["tokens"]) - answer["timings"].get("draft_n_accepted", 0))

        temperatures = (1.0,) if is_sampled else _TEMPERATURES  # greedy drafts are the same either way
        return Arm(f"llama.cpp {cache}, {name}", "xllamacpp", temperatures=temperatures), run

    arms = [arm("plain", "f32"), arm("plain", "f16")]
    arms += [arm(f"argmax draft, K = {k}", "f32", k) for k in ks]
    arms += [arm(f"sampled draft, K = {k}", "f32", k, is_sampled=True) for k in ks]
    return arms


def openvino_arms(target: Path, draft: Path | None, ks: Sequence[int], num_tokens: int, num_threads: int) -> Runs:
    import openvino
    import openvino_genai

    device: dict[str, Any] = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), "f32")
    device["INFERENCE_NUM_THREADS"] = num_threads

    def arm(name: str, draft: Path | None = None, k: int = 0) -> tuple[Arm, Run]:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # else the prefill of a prompt is done once for all temperatures
        options: dict[str, Any] = {"scheduler_config": scheduler, **device}
        if draft is not None:
            options["draft_model"] = openvino_genai.draft_model(draft, "CPU", **device)
        pipeline = openvino_genai.LLMPipeline(target, "CPU", **options)

        def run(ids: Sequence[int], temperature: float, seed: int) -> Output:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.rng_seed = num_tokens, True, seed
            if temperature:
                config.do_sample, config.temperature = True, temperature
            if k:
                config.num_assistant_tokens = k
            result = pipeline.generate(openvino.Tensor(torch.tensor([ids]).numpy()), config)
            token_ids = list(result.tokens[0])
            num_accepted = result.extended_perf_metrics.get_num_accepted_tokens() if k else 0
            return Output(token_ids, len(token_ids) - num_accepted)

        return Arm(f"OpenVINO GenAI, {name}", "openvino-genai", _OTHER if k else _EXACT), run

    drafted = [] if draft is None else [arm(f"draft, K = {k}", draft, k) for k in ks]
    return [arm("plain"), *drafted]


class Worker:
    """A process that holds the arms of one program, and runs one of them when it is told to."""

    def __init__(self, make: Callable[..., Runs], arguments: tuple[Any, ...], num_threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, arguments, num_threads), daemon=True)
        self._process.start()
        other.close()
        self.arms: list[Arm] = self._connection.recv()

    def run(self, index: int, ids: Sequence[int], temperature: float, seed: int) -> tuple[Output, float]:
        """What the arm of this index gave, and in how many seconds."""
        self._connection.send((index, ids, temperature, seed))
        output, seconds = self._connection.recv()
        return output, seconds

    def stop(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection, make: Callable[..., Runs], arguments: tuple[Any, ...], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    runs = make(*arguments)
    connection.send([arm for arm, _ in runs])
    while True:
        try:
            index, *given = connection.recv()
        except EOFError:
            return
        start = time.perf_counter()
        output = runs[index][1](*given)
        connection.send((output, time.perf_counter() - start))


def measure(workers: Sequence[Worker], prompts: Sequence[Sequence[int]], temperature: float) -> list[Record]:
    """Every arm on every prompt, all in turn."""
    places = [(worker, index) for worker in workers for index in range(len(worker.arms))]
    places = [(worker, index) for worker, index in places if temperature in worker.arms[index].temperatures]
    records = [Record(worker.arms[index]) for worker, index in places]
    for place, ids in enumerate(prompts):
        for turn in range(len(places)):
            at = (place + turn) % len(places)
            worker, index = places[at]
            time.sleep(_PAUSE_S)
            output, seconds = worker.run(index, ids, temperature, place)
            records[at].seconds.append(seconds)
            records[at].outputs.append(output)
    return records


def report(records: Sequence[Record], temperature: float, console: Console, num_tokens: int) -> dict[str, Any]:
    """Print a table; the same as a document."""
    plain = records[0]
    best = max((r for r in records if r.arm.name.startswith("Outrider compiled, draft")), key=lambda r: r.tokens_per_s)
    reference = next(record for record in records if record.arm.package == "transformers")
    title = f"temperature {temperature:g}; best is {best.arm.name}"
    last = "law" if temperature else "as HF"
    table = new_table(title, "arm", "tokens/s", "tau", "plain / it, 95%", "best / it, 95%", last)
    rows = []
    for record in records:
        over_plain, over_best = (paired_ratio(record.seconds, ours.seconds) for ours in (plain, best))
        pairs = list(zip(record.outputs, reference.outputs, strict=True))
        num_same = sum(ours.token_ids == its.token_ids for ours, its in pairs)
        table.add_row(
            record.arm.name,
            f"{record.tokens_per_s:.1f}",
            f"{record.tau:.2f}",
            interval_text(None if record is plain else over_plain),
            interval_text(None if record is best else over_best),
            (_EXACT if record.arm.law == _EXACT else "other") if temperature else f"{num_same}/{len(pairs)}",
        )
        rows.append(
            {
                "name": record.arm.name,
                "package": record.arm.package,
                "law": record.arm.law,
                "tokens_per_s_median": record.tokens_per_s,
                "mean_acceptance_length": record.tau,
                "outrider_plain_over_it": over_plain.to_json(),
                "outrider_best_over_it": over_best.to_json(),
                "same_tokens_as_hf": None if temperature else num_same,
                "is_full_length": all(len(output.token_ids) == num_tokens for output in record.outputs),
                "seconds": record.seconds,
            }
        )
    console.print(table)
    return {"best": best.arm.name, "arms": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="fable", help="a known name, or a folder")
    parser.add_argument("--draft", default="fable-draft", help="a known name, or a folder")
    parser.add_argument("--k", default="2,4", help="drafted tokens per round, separated by commas")
    parser.add_argument("--acceptance", default=DEFAULT_ACCEPTANCE, choices=RULES, help="Outrider's rule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--openvino-target", type=Path, help="folder of the target as OpenVINO wants it")
    parser.add_argument("--openvino-draft", type=Path, help="the same for the draft")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    target, draft = (Path(resolve(name).location) for name in (arguments.target, arguments.draft))
    ks = [int(k) for k in arguments.k.split(",")]
    common = target, draft, ks, arguments.max_new_tokens
    encode = load(target).encode
    prompts = [encode(prompt) for prompt in PROMPTS[: arguments.num_prompts]]
    by_length = sorted(prompts, key=len)
    context_len = len(by_length[-1]) + arguments.max_new_tokens + max(ks) + 1

    left_out: dict[str, str] = {}
    num_threads = arguments.threads
    versions = {"transformers": version("transformers")}
    with TemporaryDirectory() as folder:
        workers = [
            Worker(outrider_arms, (*common, arguments.acceptance), num_threads),
            Worker(hf_arms, common, num_threads),
        ]
        if find_spec("xllamacpp") is None or find_spec("gguf") is None:
            left_out["llama.cpp"] = "not installed (it needs xllamacpp and gguf)"
        else:
            more = num_threads, context_len, Path(folder)
            workers.append(Worker(llama_cpp_arms, (*common, *more), num_threads))
            versions |= {name: version(name) for name in ("xllamacpp", "gguf")}
        if find_spec("openvino_genai") is None:
            left_out["OpenVINO GenAI"] = "not installed"
        elif arguments.openvino_target is None:
            left_out["OpenVINO GenAI"] = "no --openvino-target was given"
        else:
            folders = arguments.openvino_target, arguments.openvino_draft
            more_arguments = *folders, ks, arguments.max_new_tokens, num_threads
            workers.append(Worker(openvino_arms, more_arguments, num_threads))
            versions |= {name: version(name) for name in ("openvino", "openvino-genai")}
        console = Console(width=None if sys.stdout.isatty() else 100)
        results = {}
        for temperature in _TEMPERATURES:
            # The shortest and the longest prompt meet all shapes that are compiled for.
            measure(workers, [by_length[0], by_length[-1]], temperature)
            records = measure(workers, prompts, temperature)
            results[f"temperature {temperature:g}"] = report(records, temperature, console, arguments.max_new_tokens)
        for worker in workers:
            worker.stop()
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}")
    document = {
        "results": results,
        "acceptance": arguments.acceptance,
        "left_out": left_out,
        "versions": versions,
        "provenance": provenance("cpu"),
    }
    print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()
