"""Which programs are here, and how their arms are made."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.models.memory import only_type, weight_files
from outrider.models.registry import resolve
from outrider.options import DEFAULT_ACCEPTANCE
from peer_arms.base import WEIGHTS, Runs
from peer_arms.ctranslate2 import ctranslate2_arms
from peer_arms.hugging_face import hf_arms
from peer_arms.llama_cpp import can_sample_drafts, llama_cpp_arms, llama_cpp_build
from peer_arms.openvino import openvino_arms
from peer_arms.own import outrider_arms

Maker = tuple[Callable[..., AbstractContextManager[Runs]], tuple[Any, ...]]
"""Of the arms of one program, and its arguments: for a ``Worker``"""


@dataclass(slots=True)
class Programs:
    """Attributes:
    makers: Outrider's first.
    versions: by name.
    left_out: by name, with the reason.
    """

    makers: list[Maker] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default="fable", help="a known name, or a folder")
    parser.add_argument("--draft", default="fable-draft", help="a known name, or a folder")
    parser.add_argument("--weights", default="float32", choices=WEIGHTS, help="of the target")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server, built for this machine")
    parser.add_argument("--openvino-target", type=Path, help="the target as OpenVINO wants it: a folder, or GGUF")
    parser.add_argument("--openvino-draft", type=Path, help="the same for the draft")
    parser.add_argument("--openvino-isa", help="ONEDNN_MAX_CPU_ISA for OpenVINO alone, where it fails without")


def find_programs(
    arguments: argparse.Namespace,
    ks: Sequence[int],
    own_ks: Sequence[int],
    context_len: int,
    folder: Path,
    acceptance: str = DEFAULT_ACCEPTANCE,
) -> Programs:
    """Those that are installed, for the models and with the options of ``arguments``.

    Args:
        arguments: those of ``add_arguments``, and ``threads``.
        ks: numbers of drafted tokens per round; a drafting arm is made for each.
        own_ks: the same for Outrider.
        context_len: the most tokens of a text with its prompt.
        folder: for files that are made here.

    Raises:
        SystemExit: the target is to be taken in bfloat16, but is not stored in it.
    """
    is_gguf = arguments.weights == "gguf"
    target, draft = (Path(n if is_gguf else resolve(n).location) for n in (arguments.target, arguments.draft))
    if is_gguf and not (target.is_file() and draft.is_file()):
        raise SystemExit("--weights gguf takes files: --target FILE.gguf --draft FILE.gguf")
    weights, num_threads = arguments.weights, arguments.threads
    if weights == "bfloat16" and only_type(weight_files(target)) != "BF16":
        raise SystemExit(f"--weights bfloat16: {target} is not stored in bfloat16; grow.py has --dtype bfloat16")
    found = Programs(versions={name: version(name) for name in ("outrider", "transformers")})
    if is_gguf:
        found.left_out["Hugging Face, look-up and compiled"] = "seconds a token: files are widened as they are loaded"
    found.makers = [
        (outrider_arms, (target, draft, own_ks, acceptance, weights)),
        (hf_arms, (target, draft, ks, weights)),
    ]
    if find_spec("gguf") is None or arguments.llama_server is None:
        found.left_out["llama.cpp"] = "gguf is not installed, or no --llama-server was given"
    else:
        server = arguments.llama_server.resolve()
        more = server, num_threads, context_len, folder, weights
        found.makers.append((llama_cpp_arms, (target, draft, ks, *more)))
        if not can_sample_drafts(server):
            found.left_out["llama.cpp, sampled draft"] = "this build drafts the most probable token only"
        found.versions |= {"gguf": version("gguf"), "llama.cpp": llama_cpp_build(server)}
    if find_spec("openvino_genai") is None or arguments.openvino_target is None:
        found.left_out["OpenVINO GenAI"] = "it is not installed, or no --openvino-target was given"
    else:
        folders = arguments.openvino_target, arguments.openvino_draft
        found.makers.append((openvino_arms, (*folders, ks, num_threads, weights, arguments.openvino_isa)))
        found.versions |= {name: version(name) for name in ("openvino", "openvino-genai")}
    if find_spec("ctranslate2") is None:
        found.left_out["CTranslate2"] = "it is not installed"
    elif weights in ("bfloat16", "gguf"):
        found.left_out["CTranslate2"] = "it does not read GGUF" if is_gguf else "it has no bfloat16 on CPUs"
    else:
        found.makers.append((ctranslate2_arms, (target, num_threads, folder, weights)))
        found.versions["ctranslate2"] = version("ctranslate2")
    return found
