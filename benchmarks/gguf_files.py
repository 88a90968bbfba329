"""GGUF files of a target: widened on loading, as Transformers does it; and in their own blocks, in each arithmetic.

    python benchmarks/gguf_files.py FOLDER [--draft fable-draft] [-k 4] [--forms Q8_0 Q4_0 int4] [--arms a8]
        [--ggml LIBRARY]

FOLDER is a checkpoint (benchmarks/grow.py makes some), which is written as GGUF into a temporary folder. Each arm has a
process of its own: it loads a file, takes the memory that this adds to the process, measures rounds with 0 and k drafts
that cost nothing (so a plain step, and a verify of k + 1 tokens; bench/round_costs.py), and generates with and
without the draft at temperature 1, prefill included. The form ``int4`` is FOLDER:int4, our own groups. Files in Q4_K
need LIBRARY (see four_bits.py). The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from four_bits import by_ggml
from rich.console import Console

from outrider.api import load, load_drafter
from outrider.bench.round_costs import measure_round_costs
from outrider.bench.tables import new_table
from outrider.export.gguf import write_gguf
from outrider.models.quantize import num_bytes
from outrider.models.registry import ARITHMETICS, resolve
from outrider.sampling.rules import RULES
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_ARMS = ("plain", *ARITHMETICS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", default="fable-draft")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--forms", nargs="+", default=["Q8_0", "Q4_0"])
    parser.add_argument("--arms", nargs="+", choices=_ARMS, default=_ARMS)
    parser.add_argument("--ggml")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)  # model and store: of a child process
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(_arm(arguments, *arguments.arm)))
        return
    rows = []
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "F32.gguf"
        write_gguf(resolve(str(arguments.target)), whole, torch.float32)
        for form in arguments.forms:
            if form == "int4":
                file, name, arms = arguments.target / "model.safetensors", f"{arguments.target}:int4", ["a15"]
            else:
                file = whole.with_name(f"{form}.gguf")
                name, arms = str(file), arguments.arms
                _quantize(whole, file, form, arguments.ggml)
            for arm in arms:
                model = name if arm == "plain" or form == "int4" else f"{name}:{arm}"
                store = "plain" if arm == "plain" else "auto"
                command = [sys.executable, *sys.argv, "--arm", model, store]
                ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                rows.append({"form": form, "arm": arm, "file": file.stat().st_size, **json.loads(ran.stdout)})
    columns = ("file", "arm", "file MB", "weights MB", "added MB", "load s", "step ms")
    table = new_table(
        f"{arguments.target.name}, {arguments.threads} thread(s)",
        *columns,
        f"verify of {arguments.k + 1}",
        "plain tok/s",
        f"{arguments.draft} tok/s",
    )
    for row in rows:
        table.add_row(
            row["form"],
            row["arm"],
            *(f"{row[key] / 1e6:.0f}" for key in ("file", "weights", "added")),
            f"{row['load_s']:.1f}",
            f"{1e3 * row['plain_step_s']:.1f}",
            f"{row['verify_s'] / row['plain_step_s']:.2f}",
            f"{row['plain']:.0f}",
            f"{row['pair']:.0f}",
        )
    Console(width=120).print(table)
    print(json.dumps({"rows": rows, "provenance": provenance("cpu")}))


def _quantize(whole: Path, file: Path, form: str, library: str | None) -> None:
    """Write a file of float32 again, its matrices in another form."""
    reader, kind = gguf.GGUFReader(whole), gguf.GGMLQuantizationType[form]
    writer = gguf.GGUFWriter(file, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            of_parts = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=of_parts)
    for tensor in reader.tensors:
        if tensor.data.ndim == 2:
            blocks = by_ggml(library, tensor.data, kind) if library else gguf.quants.quantize(tensor.data, kind)
            writer.add_tensor(tensor.name, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _arm(arguments: argparse.Namespace, model: str, store: str) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    load("fable")  # what any model needs
    before, begin = _peak(), time.perf_counter()
    plain = load(model, dtype="float32", device="cpu", store=store)
    found: dict[str, Any] = {"load_s": time.perf_counter() - begin, "added": _peak() - before}
    found["weights"] = num_bytes(plain.target.model)
    free = replace(plain, drafter=load_drafter(plain, "ngram"))
    pair = replace(plain, drafter=load_drafter(plain, arguments.draft))
    seconds = measure_round_costs(free.target, free.drafter, RULES["block"])
    found |= {"plain_step_s": seconds[0], "verify_s": seconds[arguments.k]}
    prompts = PROMPTS[: arguments.prompts]
    for name, decoder, own in (("plain", plain, {}), ("pair", pair, {"num_draft_tokens": arguments.k})):
        options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True, "seed": 0} | own
        decoder.generate(prompts[0], **options)
        begin = time.perf_counter()
        outputs = [decoder.generate(prompt, **options)[0] for prompt in prompts]
        found[name] = sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - begin)
    return found


def _peak() -> int:
    """The most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


if __name__ == "__main__":
    main()
