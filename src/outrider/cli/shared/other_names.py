"""Option names of other programs: aliases, or a hint where they mean something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.cli.shared.wrapping import say
from outrider.errors import OptionError
from outrider.options import instead_of, own_name

_MAX_TEMPERATURE = 2  # OpenAI's limit; beyond it output is noise
# Names in vLLM, llama.cpp and Transformers of options that take the same values and mean the same.
ALIASES = {
    "target": ("--model", "-m"),
    "draft": ("--draft-model", "--model-draft", "--assistant-model"),
    "max_new_tokens": ("--max-tokens", "--n-predict"),
    "temperature": ("--temp",),
    "num_draft_tokens": ("--num-speculative-tokens", "--num-assistant-tokens", "--draft-max"),
    "min_tokens": ("--min-new-tokens",),
    "repetition_penalty": ("--repeat-penalty",),
    "context": ("--max-model-len", "--ctx-size"),
    "slots": ("--max-num-seqs",),
}
PROMPT_OPTIONS = ("-p", "--prompt")  # of the argument of this name
_SHORT = {  # llama.cpp's
    "-md": "draft_model",
    "-f": "file",
    "-c": "ctx_size",
    "-np": "parallel",
    "-b": "batch_size",
    "-s": "random_seed",
}


def check_names(words: Sequence[str], options: Mapping[str, Sequence[str]]) -> None:
    """Suggest the option that was meant, after a failed parse.

    Args:
        options: the command's options with their spellings, the main one first: ``max_new_tokens`` ->
            ``--max-new-tokens``, ``-n``.

    Raises:
        OptionError: another program has an option of this name.
    """
    known = set().union(*options.values())
    for index, word in enumerate(words):
        shown, has_value, value = word.partition("=")
        if not shown.startswith("-") or shown in known:
            continue
        name = _SHORT.get(shown, shown.removeprefix("--").replace("-", "_"))
        given = value if has_value else " ".join(words[index + 1 : index + 2])
        meant, instead = own_name(name, options), instead_of(name)
        if meant is not None:
            raise OptionError(shown, given, f"did you mean {options[meant][0]}?")
        if instead is not None:
            raise OptionError(shown, given, f"there is no such option: {instead}")


def hint_at_threads(words: Sequence[str]) -> None:
    """``-t 8`` sets threads in llama.cpp but the temperature here: report implausible temperatures."""
    for word, value in zip(words, words[1:], strict=False):
        if word == "-t" and value.isdecimal() and int(value) > _MAX_TEMPERATURE:
            say(f"-t {value} sets the temperature; for {value} CPU threads use --threads {value}")
