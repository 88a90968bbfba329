"""Schemas of training and of handing a pair over."""

from __future__ import annotations

from outrider.schemas.generate import BATCH_SIZE, DRAFT, K
from outrider.schemas.notation import Keys, Schema, document, list_of, of, one_of, options, pair_of, record
from outrider.schemas.run_options import ALLOW_PICKLE

_LAW = one_of("acceptance rule", "ratio", "greedy", "match")
_SETTING = of("string or null", "the engine's own setting that chooses it; `null` where it has one rule only")
_K_BY_ROWS = list_of(
    pair_of("integer", "integer", ""),
    "with `--measure`: pairs of [texts at once, best K]; K = 0 where plain decoding is as fast",
)
_TRAINING: Keys = {
    "target": of("string", "name, folder or hub id"),
    "kind": of("string", "model, or kind of head"),
    "init": of("string or null", "model that the draft begins as"),
    "layers": of("integer or null", "number of layers"),
    "hidden_size": of("integer or null", "width"),
    "intermediate_size": of("integer or null", "of the feed-forward part"),
    "draft_vocab": of("integer or null", "tokens that a head drafts"),
    "data": of("string or null", "file of texts"),
    "written": of("integer", "texts that the target writes"),
    "written_fraction": of("number", "their share of a batch"),
    "length": of("integer", "tokens of a sequence"),
    "steps": of("integer or null", "limit"),
    "minutes": of("number or null", "limit"),
    "loss": of("string", "name of the loss"),
    "depth": of("integer or null", "tokens of a round that a head is trained on"),
    "batch_size": BATCH_SIZE,
    "learning_rate": of("number", "at its peak"),
    "patience": of("integer", "checks without gain before the end"),
    "seed": of("integer", "seed"),
    "device": of("string", "the target's"),
    "threads": of("integer or null", "CPU threads"),
    **ALLOW_PICKLE,
}

TRAIN_AND_EXPORT: dict[str, Schema] = {
    "distill": document(
        "distill",
        "A training, also in `distill.json` in the draft's folder.",
        options((), _TRAINING),
        {
            "checks": of("list of check", "of each evaluation"),
            "best": of("check", "whose weights were kept"),
            "num_params": of("integer", "parameters of the draft"),
            "num_held_out": of("integer", "held-out texts"),
        },
    ),
    "export": document(
        "export",
        "How a pair was handed to another engine ([export](../guides/export.md)).",
        options(
            ("machine_options", "sampling_options"),
            {
                "to": of("string", "engine"),
                "target": of("string", "name, folder or hub id"),
                "draft": DRAFT,
                "output": of("string", "folder"),
                "log": of("string or null", "recording that the acceptance is of"),
                "num_draft_tokens": K,
                "context": of("integer or null", "tokens of a sequence"),
                "measure": of("boolean", "whether costs were measured"),
                "draft_cost": of("number or null", "of a draft step over one of the target, as given"),
            },
        ),
        {
            "engine": record(
                "the engine", {"name": of("string", "its name"), "version": of("string", "whose sources were read")}
            ),
            "law": _LAW,
            "setting": _SETTING,
            "k": of("integer", "K that was written"),
            "k_by_rows": _K_BY_ROWS,
            "outlooks": list_of(
                record(
                    "",
                    {
                        "setting": _SETTING,
                        "law": _LAW,
                        "best_k": of("integer or null", "`null` where the cost of a draft step is not known"),
                        "k_by_rows": _K_BY_ROWS,
                        "tau": list_of(
                            record(
                                "",
                                {
                                    "k": of("integer", "K"),
                                    "tau": of("interval or null", "tokens per round, over the texts"),
                                },
                            ),
                            "of each K",
                        ),
                        "speed_up": list_of(
                            record("", {"k": of("integer", "K"), "speed_up": of("number or null", "predicted")}),
                            "of each K",
                        ),
                    },
                ),
                "of each rule that the engine has; empty where no texts were evaluated",
            ),
            "files": of("list of string", "names of the files in `--output`"),
        },
    ),
}
