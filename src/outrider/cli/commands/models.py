"""``outrider models``: known models, their sizes and memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import JsonOption, parse_numbers
from outrider.cli.shared.output import FILE_WIDTH, console_for, show_table, write_json
from outrider.cli.shared.progress import progress
from outrider.errors import ModelNotFound, OptionError
from outrider.options import looks_up
from outrider.pages.reports import Table
from outrider.system.files import short_name

if TYPE_CHECKING:
    from outrider.models.registry import ModelSpec

_NEED_NO_MODEL = "suffix, ngram, and mtp (if the checkpoint has the layers) need no other model"
_USUAL_CONTEXT = 2048
_USED = 0.9  # of the memory, as for pairs: the rest is for activations


@flat
def models(
    models: Annotated[Path | None, typer.Option("--models", help="TOML file with more model names.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Predict the memory of this model. In all forms; known name, folder or hub id.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="With --target: include this draft.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Cache length in tokens. Default: 2048, at most the model's context.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="List the pairs that fit into this, like 24GiB.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in the cache.")] = 1,
    devices: Annotated[str, typer.Option(help="With --target: tensor-parallel sizes, like 1,2,4,8.")] = "1",
    dtype: Annotated[str, typer.Option(help="Assumed dtype: float64, float32, bfloat16 or float16.")] = "bfloat16",
    json_target: JsonOption = None,
) -> None:
    """List the known models, with their memory. Add your own names in a TOML file.

    With --memory: list the targets that fit, with the drafts that fit beside them.

    With --target: predict the memory of a model, or a pair, in every form, from its configuration alone; and list the
    known drafts of the model."""
    from outrider.drafters.draft_options import NO_OPTIONS, split_name
    from outrider.models.registry import BYTES_PER_NUMBER

    if context is not None and context < 1:
        raise OptionError("--context", context, "a whole number >= 1")
    if batch_size < 1:
        raise OptionError("--batch-size", batch_size, "a whole number >= 1")
    if dtype not in BYTES_PER_NUMBER:
        raise OptionError("--dtype", dtype, f"choose one of {', '.join(BYTES_PER_NUMBER)}")
    if draft is not None and target is None:
        raise OptionError("--draft", draft, "give --target too")
    if looks_up(draft) or split_name(draft)[1] != NO_OPTIONS:
        raise OptionError(
            "--draft", draft, "give a model: a look-up has no weights, NAME:greedy and suffix+NAME those of NAME"
        )
    console = console_for(json_target)
    options: dict[str, Any] = {"models": models, "batch_size": batch_size, "dtype": dtype}
    if memory is not None:
        if draft is not None:
            raise OptionError("--draft", draft, "--memory finds the drafts: leave it out")
        if devices != "1":
            raise OptionError("--devices", devices, "--memory is of one device: leave it out")
        context = context or _USUAL_CONTEXT
        pairs = _fitting(models, target, memory, dtype, context, batch_size)
        options |= {"target": target, "memory": memory, "context": context}
        if pairs:
            show_table(console, _pairs(pairs, memory, context, batch_size))
            console.print("Next: outrider compare TARGET --draft DRAFT [--quantize FORM]", style="dim", markup=False)
        else:
            console.print("No known pair fits.", style="yellow")
        write_json(json_target, "models", options, {"pairs": pairs})
        return
    found: dict[str, Any] = {}
    if target is None:
        context = context or _USUAL_CONTEXT
        rows = _known(models, context, batch_size, dtype)
        show_table(console, _list(rows, context, batch_size, console.width >= FILE_WIDTH))
        from outrider.models.registry import user_file

        console.print("Pairs that fit into a memory: outrider models --memory 24GiB", style="dim")
        console.print(f"Your own names: {user_file()}, or --models FILE.", style="dim")
    else:
        with progress("loading libraries"):
            from outrider.models.executions import predicted_execution
            from outrider.models.heads.loading import MTP, is_head
            from outrider.models.loading import context_len
            from outrider.models.placement import pick_device
            from outrider.models.reading import read_config
            from outrider.models.registry import resolve

        sizes = parse_numbers("--devices", devices, "whole numbers from 1 to 64, like 1,2,4,8", most=64)
        specs = [resolve(name, models) for name in (target, draft) if name is not None and name != MTP]
        # First, since the target itself may be neither here nor within reach.
        found["drafts"] = [] if draft is not None else _drafts(specs[0], models, dtype)
        if found["drafts"]:
            show_table(console, _of_target(target, found["drafts"]))
        elif draft is None:
            console.print(f"No draft for {short_name(target)} is known by name: {_NEED_NO_MODEL}.", soft_wrap=True)
        if draft == MTP or is_head(specs[-1]):
            raise OptionError("--draft", draft or target, "a head takes about the size of its file: leave it out")
        context = context or min(_USUAL_CONTEXT, *(context_len(read_config(spec)) for spec in specs))
        rows = []
        for spec in specs:
            forms = _forms(spec, context, batch_size, dtype, sizes)
            show_table(console, _predicted(short_name(spec.name), forms, context, batch_size))
            rows += forms
        console.print("Fits here: alone, in nine tenths of the memory.", style="dim")
        execution = predicted_execution(read_config(specs[0]), pick_device("auto"))
        found |= {"execution": execution.name, "same_bytes": execution.same_bytes}
        console.print(f"{short_name(specs[0].name)} here: {execution.name}, same bytes: {execution.same_bytes}")
        options |= {"target": target, "draft": draft, "devices": sizes}
    write_json(json_target, "models", options | {"context": context}, found | {"models": rows})


def _known(models: Path | None, context: int, batch_size: int, dtype: str) -> list[dict[str, Any]]:
    """Rows of all known models."""
    from outrider.models.memory import sizes_of
    from outrider.models.registry import known_models

    rows: list[dict[str, Any]] = []
    for spec in known_models(models).values():
        sizes = sizes_of(spec)
        row: dict[str, Any] = {"name": spec.name, "location": spec.location, "source": spec.source, "about": spec.about}
        placed = spec.placement
        own_dtype = dtype if placed.dtype == "auto" else placed.dtype
        device = None if placed.device == "auto" else placed.device
        row |= {"dtype": "GGUF" if spec.gguf else own_dtype, "quantization": placed.quantization, "device": device}
        if sizes is not None:
            length = min(context, sizes.context_len)
            row |= {
                "num_params": sizes.num_params,
                "context_len": sizes.context_len,
                "weights_bytes": sizes.weights_bytes(own_dtype),
                "cache_bytes": sizes.cache_bytes(own_dtype, length, batch_size),
                "cache_tokens": length * batch_size,
            }
        rows.append(row)
    return rows


def _fitting(
    models: Path | None, target: str | None, memory: str, dtype: str, context: int, batch_size: int
) -> list[dict[str, Any]]:
    """Pairs that fit into a memory: of one target, or of all known ones."""
    from outrider.models.memory import sizes_of
    from outrider.models.pairs import as_known, fitting_pairs, memory_of
    from outrider.models.registry import known_models, resolve

    known, num_bytes = known_models(models), memory_of(memory)
    if target is None:
        targets = [one for one in known.values() if not one.is_draft]
    else:
        try:
            targets = [resolve(target, models)]
        except ModelNotFound:  # the package of a known model is not installed: its sizes are stated
            if target not in known:
                raise
            targets = [known[target]]
        if sizes_of(as_known(targets[0], known)) is None:
            remedy = "its sizes are not known: give a known name, or a folder on this disk"
            raise OptionError("--target", target, remedy)
    pairs = [
        pair
        for one in targets
        for pair in fitting_pairs(one, known, num_bytes, dtype=dtype, context=context, batch_size=batch_size)
    ]
    return [
        {
            "target": pair.target.name,
            "form": pair.form,
            "draft": pair.draft.name,
            "size_ratio": pair.share,
            "total_bytes": pair.num_bytes,
        }
        for pair in pairs
    ]


def _pairs(pairs: list[dict[str, Any]], memory: str, context: int, batch_size: int) -> Table:
    rows = []
    for before, row in zip([None, *pairs], pairs, strict=False):
        is_new = before is None or before["target"] != row["target"]
        names = (row["target"], row["form"]) if is_new else ("", "")
        ratio = "–" if row["size_ratio"] is None else f"{row['size_ratio']:.2f}"
        rows.append((*names, row["draft"], ratio, _size(row["total_bytes"])))
    columns = "target", "form", "draft", "size", "together"
    note = "Weights and caches, in nine tenths of the memory; size: draft / target. suffix looks tokens up."
    return Table(f"Pairs in {memory}, {batch_size} x {context} tokens", columns, rows, note, num_texts=3)


def _list(rows: list[dict[str, Any]], context: int, batch_size: int, is_wide: bool) -> Table:
    columns = "name", *["from"] * is_wide, "dtype", "params", "context", "weights", "cache"
    cells = [
        (
            row["name"],
            *[row["about"] or row["location"]] * is_wide,
            row["dtype"],
            _count(row.get("num_params")),
            str(row.get("context_len", "–")),
            *(_size(row.get(key)) for key in ("weights_bytes", "cache_bytes")),
        )
        for row in rows
    ]
    title = f"cache for {batch_size} x {context} tokens, at most the model's context"
    note = "The cache is preallocated."
    if not is_wide:
        note = "Where they come from: --json, or a wider terminal."
    return Table(title, columns, cells, note, num_texts=2 + is_wide)


def _forms(spec: ModelSpec, context: int, batch_size: int, dtype: str, sizes: list[int]) -> list[dict[str, Any]]:
    """Rows of one model in every form: plain and quantized, on one device and on several."""
    import torch

    from outrider.bench.predicted_memory import Predictor
    from outrider.models.cpu_weights import kept_type
    from outrider.models.memory import skeleton
    from outrider.models.placement import DTYPES, check_shares, pick_device
    from outrider.models.quantize import method_of
    from outrider.models.reading import read_config
    from outrider.models.registry import QUANTIZATIONS, Placement
    from outrider.system.resources import available_bytes

    config = read_config(spec)
    method = method_of(config)
    if method is not None:
        raise OptionError("model", spec.name, f"its checkpoint is quantized ({method}): predictions need a plain one")
    device, stated = pick_device("auto"), config.dtype or torch.float32
    for size in sizes:
        if size > 1:
            check_shares(spec.name, size, Placement().over(spec), device, config, None)
    if spec.gguf is not None:
        return [_of_file(spec, config, context, batch_size)]
    with torch.device("meta"):
        bare = skeleton(config, DTYPES[dtype])
    alone = Placement(quantization="none", device_map="none").over(spec)
    kept = kept_type(spec, alone, device, bare, stated)  # nothing is downloaded
    is_native = device.type == "cpu" and dtype == "float32"
    predictor = Predictor(config, context, batch_size, DTYPES[dtype], kept, is_native=is_native)
    free = available_bytes(device)
    rows = []
    for size in sizes:
        for quantization in ("none", *QUANTIZATIONS):
            if quantization == "int4" and (size > 1 or device.type != "cpu"):
                continue
            memory = predictor.memory(quantization, size)
            row = {"name": spec.name, "dtype": dtype, "quantization": quantization, "num_devices": size}
            row |= {"weights_bytes": memory.weights, "cache_bytes": memory.cache, "total_bytes": memory.total}
            rows.append(row | {"fits_here": None if free is None else memory.total <= _USED * free})
    return rows


def _of_file(spec: ModelSpec, config: Any, context: int, batch_size: int) -> dict[str, Any]:
    """Row of a GGUF file, whose weights stay as they are stored where they can, and whose cache is in float32."""
    import torch

    from outrider.bench.predicted_memory import Predictor
    from outrider.models.gguf.checkpoint import gguf_file
    from outrider.system.resources import available_bytes

    weights = sum(math.prod(tensor.stored_shape) for tensor in gguf_file(spec).tensors.values())
    cache = Predictor(config, context, batch_size, torch.float32, is_native=True).memory().cache
    free = available_bytes(torch.device("cpu"))
    row = {"name": spec.name, "dtype": "GGUF", "quantization": "none", "num_devices": 1, "weights_bytes": weights}
    row |= {"cache_bytes": cache, "total_bytes": weights + cache}
    return row | {"fits_here": None if free is None else weights + cache <= _USED * free}


def _drafts(target: ModelSpec, models: Path | None, dtype: str) -> list[dict[str, Any]]:
    """Rows of the known drafts of a target."""
    from outrider.models.memory import sizes_of
    from outrider.models.pairs import drafts_of, is_local
    from outrider.models.registry import known_models

    rows = []
    for spec in drafts_of(target, known_models(models)):
        sizes = sizes_of(spec)
        rows.append(
            {
                "name": spec.name,
                "location": spec.location,
                "kind": "model" if spec.head_of is None else "head",
                "format": "safetensors" if spec.gguf is None else "GGUF",
                "is_here": is_local(spec),
                "num_params": None if sizes is None else sizes.num_params,
                "weights_bytes": None if sizes is None else sizes.weights_bytes(dtype),
            }
        )
    return rows


def _of_target(target: str, drafts: list[dict[str, Any]]) -> Table:
    rows = [
        (
            *(row[key] for key in ("name", "kind", "format")),
            "yes" if row["is_here"] else "no",
            _count(row["num_params"]),
            _size(row["weights_bytes"]),
        )
        for row in drafts
    ]
    note = f"{_NEED_NO_MODEL[0].upper()}{_NEED_NO_MODEL[1:]}."
    return Table(
        f"Known drafts of {short_name(target)}",
        ("name", "kind", "format", "here", "params", "weights"),
        rows,
        note,
        num_texts=4,
    )


def _predicted(name: str, forms: list[dict[str, Any]], context: int, batch_size: int) -> Table:
    rows = [
        (
            row["dtype"] if row["quantization"] == "none" else row["quantization"],
            {None: "–", True: "yes", False: "no"}[row["fits_here"]],
            str(row["num_devices"]),
            *(_size(row[f"{key}_bytes"]) for key in ("weights", "cache", "total")),
        )
        for row in forms
    ]
    columns = "form", "fits here", "devices", "weights", "cache", "total"
    return Table(f"{name}: predicted for each device, {batch_size} x {context} tokens", columns, rows, num_texts=2)


def _count(number: int | None) -> str:
    if number is None:
        return "–"
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _size(number: int | None) -> str:
    from outrider.system.resources import size_text

    return "–" if number is None else size_text(number)
