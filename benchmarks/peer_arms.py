"""The arms of peers.py and peer_samples.py: Outrider and other programs, each with its ways to generate.

Every arm takes and gives token ids, the same number whatever the tokens are (llama.cpp forbids end tokens where the
others take them as tokens like all). Temperature 1 is pure sampling: no top-k, top-p, min-p or penalties. Weights are
float32 everywhere, or those of the target are 8 bits: with a scale for each channel (torchao) in Outrider and Hugging
Face, for each 32 numbers (Q8_0) in llama.cpp. "f32" and "f16" are the type of llama.cpp's cache, of which the second is
its default.

Each program has a process of its own: in one process their pools of threads get in each other's way (Outrider took four
times as long beside idle llama.cpp servers and OpenVINO pipelines), which says nothing of any of them.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig, TorchAoConfig

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.export.gguf import write_gguf
from outrider.models.placement import Placement
from outrider.models.registry import ModelSpec

EXACT = "exact"
OTHER = "not the published rule"
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Output:
    """What one call gave, in how many forwards of the target."""

    token_ids: list[int]
    num_forwards: float


Run = Callable[[Sequence[int], float, int, int], Output]
"""(token ids of the prompt, temperature, seed, number of tokens) -> output"""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate.

    Attributes:
        family: its name, less K.
        package: "outrider", "transformers", "llama.cpp" or "openvino-genai".
        k: drafted tokens per round, where that is ours to choose.
        law: at temperature 1, what the output's distribution is to that of the model.
        temperatures: those at which it differs from the other arms.
        is_compiled: programs are made for the sizes that it meets first.
    """

    family: str
    package: str
    k: int | None = None
    law: str = EXACT
    temperatures: Sequence[float] = TEMPERATURES
    is_compiled: bool = False

    @property
    def name(self) -> str:
        return self.family if self.k is None else f"{self.family}, K = {self.k}"


Runs = list[tuple[Arm, Run]]


@contextmanager
def outrider_arms(
    target: Path, draft: Path, ks: Sequence[int], acceptance: str, weights: str = "float32"
) -> Iterator[Runs]:
    quantization = None if weights == "float32" else weights
    loaded = load(target, dtype="float32", acceptance=acceptance, quantization=quantization)
    plain = replace(loaded, tokenizer=None)
    eager = replace(plain, drafter=load_drafter(plain, draft, placement=Placement(dtype="float32")))

    def arm(way: str, name: str, decoder: Decoder, k: int | None = None) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True}
            [completion] = decoder.generate([list(ids)], num_draft_tokens=k, seed=seed, **options)
            return Output(list(completion.token_ids), num_tokens / (completion.stats.mean_acceptance_length or 1))

        return Arm(f"Outrider {way}, {name}", "outrider", k, is_compiled=way == "compiled"), run

    arms = []
    for way, decoder in (("compiled", eager.compiled()), ("eager", eager)):
        arms.append(arm(way, "plain", decoder.plain()))
        arms += [arm(way, "draft", decoder, k) for k in ks]
    yield arms


@contextmanager
def hf_arms(target: Path, draft: Path, ks: Sequence[int], weights: str = "float32") -> Iterator[Runs]:
    model, static, assistant = _hf_model(target, weights), _hf_model(target, weights), _hf_model(draft)
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.register_forward_pre_hook(count)

    def generate(model: Any, ids: Sequence[int], temperature: float, seed: int, **options: Any) -> list[int]:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        prompt = torch.tensor([ids])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **sampling, **options)
        return list(output[0, len(ids) :].tolist())

    def arm(name: str, k: int | None = None, drafting: dict[str, Any] | None = None, **options: Any) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            nonlocal num_forwards
            num_forwards = 0
            if drafting is not None:
                # Read from the assistant's own configuration, not from the arguments of ``generate``.
                assistant.generation_config = GenerationConfig(pad_token_id=0, **drafting)
            token_ids = generate(model, ids, temperature, seed, max_new_tokens=num_tokens, **options)
            return Output(token_ids, num_forwards)

        return Arm(f"HF, {name}", "transformers", k), run

    def run_compiled(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
        config = CompileConfig(mode="default")
        config._compile_all_devices = True  # else it is taken for a GPU only
        options: dict[str, Any] = {"cache_implementation": "static", "compile_config": config}
        token_ids = generate(static, ids, temperature, seed, max_new_tokens=num_tokens, **options)
        return Output(token_ids, len(token_ids))

    # It refuses a static cache with an assistant, and without one there is nothing to compile for.
    compiled = Arm("HF compiled, plain", "transformers", is_compiled=True), run_compiled
    arms = [arm("plain"), compiled]
    for k in ks:
        # With the default threshold it stops early, and K is only the most that it drafts.
        drafting = {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant"}
        drafting["assistant_confidence_threshold"] = 0.0
        arms.append(arm("assistant", k, drafting, assistant_model=assistant))
    arms.append(arm("assistant, defaults", None, {}, assistant_model=assistant))
    arms += [arm("prompt lookup", k, prompt_lookup_num_tokens=k) for k in ks]
    yield arms


def _hf_model(path: Path, weights: str = "float32") -> Any:
    how: dict[str, Any] = {}
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        how["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **how)
    # Without an end token none ends the text; what the files say of sampling is set aside.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@contextmanager
def llama_cpp_arms(
    target: Path,
    draft: Path,
    ks: Sequence[int],
    server: Path,
    num_threads: int,
    context_len: int,
    folder: Path,
    weights: str = "float32",
) -> Iterator[Runs]:
    """Of llama.cpp's own server; one for each arm, since it takes K when it starts, and only then."""
    files = folder / "target.gguf", folder / "draft.gguf"
    for path, file, dtype in zip((target, draft), files, (weights, "float32"), strict=True):
        write_gguf(ModelSpec(name=path.name, path=path), file, getattr(torch, dtype))
    processes: list[subprocess.Popen[bytes]] = []

    def arm(name: str, cache_type: str, k: int | None = None, drafting: str = "greedy") -> tuple[Arm, Run]:
        threads = str(num_threads)
        command = [str(server), "-m", str(files[0]), "-t", threads, "-tb", threads, "-c", str(context_len), "-np", "1"]
        command += ["-ctk", cache_type, "-ctv", cache_type, "--cache-ram", "0"]
        # On the CPU its flash attention is the slower one with a float32 cache, and the faster one with float16.
        command += ["-fa", "off" if cache_type == "f32" else "auto"]
        if k is not None:
            command += ["-md", str(files[1]), "--spec-type", "draft-simple", "--spec-draft-n-max", str(k)]
            command += ["--spec-draft-sampling", drafting, "-td", threads, "-tbd", threads]
            command += ["-ctkd", cache_type, "-ctvd", cache_type]

        @cache
        def address() -> str:
            process, address = _start_server(command)
            processes.append(process)
            return address

        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            options = {"temperature": temperature, "samplers": ["temperature"], "seed": seed, "ignore_eos": True}
            body = {"prompt": list(ids), "n_predict": num_tokens, "cache_prompt": False, "return_tokens": True}
            answer = _answer(f"{address()}/completion", json.dumps(body | options).encode())
            return Output(answer["tokens"], len(answer["tokens"]) - answer["timings"].get("draft_n_accepted", 0))

        # Greedy drafts are the same either way.
        temperatures = (1.0,) if drafting == "probabilistic" else TEMPERATURES
        return Arm(f"llama.cpp {cache_type}, {name}", "llama.cpp", k, temperatures=temperatures), run

    arms = [arm("plain", "f32"), arm("plain", "f16")]
    arms += [arm("argmax draft", "f16", k) for k in ks]
    arms += [arm("sampled draft", "f16", k, "probabilistic") for k in ks]
    try:
        yield arms
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _start_server(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], str]:
    """A server that answers, and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    while True:
        try:
            _answer(f"{address}/health")
            return process, address
        except (urllib.error.URLError, ConnectionError):
            if process.poll() is not None:
                raise RuntimeError(f"this ended at once: {' '.join(command)}") from None
            time.sleep(0.1)


def _answer(address: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(address, data=body, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def llama_cpp_build(server: Path) -> str:
    """Version, compiler, and what of the processor the build uses, in the program's own words."""
    said = "".join(
        subprocess.run(
            [str(server), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        ).stdout
        for arguments in (["--version"], ["-m", "no-such-model", "-lv", "9"])
    )
    lines = [line.strip() for line in said.splitlines()]
    found = [line for line in lines if line.startswith(("version: ", "built with "))]
    features = re.search(r"system_info: .*?\| (.*\S)", said)
    flags = re.findall(r"(\w+) = 1", features[1]) if features else ["unknown"]
    return f"{', '.join(dict.fromkeys(found))}; {' '.join(flags)}"


@contextmanager
def openvino_arms(target: Path, draft: Path | None, ks: Sequence[int], num_threads: int) -> Iterator[Runs]:
    import openvino
    import openvino_genai

    device: dict[str, Any] = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), "f32")
    device["INFERENCE_NUM_THREADS"] = num_threads

    def pipeline_of(draft: Path | None = None) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # else the prefill of a prompt is done once for all temperatures
        options: dict[str, Any] = {"scheduler_config": scheduler, **device}
        if draft is not None:
            options["draft_model"] = openvino_genai.draft_model(draft, "CPU", **device)
        return openvino_genai.LLMPipeline(target, "CPU", **options)

    def arm(name: str, pipeline: Any, k: int | None = None) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.rng_seed = num_tokens, True, seed
            if temperature:
                config.do_sample, config.temperature = True, temperature
            if k is not None:
                config.num_assistant_tokens = k
            result = pipeline.generate(openvino.Tensor(torch.tensor([ids]).numpy()), config)
            token_ids = list(result.tokens[0])
            num_accepted = 0 if k is None else result.extended_perf_metrics.get_num_accepted_tokens()
            return Output(token_ids, len(token_ids) - num_accepted)

        return Arm(f"OpenVINO GenAI, {name}", "openvino-genai", k, EXACT if k is None else OTHER), run

    arms = [arm("plain", pipeline_of())]
    if draft is not None:
        pipeline = pipeline_of(draft)
        arms += [arm("draft", pipeline, k) for k in ks]
    yield arms


class Worker:
    """A process that holds the arms of one program, and runs one of them when it is told to."""

    def __init__(
        self, make: Callable[..., AbstractContextManager[Runs]], arguments: tuple[Any, ...], num_threads: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, arguments, num_threads))
        self._process.start()
        other.close()
        self.arms: list[Arm] = self._connection.recv()

    def run(
        self, index: int, ids: Sequence[int], temperature: float, seed: int, num_tokens: int
    ) -> tuple[Output, float]:
        """What the arm of this index gave, and in how many seconds."""
        self._connection.send((index, ids, temperature, seed, num_tokens))
        output, seconds = self._connection.recv()
        return output, seconds

    def stop(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(
    connection: Connection,
    make: Callable[..., AbstractContextManager[Runs]],
    arguments: tuple[Any, ...],
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    with make(*arguments) as runs:
        connection.send([arm for arm, _ in runs])
        while True:
            try:
                index, *given = connection.recv()
            except EOFError:
                return
            start = time.perf_counter()
            output = runs[index][1](*given)
            connection.send((output, time.perf_counter() - start))
