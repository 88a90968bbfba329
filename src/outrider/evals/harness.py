"""Model of EleutherAI's lm-evaluation-harness.

``OutriderLM`` implements the harness's model interface. Likelihoods of given text (``loglikelihood``,
``loglikelihood_rolling``) come from teacher forcing of the target, without a draft; ``generate_until`` uses the decoder
with its draft. Tokenization, special tokens and truncation follow the harness's own ``hf`` model, so that scores can be
compared.

The harness's own command line, with this model:

    python -m outrider.evals.harness --model outrider --model_args target=T,draft=D --tasks NAME

The harness (lm-eval) is an extra (``eval``); only this module imports it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import OptionError, OutriderError, PromptError
from outrider.measure.teacher_forcing import Text, force
from outrider.options import DEFAULT_ACCEPTANCE, DEFAULT_NUM_DRAFT_TOKENS, NumDraftTokens, Sampling
from outrider.requests.row_options import fields_of
from outrider.text.chat import Chat, ChatOptions, chat_text

_LOG = logging.getLogger(__name__)
# Options with the same name in tasks and in Sampling.
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens"),
)


def task_sampling(gen_kwargs: Mapping[str, Any]) -> Sampling:
    """Sampling options of a task.

    Args:
        gen_kwargs: the task's ``generation_kwargs``. The harness's defaults apply: greedy without ``do_sample`` or a
            temperature, 256 tokens without a length.

    Raises:
        OptionError: the task uses an unsupported option (such as beams), or a value is out of range.
    """
    given = {name: value for name, value in normalize_gen_kwargs(dict(gen_kwargs)).items() if value is not None}
    options: dict[str, Any] = {
        "stop": tuple(string for string in given.pop("until") if string),
        "max_new_tokens": given.pop("max_gen_toks"),
    }
    is_sampled = given.pop("do_sample")
    options |= {name: given.pop(name) for name in _SAMPLING if name in given}
    if given.get("num_beams") == 1:  # some tasks set it explicitly; it changes nothing
        del given["num_beams"]
    for name, value in given.items():
        raise OptionError(f"generation_kwargs: {name}", value, "Outrider has no such option: remove it from the task")
    if "temperature" not in options:
        if is_sampled:
            raise OptionError("generation_kwargs: do_sample", True, "the task must set a temperature")
        options["temperature"] = 0.0
    return Sampling(**options)


class OutriderLM(TemplateLM):
    """Harness model backed by a decoder.

    Args:
        target, draft, ...: see ``outrider.load``. In place of a name, ``target`` may be a decoder with its draft.
        batch_size: requests per batch.
        max_batch_size: the harness's own, for batch sizes that it chooses; must be None.
        seed: base seed; request i to generate gets seed + i.

    Raises:
        OptionError: the batch size is not valid.
        PromptError: there is no tokenizer.
        UsageError: see ``outrider.load``.
    """

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> OutriderLM:
        """Model of the harness's command line: ``model_args`` come before the command's own options."""
        own = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if own.get("device") == "cuda:0" and not torch.cuda.is_available():  # the command's default
            del own["device"]
        return cls(**(own | arg_dict))

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> OutriderLM:
        """See ``create_from_arg_obj``."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def __init__(
        self,
        target: str | Decoder = "fable",
        draft: str | None = None,
        *,
        num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS,
        acceptance: str = DEFAULT_ACCEPTANCE,
        device: str = "auto",
        dtype: str = "auto",
        execution: str = "auto",
        models_file: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: None = None,
        seed: int = 0,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:  # the harness gives text
            raise OptionError("batch_size", batch_size, "a whole number >= 1")
        self.decoder = (
            target
            if isinstance(target, Decoder)
            else load(
                target,
                draft,
                device=device,
                dtype=dtype,
                acceptance=acceptance,
                num_draft_tokens=num_draft_tokens,
                execution=execution,
                models_file=None if models_file is None else Path(models_file),
                allow_pickle=allow_pickle,
            )
        )
        if self.decoder.tokenizer is None:
            raise PromptError("tasks are text: load the model with a tokenizer")
        self.tokenizer = self.decoder.tokenizer
        self.batch_size = int(batch_size)
        self._seed = seed

    @property
    def eot_token_id(self) -> Any:
        """End token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> Any:
        """Token that precedes a sequence without a context. Raises PromptError: the tokenizer has neither a BOS nor an
        EOS token."""
        bos = self.tokenizer.bos_token_id
        prefix = self.eot_token_id if bos is None else bos
        if prefix is None:
            raise PromptError("the tokenizer has neither BOS nor EOS: text without a context cannot be scored")
        return prefix

    @property
    def tokenizer_name(self) -> str:
        """Key of the harness's request caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a chat as text. Raises PromptError: there is no chat template, or it does not accept the messages."""
        options = ChatOptions(continue_final_message=not add_generation_prompt)
        return chat_text(self.tokenizer, Chat(chat_history, options))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize. ``add_special_tokens=None`` adds the tokenizer's special tokens, but no second BOS."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return [int(i) for i in self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        most = self.decoder.target.context_len
        texts = []
        for _strings, context, continuation in requests:
            if not 1 <= len(continuation) <= most:
                raise PromptError(
                    f"a continuation of {len(continuation)} tokens cannot be scored: "
                    f"{self.decoder.target.name} accepts 1 to {most}"
                )
            ids = (context + continuation)[-(most + 1) :]
            texts.append(Text(ids, len(ids) - len(continuation)))
        return self._score(texts)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Score whole texts, in windows of the context; every token is scored once."""
        texts: list[Text] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.decoder.target.context_len, context_len=1
            )
            for context, scored in map(make_disjoint_window, windows):
                texts.append(Text(context + scored, len(context)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (logprob, _is_greedy) in zip(owners, self._score(texts), strict=True):
            sums[owner] += logprob
        return sums

    def _score(self, texts: Sequence[Text]) -> list[tuple[float, bool]]:
        """Log-probability of each sequence's scored tokens, and whether all of them are argmaxes."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i].ids))  # longest first
        scores = [(0.0, True)] * len(texts)
        with tqdm(total=len(texts), desc="texts scored") as bar:
            for begin in range(0, len(order), self.batch_size):
                batch = order[begin : begin + self.batch_size]
                for chunk in force(self.decoder.target, [texts[i] for i in batch]):
                    is_best = chunk.logits.argmax(dim=-1) == chunk.ids
                    rows = zip(chunk.rows.tolist(), chunk.logprobs().tolist(), is_best.tolist(), strict=True)
                    for row, logprob, is_greedy in rows:
                        total, was_greedy = scores[batch[row]]
                        scores[batch[row]] = total + logprob, was_greedy and is_greedy
                bar.update(len(batch))
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Generate for each prompt, up to a stop string of its task."""
        rows = [self._row(*request.args, seed=self._seed + i) for i, request in enumerate(requests)]
        most = self.decoder.target.context_len
        if num_cut := sum(len(ids) + sampling.max_new_tokens > most for ids, sampling in rows):
            _LOG.warning(
                "%d of %d prompts were truncated at the beginning: with the tokens to generate they exceed the context "
                "of %s, %d tokens",
                *(num_cut, len(rows), self.decoder.target.name, most),
            )
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))  # longest first
        prompts = []
        for i in order:
            ids, sampling = rows[i]
            prompts.append((ids[sampling.max_new_tokens - most :], fields_of(sampling)))
        texts = [""] * len(rows)
        with tqdm(total=len(rows), desc="texts generated") as bar:
            for number, completion in self.decoder.complete(prompts, num_slots=self.batch_size):
                if isinstance(completion, OutriderError):
                    raise completion
                i = order[number]
                # Detokenize without the prompt, like the harness's own models.
                text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                texts[i] = postprocess_generated_text(text, list(rows[i][1].stop), None)
                bar.update(1)
        return texts

    def _row(self, prompt: str, gen_kwargs: Mapping[str, Any], *, seed: int) -> tuple[list[int], Sampling]:
        """Prompt and sampling options of a request."""
        sampling = task_sampling(gen_kwargs)
        target = self.decoder.target
        if sampling.max_new_tokens >= target.context_len:
            raise OptionError(
                "max_gen_toks", sampling.max_new_tokens, f"{target.name} takes {target.context_len} tokens in all"
            )
        # Special tokens are not detokenized, so a stop string that is one becomes an end token.
        special = dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))
        ends = sorted({special[string] for string in sampling.stop if string in special})
        return self.tok_encode(prompt) or [self.prefix_token_id], replace(sampling, seed=seed, stop_token_ids=ends)


def main() -> None:
    """The harness's own command line, with this model added."""
    import lm_eval.models  # noqa: F401  the harness registers its own models only while its registry is empty
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    register_model("outrider")(OutriderLM)
    try:
        cli_evaluate()
    except OutriderError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
