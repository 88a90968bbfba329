"""``outrider plan --what-if``: predicted speed-up and best K from given numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.shared.output import (
    console_for,
    print_table,
    write_json,
)
from outrider.errors import OptionError

if TYPE_CHECKING:
    from outrider.stats.speedup import Prediction

_KNOWN = {"alpha": "0 <= alpha <= 1", "c": "c >= 0", "v": "v > 0", "c_ops": "c_ops >= 0"}


def what_if(text: str, ks: Sequence[int], plot: Path | None, html: Path | None, json_target: str | None) -> None:
    """Predict the speed-up of each K from numbers alone. The result may be: no draft.

    Raises:
        OptionError, FileError, MissingExtra
    """
    known = _parse(text)

    from outrider.bench.plots import plot_prediction
    from outrider.bench.tables import new_table
    from outrider.stats.speedup import predict

    predictions = predict(ks, **known)
    best = _best(predictions)
    limits = {
        "free": _best(predict(ks, **(known | {"c": 0.0}))),
        "agreeing": _best(predict(ks, **(known | {"alpha": 1.0}))),
    }
    console = console_for(json_target)
    title = f"alpha = {known['alpha']:g}, c = {known['c']:g}, v = {known['v']:g}"
    table = new_table(title, "K", "tau", "speed-up", "operations")
    for one in predictions:
        table.add_row(str(one.k), f"{one.tau:.2f}", f"{one.speed_up:.2f}", f"{one.operations:.2f}")
    print_table(console, table)
    if best is None:
        console.print("Best: none. No K is faster than plain decoding: outrider generate --draft none")
    else:
        gain = f"{best.speed_up:.2f} times as fast as plain decoding"
        console.print(f"Best: K = {best.k}, {gain}: outrider generate -k {best.k}")
    free, agreeing = (f"{limit.speed_up:.2f} (K = {limit.k})" if limit else "none either" for limit in limits.values())
    console.print(f"With a draft that takes no time: {free}; with one that always agrees: {agreeing}.")
    console.print(
        "tau: tokens per round; ratios are relative to plain decoding; v is the same for every K", style="dim"
    )
    if plot is not None:
        plot_prediction([(one.k, one.speed_up) for one in predictions], plot, title)
        console.print(f"Plot: {plot}")
    body: dict[str, Any] = {
        "predictions": [asdict(one) for one in predictions],
        "best": best and asdict(best),
        "limits": {name: limit and asdict(limit) for name, limit in limits.items()},
    }
    write_json(json_target, "plan", {"what_if": known, "num_draft_tokens": list(ks)}, body, html=html)


def _best(predictions: Sequence[Prediction]) -> Prediction | None:
    """Fastest K, the smallest among equals; None if plain decoding is as fast."""
    best = max(predictions, key=lambda one: (one.speed_up, -one.k))
    return best if best.speed_up > 1 else None


def _parse(text: str) -> dict[str, float]:
    """Parse ``alpha=0.8,c=0.05``.

    Raises:
        OptionError
    """
    known: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if name not in _KNOWN or name in known or not math.isfinite(number):
            raise OptionError("--what-if", text, f"numbers for {', '.join(_KNOWN)}, each once, like alpha=0.8,c=0.05")
        is_valid = number > 0 if name == "v" else 0 <= number <= (1 if name == "alpha" else math.inf)
        if not is_valid:
            raise OptionError("--what-if", text, _KNOWN[name])
        known[name] = number
    if missing := {"alpha", "c"} - known.keys():
        raise OptionError("--what-if", text, f"{' and '.join(sorted(missing))} must be given")
    return {"v": 1.0, "c_ops": known["c"], **known}
