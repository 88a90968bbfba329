"""``outrider models``: known models, their sizes and memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import JsonOption, flat
from outrider.cli.shared.output import FILE_WIDTH, console_for, print_table, write_json
from outrider.cli.shared.pair_options import AllowPickleOption
from outrider.errors import OptionError, OutriderError
from outrider.options import check_num_draft_tokens, looks_up

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.bench.predicted_memory import Memory, Workload
    from outrider.models.registry import ModelSpec

_MOST_DEVICES = 64
_USUAL_CONTEXT = 2048


@flat
def models(
    models: Annotated[Path | None, typer.Option("--models", help="TOML file with more model names.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Predict the memory of this model. In all forms; known name, folder or hub id.",
        ),
    ] = None,
    draft: Annotated[str | None, typer.Option(help="With --target: include this draft.")] = None,
    context: Annotated[
        int | None, typer.Option(help="Cache length in tokens. Default: 2048, at most the model's context.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="List the pairs that fit into this, like 24GiB."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in the cache.")] = 1,
    num_draft_tokens: Annotated[
        int, typer.Option("-k", "--num-draft-tokens", help="With --target: tokens drafted per round.")
    ] = 4,
    devices: Annotated[str, typer.Option(help="With --target: tensor-parallel sizes, like 1,2,4,8.")] = "1",
    dtype: Annotated[str, typer.Option(help="Assumed dtype: float64, float32, bfloat16 or float16.")] = "bfloat16",
    allow_pickle: AllowPickleOption = False,
    json_target: JsonOption = None,
) -> None:
    """List the known models, with their memory. Add your own names in a TOML file.

    With --memory: list targets with the drafts that fit beside them.

    With --target: predict the memory of a model, or a pair, in every form, from its configuration alone."""
    from outrider.drafters.draft_options import NO_OPTIONS, split_name
    from outrider.models.registry import BYTES_PER_NUMBER

    if context is not None and context < 1:
        raise OptionError("--context", context, "a whole number >= 1")
    if batch_size < 1:
        raise OptionError("--batch-size", batch_size, "a whole number >= 1")
    if dtype not in BYTES_PER_NUMBER:
        raise OptionError("--dtype", dtype, f"choose one of {', '.join(BYTES_PER_NUMBER)}")
    check_num_draft_tokens(num_draft_tokens)
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
        for name, value, default in (("--devices", devices, "1"), ("-k", num_draft_tokens, 4)):
            if value != default:
                raise OptionError(name, value, "--memory is of one device, and of any K: leave it out")
        context = context or _USUAL_CONTEXT
        pairs = _fitting(models, target, memory, dtype, context, batch_size)
        options |= {"target": target, "memory": memory, "context": context}
        if pairs:
            print_table(console, _pairs(pairs, memory, context, batch_size))
            console.print("Weights and caches, in nine tenths of the memory; size: draft / target.", style="dim")
            console.print("Next: outrider compare --target TARGET --draft DRAFT [--quantize FORM]", style="dim")
        else:
            console.print("No known pair fits.", style="yellow")
        write_json(json_target, "models", options, {"pairs": pairs})
        return
    if target is None:
        context = context or _USUAL_CONTEXT
        rows = _known(models, context, batch_size, dtype)
        is_wide = console.width >= FILE_WIDTH
        print_table(console, _list(rows, context, batch_size, is_wide))
        from outrider.models.registry import user_file

        if is_wide:
            console.print("The cache is preallocated; with CUDA graphs, its length is a power of two.", style="dim")
        else:
            console.print("Where they come from: --json, or a wider terminal.", style="dim")
        console.print("Pairs that fit into a memory: outrider models --memory 24GiB", style="dim")
        console.print(f"Your own names: {user_file()}, or --models FILE (see the README).", style="dim")
    else:
        from outrider.bench.predicted_memory import Workload, head_memory
        from outrider.models.heads.loading import MTP, is_head
        from outrider.models.loading import context_len
        from outrider.models.placement import DTYPES
        from outrider.models.reading import read_config
        from outrider.models.registry import resolve

        sizes = _numbers_of_devices(devices)
        specs = [resolve(name, models) for name in (target, draft) if name not in (None, MTP)]
        head = specs.pop() if draft not in (None, MTP) and is_head(specs[-1]) else None
        context = context or min(_USUAL_CONTEXT, *(context_len(read_config(spec)) for spec in specs))
        work = Workload(context, batch_size, num_draft_tokens)
        rows = [row for spec in specs for row in _forms(spec, work, dtype, sizes)]
        if head is not None or draft == MTP:
            memory_of_head = head_memory(head, specs[0], work, DTYPES[dtype], allow_pickle=allow_pickle)
            rows.append(_row(draft, dtype, "none", 1, memory_of_head, None))
        for name in dict.fromkeys(row["name"] for row in rows):
            print_table(console, _predicted(name, [row for row in rows if row["name"] == name], work))
        console.print("The total has the larger of prefill and verify; fits here: without other models.", style="dim")
        options |= {"target": target, "draft": draft, "num_draft_tokens": num_draft_tokens, "devices": sizes}
    write_json(json_target, "models", options | {"context": context}, {"models": rows})


def _known(models: Path | None, context: int, batch_size: int, dtype: str) -> list[dict[str, Any]]:
    """Rows of all known models."""
    from outrider.models.memory import sizes_of
    from outrider.models.registry import known_models

    rows: list[dict[str, Any]] = []
    for spec in known_models(models).values():
        sizes = sizes_of(spec)
        row: dict[str, Any] = {"name": spec.name, "location": spec.location, "source": spec.source, "about": spec.about}
        placed = spec.placement
        row_dtype = dtype if placed.dtype == "auto" else placed.dtype
        device = None if placed.device == "auto" else placed.device
        row |= {"dtype": row_dtype, "quantization": placed.quantization, "device": device}
        if sizes is not None:
            length = min(context, sizes.context_len)
            row |= {
                "num_params": sizes.num_params,
                "context_len": sizes.context_len,
                "weights_bytes": _kept_bytes(spec, row_dtype) or sizes.weights_bytes(row_dtype),
                "cache_bytes": sizes.cache_bytes(row_dtype, length, batch_size),
                "cache_bytes_compiled": sizes.cache_bytes(row_dtype, length, batch_size, is_prepared=True),
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
    targets = list(known.values()) if target is None else [resolve(target, models)]
    if target is not None and sizes_of(as_known(targets[0], known)) is None:
        raise OptionError("--target", target, "its sizes are not known: give a known name, or a folder on this disk")
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
    from outrider.bench.tables import NameCell

    table = _table(
        f"Pairs in {memory}, {batch_size} x {context} tokens",
        *("target", "form", "draft", "size", "together"),
        texts=("target", "form", "draft"),
    )
    for before, row in zip([None, *pairs], pairs, strict=False):
        is_new = before is None or before["target"] != row["target"]
        head = (row["target"], row["form"]) if is_new else ("", "")
        table.add_row(
            NameCell(head[0]), head[1], NameCell(row["draft"]), f"{row['size_ratio']:.2f}", _size(row["total_bytes"])
        )
    return table


def _kept_bytes(spec: ModelSpec, dtype: str) -> int | None:
    """Bytes of the weights if large ones stay in bfloat16 for float32 arithmetic (``--store auto``); None if they do
    not, or the model is not on this disk."""
    from outrider.models.memory import only_type, skeleton, weight_files, weights_bytes

    if dtype != "float32" or spec.path is None or only_type(weight_files(spec.path)) != "BF16":
        return None
    import torch

    from outrider.models.cpu_weights import kept_type, narrow_weights
    from outrider.models.placement import pick_device
    from outrider.models.reading import read_config
    from outrider.models.registry import Placement

    try:
        placed = Placement(dtype=dtype).over(spec)
        if (placed.quantization, placed.device_map) != ("none", "none"):
            return None
        with torch.device("meta"):
            bare = skeleton(read_config(spec), torch.float32)
        kept = kept_type(spec, placed, pick_device(placed.device), bare)
    except OutriderError:  # it could not be loaded here
        return None
    if kept is None:
        return None
    narrow_weights(bare, kept)
    return weights_bytes(bare)


def _list(rows: list[dict[str, Any]], context: int, batch_size: int, is_wide: bool) -> Table:
    from outrider.bench.tables import NameCell

    columns = "name", "parameters", "context", "weights", "cache", "dtype", *("captured", "from") * is_wide
    title = f"cache for {batch_size} x {context} tokens, at most the model's context"
    table = _table(title, *columns, texts=("name", "dtype", "from"))
    for row in rows:
        more = _size(row.get("cache_bytes_compiled")), NameCell(row["about"] or row["location"])
        table.add_row(
            NameCell(row["name"]),
            _count(row.get("num_params")),
            f"{row['context_len']}" if "context_len" in row else "-",
            *(_size(row.get(key)) for key in ("weights_bytes", "cache_bytes")),
            row["dtype"],
            *more[: 2 * is_wide],
        )
    return table


def _numbers_of_devices(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if not 1 <= numbers[0] <= numbers[-1] <= _MOST_DEVICES:
        raise OptionError("--devices", text, f"whole numbers from 1 to {_MOST_DEVICES}, like 1,2,4,8")
    return numbers


def _forms(spec: ModelSpec, work: Workload, dtype: str, sizes: list[int]) -> list[dict[str, Any]]:
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
    method = "gguf" if spec.gguf is not None else method_of(config)
    if method is not None:
        raise OptionError("model", spec.name, f"its checkpoint is quantized ({method}): predictions need a plain one")
    device, stated = pick_device("auto"), config.dtype or torch.float32
    for size in sizes:
        if size > 1:
            check_shares(spec.name, size, Placement().over(spec), device, config, None)
    with torch.device("meta"):
        bare = skeleton(config, DTYPES[dtype])
    alone = Placement(quantization="none", device_map="none").over(spec)
    kept = kept_type(spec, alone, device, bare, stated)  # nothing is downloaded
    predictor = Predictor(config, work, DTYPES[dtype], kept)
    free = available_bytes(device)
    return [
        _row(spec.name, dtype, quantization, size, predictor.memory(quantization, size), free)
        for size in sizes
        for quantization in ("none", *QUANTIZATIONS)
        if quantization != "int4" or (size == 1 and device.type == "cpu")
    ]


def _row(
    name: str | None, dtype: str, quantization: str, num_devices: int, memory: Memory, free: int | None
) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": dtype,
        "quantization": quantization,
        "num_devices": num_devices,
        "weights_bytes": memory.weights,
        "cache_bytes": memory.cache,
        "prefill_bytes": memory.prefill,
        "verify_bytes": memory.verify,
        "total_bytes": memory.total,
        "fits_here": None if free is None or memory.prefill is None else memory.total <= free,
    }


def _predicted(name: str, rows: list[dict[str, Any]], work: Workload) -> Table:
    table = _table(
        f"{name}: predicted for each device, {work.num_rows} x {work.context} tokens, K = {work.k}",
        *("form", "devices", "weights", "cache", "prefill", "verify", "total", "fits here"),
        texts=("form", "fits here"),
    )
    for row in rows:
        form = row["dtype"] if row["quantization"] == "none" else row["quantization"]
        keys = ("weights", "cache", "prefill", "verify", "total")
        fits = {None: "-", True: "yes", False: "no"}[row["fits_here"]]
        sizes = (_size(row[f"{key}_bytes"]) for key in keys)
        table.add_row(form, str(row["num_devices"]), *sizes, fits)
    return table


def _table(title: str, *columns: str, texts: tuple[str, ...]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        justify: Any = "left" if column in texts else "right"
        table.add_column(column, justify=justify, no_wrap=column not in texts, overflow="fold")
    return table


def _count(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _size(number: int | None) -> str:
    from outrider.system.resources import size_text

    return "-" if number is None else size_text(number)
