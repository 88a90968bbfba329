"""Body of a request for generated text, whatever the endpoint: a field's name, type and range stand here alone.
(``Sampling`` and ``ChatOptions`` check fields of their own, which have the type Any here.)

Sources: vLLM's "extra parameters" and its "structured outputs" (and the older ``guided_*``, which many clients still
send); the native fields of SGLang, llama.cpp's server, and Transformers' generation options.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import from_json

from outrider.errors import OptionError, UsageError
from outrider.options import CONSTRAINTS
from outrider.serve.body import Body, Strict
from outrider.serve.http_errors import Refusal
from outrider.serve.tools import Part, ToolUse
from outrider.text.chat import Chat, ChatOptions
from outrider.text.chat_images import has_images
from outrider.text.tokenizer import Prompt

MOST_CHOICES = 16  # n
_MOST_LOGPROBS = 20
_MOST_OF_WORDS = 2**16
_PARTS = {"json": "json_", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_KINDS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A generation request, checked as far as possible without the models."""

    body: GenerationBody
    prompts: Sequence[Prompt]
    max_tokens: int | None  # None for the rest of the context; 0 for none, with ``echo``
    options: Mapping[str, Any]  # other fields of ``Sampling``, the constraint included
    structured_by: str | None = None  # the field of the body that constrains the output
    tools: ToolUse | None = None
    is_left: Event = field(default_factory=Event)  # set when the client has left

    def check_open(self) -> None:
        """Raises Refusal: the client has left, and nobody waits for the rest."""
        if self.is_left.is_set():
            raise Refusal("the client has left", status=499)

    @property
    def num_draft_tokens(self) -> int | None:
        """K; None for the server's default."""
        return self.body.num_draft_tokens if self.body.draft else 0

    @property
    def scores(self) -> dict[str, int]:
        """The fields for which the prompts are scored, with the number of alternatives."""
        echoed = self.options.get("logprobs") if self.body.echo else None
        found = {"prompt_logprobs": self.body.prompt_logprobs, "logprobs": echoed}
        return {name: num_top for name, num_top in found.items() if num_top is not None}

    def refusal_of(self, error: Exception) -> Refusal:
        """Refusal for a library error, with the option under the name that was sent."""
        if isinstance(error, OptionError) and error.name in CONSTRAINTS and self.structured_by is not None:
            if self.structured_by == "tools":
                return Refusal(f"the schemas of the tools are not accepted: {error.remedy}", param="tools")
            error = OptionError(self.structured_by, error.value, error.remedy)
        return self.body.refusal_of(error)


def _whole(value: Any) -> Any:
    """Some clients write 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _biases(value: Any) -> Any:
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except (AttributeError, ValueError):
        raise ValueError("map token ids to numbers") from None


def _short(words: list[Any]) -> list[Any]:
    """Words of bounded length in all: each is tokenized."""
    size = sum(len(word) for word in words if isinstance(word, str | list))
    if size > _MOST_OF_WORDS:
        raise ValueError(f"they have {size} characters and ids, the limit is {_MOST_OF_WORDS}")
    return words


def _seed(value: int) -> int | None:
    """Clients send negative numbers, too; -1 means no seed, as in vLLM and llama.cpp."""
    return None if value == -1 else value & (2**63 - 1)


Integer = Annotated[int, BeforeValidator(_whole)]
Seed = Annotated[Integer, AfterValidator(_seed)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(max_length=16, fail_fast=True),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]
_Schema = Annotated[
    dict[str, Any], BeforeValidator(lambda value: from_json(value) if isinstance(value, str) else value)
]
_Text = Annotated[str, Field(min_length=1)]
_Choices = Annotated[list[_Text], Field(min_length=1, max_length=5000, fail_fast=True)]
NumLogprobs = Annotated[Integer, Field(ge=0, le=_MOST_LOGPROBS)]


class Format(Part):
    """Form of the output; its schema may stand in ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and not isinstance(self.constraint(), dict):
            raise ValueError("json_schema needs a schema, an object")
        if self.json_schema is not None and (self.type != "json_schema" or self.schema_ is not None):
            raise ValueError("json_schema is for the type json_schema, without schema")
        if self.schema_ is not None and self.type == "text":
            raise ValueError("schema is for the types json_schema and json_object")
        return self

    def constraint(self) -> Any:
        if self.type == "text":
            return None
        if self.type == "json_object" and self.schema_ is None:
            return {"type": "object"}
        return self.schema_ if self.json_schema is None else self.json_schema.get("schema")


class _StructuredOutputs(Strict):
    json_: _Schema | None = Field(None, alias="json")
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    json_object: bool | None = None


class _StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """Fields of the endpoints that generate; ``NOT_SERVED`` of some has those that are for others."""

    ALSO_CALLED: ClassVar[Mapping[str, Sequence[str]]] = {
        "max_tokens": ("max_completion_tokens", "max_new_tokens", "n_predict"),
        "min_tokens": ("min_new_tokens",),
        "repetition_penalty": ("repeat_penalty",),
        "thinking_token_budget": ("thinking_budget_tokens", "reasoning_budget_tokens", "thinking_budget"),
    }
    IDLE: ClassVar[Mapping[str, Sequence[Any]]] = {
        "truncation": ("disabled",),
        "include": ([], ["reasoning.encrypted_content"]),  # thoughts are not encrypted
        "stream_options": ({}, {"include_obfuscation": False}),
        "tool_choice": ("none", "auto"),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "repeat_last_n": (-1,),  # the penalty sees the whole sequence
        "top_n_sigma": (-1,),
        **dict.fromkeys("length_penalty typical_p tfs_z num_beams num_beam_groups n".split(), (1,)),
        **dict.fromkeys("guidance_scale encoder_repetition_penalty".split(), (1,)),
        **dict.fromkeys(
            "spaces_between_special_tokens add_generation_prompt do_sample skip_special_tokens".split(), (True,)
        ),
        **dict.fromkeys("parallel_tool_calls include_reasoning separate_reasoning".split(), (True, False)),
        **dict.fromkeys(
            (
                "suffix echo top_logprobs tools functions use_beam_search logits_processors chat_template_kwargs "
                "continue_final_message documents return_token_ids stop_regex no_stop_trim return_hidden_states top_a "
                "xtc_probability dynatemp_range dry_multiplier mirostat min_keep n_probs n_indent lora penalty_alpha "
                "no_repeat_ngram_size epsilon_cutoff eta_cutoff suppress_tokens begin_suppress_tokens bad_words_ids "
                "background store include_stop_str_in_output return_tokens_as_token_ids"
            ).split(),
            (False, "", [], {}),  # 0, too
        ),
    }

    temperature: Any = None
    top_p: Any = None
    top_k: Annotated[Integer, Field(ge=-1)] | None = None
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    stop_token_ids: Annotated[list[Any], Field(max_length=1000)] | None = None
    bad_words: Annotated[list[Any], Field(max_length=1000), AfterValidator(_short)] | None = None
    logit_bias: Annotated[Any, BeforeValidator(_biases)] = None
    seed: Seed | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[Integer, Field(ge=0)] = 0
    thinking_token_budget: Annotated[Integer, Field(ge=-1)] | None = None
    n: Annotated[Integer, Field(ge=1, le=MOST_CHOICES)] = 1
    echo: bool = False
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    draft: bool = True
    num_draft_tokens: Annotated[Integer, Field(ge=0)] | None = None
    acceptance: str | None = None
    priority: Integer = 0
    prompt_logprobs: NumLogprobs | None = None
    return_tokens_as_token_ids: bool = False
    add_special_tokens: bool | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    include_reasoning: bool = True
    separate_reasoning: bool = True
    structured_outputs: _StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None
    # SGLang's names (whose EBNF is the GBNF of xgrammar), and llama.cpp's.
    json_schema: _Schema | None = None
    regex: _Text | None = None
    ebnf: _Text | None = None
    grammar: _Text | None = None

    def ask(self) -> ParsedRequest:
        """Raises Refusal, OptionError, PromptError."""
        raise NotImplementedError

    @classmethod
    def read_request(cls, sent: Mapping[str, Any]) -> ParsedRequest:
        """Raises Refusal."""
        body = cls.parse(sent)
        try:
            return body.ask()
        except (UsageError, RecursionError) as error:
            raise body.refusal_of(error) from None

    def chat_prompt(self, messages: list[dict[str, Any]], options: ChatOptions, *others: str) -> Prompt:
        """A chat; or with images its messages, beside which there are no options and no ``others``. Raises Refusal,
        PromptError, OptionError."""
        if not has_images(messages):
            return Chat(messages, options)
        # Scoring does not read images.
        fields = (*others, "add_special_tokens", "prompt_logprobs")
        given = [name for name in fields if getattr(self, name) is not None]
        own = [name for name in options.given() if name != "add_generation_prompt" or not options.has_generation_prompt]
        if given := given + own:
            name = self.name_of(given[0])
            raise Refusal(f"{name} is not supported beside images", param=name)
        return messages

    def _ask(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | None,
        stop: Sequence[str],
        form: tuple[str, Format | None],
        *,
        logprobs: int | None = None,
        tools: ToolUse | None = None,
        thinking_budget: int | None = None,
    ) -> ParsedRequest:
        """Check the fields of all endpoints. The form of the output comes with its field; ``thinking_budget`` is in
        place of ``thinking_token_budget``. Raises Refusal."""
        if max_tokens is not None and self.min_tokens > max_tokens:
            name = self.name_of("min_tokens")
            raise Refusal(f"{name} is more than {self.name_of('max_new_tokens')}, {max_tokens}", param=name)
        if tools is not None and tools.is_forced and stop:
            name = self.name_of("stop")
            raise Refusal(f"{name} may cut the call that tool_choice demands: give one of the two", param=name)
        if self.prompt_logprobs is not None and self.stream:
            raise Refusal("prompt_logprobs are not streamed: leave stream out", param="prompt_logprobs")
        structure, structured_by = self._structure(*form)
        own = "temperature top_p min_p presence_penalty frequency_penalty repetition_penalty logit_bias".split()
        own += ["stop_token_ids", "bad_words"]
        options = {name: value for name in own if (value := getattr(self, name)) is not None} | structure
        options |= {"seed": self.seed, "ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens}
        options |= {"stop": tuple(stop), "logprobs": logprobs}
        options |= {} if self.top_k is None else {"top_k": max(self.top_k, 0)}
        budget = self.thinking_token_budget if thinking_budget is None else thinking_budget
        options["thinking_budget"] = None if budget == -1 else budget
        return ParsedRequest(self, prompts, max_tokens, options, structured_by, tools)

    def _structure(self, name: str, form: Format | None) -> tuple[dict[str, Any], str | None]:
        """Constraint in the form of ``Sampling``, and the field that sets it. Raises Refusal."""
        # field -> kind and value
        found: dict[str, tuple[str, Any]] = {name: ("json", None if form is None else form.constraint())}
        if (parts := self.structured_outputs) is not None:
            found |= {f"structured_outputs.{kind}": (kind, getattr(parts, name)) for kind, name in _PARTS.items()}
            found["structured_outputs.json_object"] = "json", {"type": "object"} if parts.json_object else None
        kinds = {f"guided_{kind}": kind for kind in _PARTS} | _KINDS
        found |= {name: (kind, getattr(self, name)) for name, kind in kinds.items()}
        given = {name: pair for name, pair in found.items() if pair[1] is not None}
        # The same constraint twice is one: clients send it under older and newer names.
        if any(pair != next(iter(given.values())) for pair in given.values()):
            raise Refusal(f"{' and '.join(given)} all constrain the output: give one of them", param=list(given)[1])
        for name, (kind, value) in given.items():
            if kind == "choice":
                # One terminal is one automaton; thousands of rules would exceed the parser's limit on a row.
                return {"grammar": "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(one) for one in value)}, name
            return {"json_schema" if kind == "json" else kind: value}, name
        return {}, None
