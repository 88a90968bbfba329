"""``outrider models``: known models with their sizes; and one model, with its memory in each form and its drafts."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption, ModelsOption, parse_numbers
from outrider.cli.shared.output import FILE_WIDTH, console_for, show_table, write_json
from outrider.cli.shared.progress import progress
from outrider.errors import OptionError
from outrider.pages.reports import Columns, Table
from outrider.system.files import short_name
from outrider.system.resources import available_bytes, size_text

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.models.registry import ModelSpec

_NEED_NO_MODEL = "suffix, ngram, and mtp (if the checkpoint has the layers) need no other model"
_YES = {None: "–", True: "yes", False: "no"}
_USED = 0.9  # of the memory: the rest is for caches and activations


@flat
def models(
    models: ModelsOption = None,
    target: str | None = Option(
        None, help="Predict the memory of this model. In all forms; known name, folder or hub id."
    ),
    devices: str = Option("1", help="With --target: tensor-parallel sizes, like 1,2,4,8."),
    dtype: str = Option("bfloat16", help="Assumed dtype: float64, float32, bfloat16 or float16."),
    json_target: JsonOption = None,
) -> None:
    """List the known models, with their sizes. Add your own names in a TOML file.

    With --target: predict the memory of a model's weights in every form, from its configuration alone; and list its
    known drafts."""
    from outrider.models.registry import BYTES_PER_NUMBER, user_file

    if dtype not in BYTES_PER_NUMBER:
        raise OptionError("--dtype", dtype, f"choose one of {', '.join(BYTES_PER_NUMBER)}")
    console = console_for(json_target)
    options: dict[str, Any] = {"models": models, "dtype": dtype}
    if target is None:
        rows = _known(models, dtype)
        _show_known(console, rows)
        console.print(f"Your own names: {user_file()}, or --models FILE.", style="dim")
        write_json(json_target, "models", options, {"models": rows})
        return
    with progress("loading libraries"):
        from outrider.models.executions import predicted_execution
        from outrider.models.heads.loading import is_head
        from outrider.models.placement import pick_device
        from outrider.models.reading import read_config
        from outrider.models.registry import resolve
        from outrider.runtime.lm import promise
    sizes = parse_numbers("--devices", devices, "whole numbers from 1 to 64, like 1,2,4,8", most=64)
    spec = resolve(target, models)
    drafts = _drafts(spec, models, dtype)  # first, since the target itself may be neither here nor within reach
    name = short_name(target)
    if drafts:
        columns: Columns = {key: key for key in ("name", "kind", "format")}
        columns = {**columns, "here": lambda row: _YES[row["is_here"]], "params": _params, "weights": _weights}
        note = f"{_NEED_NO_MODEL[0].upper()}{_NEED_NO_MODEL[1:]}."
        show_table(console, Table.of(f"Known drafts of {name}", drafts, columns, note, num_texts=4))
    else:
        console.print(f"No draft for {name} is known by name: {_NEED_NO_MODEL}.", soft_wrap=True)
    if is_head(spec):
        raise OptionError("--target", target, "a head takes about the size of its file: give a model")
    rows = _forms(spec, dtype, sizes)
    columns = {
        "form": lambda row: row["dtype"] if row["quantization"] == "none" else row["quantization"],
        "fits here": lambda row: _YES[row["fits_here"]],
        "devices": lambda row: str(row["num_devices"]),
        "weights": _weights,
    }
    show_table(console, Table.of(f"{short_name(spec.name)}: for each device", rows, columns, num_texts=2))
    console.print("Fits here: the weights, in nine tenths of the memory.", style="dim")
    execution = predicted_execution(read_config(spec), pick_device("auto"))
    same_bytes = promise(execution, execution == "native")
    console.print(f"{short_name(spec.name)} here: {execution}, same bytes: {same_bytes}")
    found = {"drafts": drafts, "execution": execution, "same_bytes": same_bytes, "models": rows}
    write_json(json_target, "models", options | {"target": target, "devices": sizes}, found)


def _known(models: Path | None, dtype: str) -> list[dict[str, Any]]:
    from outrider.models.memory import sizes_of
    from outrider.models.registry import known_models

    rows: list[dict[str, Any]] = []
    for spec in known_models(models).values():
        sizes, placed = sizes_of(spec), spec.placement
        own_dtype = dtype if placed.dtype == "auto" else placed.dtype
        row = {name: getattr(spec, name) for name in ("name", "location", "source", "about")}
        row |= {"dtype": "GGUF" if spec.gguf else own_dtype, "quantization": placed.quantization}
        row |= {"device": None if placed.device == "auto" else placed.device}
        if sizes is not None:
            row |= {"num_params": sizes.num_params, "context_len": sizes.context_len}
            row |= {"weights_bytes": sizes.weights_bytes(own_dtype)}
        rows.append(row)
    return rows


def _show_known(console: Console, rows: list[dict[str, Any]]) -> None:
    is_wide = console.width >= FILE_WIDTH
    columns: Columns = {
        "name": "name",
        **({"from": lambda row: row["about"] or row["location"]} if is_wide else {}),
        "dtype": "dtype",
        "params": _params,
        "context": lambda row: str(row.get("context_len") or "–"),
        "weights": _weights,
    }
    note = "" if is_wide else "Where they come from: --json, or a wider terminal."
    show_table(console, Table.of("known models", rows, columns, note, num_texts=2 + is_wide))


def _forms(spec: ModelSpec, dtype: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Rows of one model in every form: plain and quantized, on one device and on several; or as a GGUF file."""
    import torch

    from outrider.models.memory import skeleton, weights_bytes
    from outrider.models.placement import DTYPES, check_shares, pick_device
    from outrider.models.quantize import method_of
    from outrider.models.reading import read_config
    from outrider.models.registry import QUANTIZATIONS, Placement

    config, device = read_config(spec), pick_device("auto")
    if (method := method_of(config)) is not None:
        raise OptionError("model", spec.name, f"its checkpoint is quantized ({method}): predictions need a plain one")
    for size in sizes:
        if size > 1:
            check_shares(spec.name, size, Placement().over(spec), device, config, None)
    # Blocks of GGUF files are widened elsewhere than on a CPU.
    free = available_bytes(device) if spec.gguf is None or device.type == "cpu" else None

    def row(form: str, quantization: str, size: int, number: int) -> dict[str, Any]:
        about = {"name": spec.name, "dtype": form, "quantization": quantization, "num_devices": size}
        return about | {"weights_bytes": number, "fits_here": None if free is None else number <= _USED * free}

    if spec.gguf is not None:
        from outrider.models.gguf.checkpoint import gguf_file

        stored = sum(math.prod(tensor.stored_shape) for tensor in gguf_file(spec).tensors.values())
        return [row("GGUF", "none", 1, stored)]
    with torch.device("meta"):
        bare = skeleton(config, DTYPES[dtype])
    forms = product(sizes, ("none", *QUANTIZATIONS))
    kept = [one for one in forms if one[1] != "int4" or (one[0] == 1 and device.type == "cpu")]
    return [row(dtype, kind, size, weights_bytes(bare, kind, size)) for size, kind in kept]


def _drafts(target: ModelSpec, models: Path | None, dtype: str) -> list[dict[str, Any]]:
    from outrider.models.memory import sizes_of
    from outrider.models.pairs import drafts_of, is_local
    from outrider.models.registry import known_models

    return [
        {
            "name": spec.name,
            "location": spec.location,
            "kind": "model" if spec.head_of is None else "head",
            "format": "safetensors" if spec.gguf is None else "GGUF",
            "is_here": is_local(spec),
            "num_params": sizes and sizes.num_params,
            "weights_bytes": sizes and sizes.weights_bytes(dtype),
        }
        for spec in drafts_of(target, known_models(models))
        for sizes in [sizes_of(spec)]
    ]


def _params(row: dict[str, Any]) -> str:
    if (number := row.get("num_params")) is None:
        return "–"
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _weights(row: dict[str, Any]) -> str:
    return "–" if (number := row.get("weights_bytes")) is None else size_text(number)
