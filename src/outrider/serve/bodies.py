"""Bodies of requests, each a class: a field's name, type and range stand here alone. (``Sampling`` and ``ChatOptions``
check fields of their own, which have the type Any here.)

A field that may change the output is honoured or refused by name. Unknown fields are refused, too, as OpenAI does;
fields known to be harmless are listed. ``null`` requests nothing.

Sources: OpenAI's API reference (completions, chat completions); vLLM's "extra parameters" of both and its "structured
outputs" (and the older ``guided_*``, which many clients still send); the native fields of SGLang, llama.cpp's server,
and Transformers' generation options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from outrider.errors import OptionError, UsageError
from outrider.options import CONSTRAINTS
from outrider.serve.chats import read_messages
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.tools import Functions, Part, ToolChoice, ToolUse, descriptions_of
from outrider.text.chat import Chat, ChatOptions
from outrider.text.chat_images import has_images
from outrider.text.tokenizer import Prompt

MOST_CHOICES = 16  # n
_MOST_LOGPROBS = 20
# What pydantic's messages have beside the remedy.
_PREFIX = re.compile("^(Value error, |Input should be |Input (?=tag))| or instance of .*| found using [^ ]+")


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A generation request, checked as far as possible without the models.

    Attributes:
        prompts: strings, lists of token ids, or a chat.
        max_tokens: None for the rest of the context; 0 for none, with ``echo``.
        options: other fields of ``Sampling``.
        structured_by: the field that constrains the output; ``options`` has the constraint in the library's form.
        tools: those that may be called.
        fetched: images of the prompts, by their addresses; the server fills it before it prepares the request.
    """

    body: GenerationBody
    prompts: Sequence[Prompt]
    max_tokens: int | None
    options: Mapping[str, Any]
    structured_by: str | None = None
    tools: ToolUse | None = None
    fetched: dict[str, bytes] = field(default_factory=dict)

    @property
    def num_logprobs(self) -> int | None:
        value: int | None = self.options.get("logprobs")
        return value

    @property
    def num_draft_tokens(self) -> int | None:
        """K; None for the server's default."""
        return self.body.num_draft_tokens if self.body.draft else 0

    @property
    def scores(self) -> dict[str, int]:
        """The fields for which the prompts are scored, with the number of alternatives."""
        echoed = self.num_logprobs if self.body.echo else None
        found = {"prompt_logprobs": self.body.prompt_logprobs, "logprobs": echoed}
        return {name: num_top for name, num_top in found.items() if num_top is not None}

    def refusal_of(self, error: Exception) -> Refusal:
        """Refusal for a library error, with the option under the name that was sent."""
        if isinstance(error, OptionError) and error.name in CONSTRAINTS and self.structured_by is not None:
            if self.structured_by == "tools":
                return Refusal(f"the schemas of the tools are not accepted: {error.remedy}", param="tools")
            error = OptionError(self.structured_by, error.value, error.remedy)
        return self.body.refusal_of(error)


# Types of fields


def _whole(value: Any) -> Any:
    """Some clients write 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_schema(value: Any) -> Any:
    """A schema may come as text."""
    return from_json(value) if isinstance(value, str) else value


def _prompts(value: Any) -> list[Prompt]:
    """One or many prompts, as strings or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(item, str) or (isinstance(item, list) and item and _are_ids(item)) for item in value):
            return value
    raise ValueError("give a string, a list of strings, a list of token ids, or a list of these")


def _are_ids(value: Sequence[Any]) -> bool:
    return all(type(item) is int for item in value)


def _biases(value: Any) -> Any:
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except (AttributeError, ValueError):
        raise ValueError("map token ids to numbers") from None


def _many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _seed(value: int) -> int:
    """Clients send negative numbers too."""
    return value & (2**63 - 1)


Integer = Annotated[int, BeforeValidator(_whole)]
Seed = Annotated[Integer, AfterValidator(_seed)]
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=1000)]],
    Field(max_length=16, fail_fast=True),
    BeforeValidator(_many),
]
_Schema = Annotated[dict[str, Any], BeforeValidator(_read_schema)]
_Text = Annotated[str, Field(min_length=1)]
_Choices = Annotated[list[_Text], Field(min_length=1, max_length=5000, fail_fast=True)]
_NumLogprobs = Annotated[Integer, Field(ge=0, le=_MOST_LOGPROBS)]


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


class _StructuredOutputs(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    json_: _Schema | None = Field(None, alias="json")
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    json_object: bool | None = None


class _StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


# Bodies


class Body(BaseModel):
    """Body of a request.

    Attributes:
        PROMPT: the field with the prompt.
        NAMES: this body's fields for options of the library with other names.
        ALSO_CALLED: other names of fields.
        NOT_SERVED: known but unsupported fields.
        IDLE: their values that request nothing.
        WITHOUT_EFFECT: known fields without effect on the output.
        sent: the fields as they were sent.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    PROMPT: ClassVar[str] = "prompt"
    NAMES: ClassVar[Mapping[str, str]] = {}
    ALSO_CALLED: ClassVar[Mapping[str, Sequence[str]]] = {}
    NOT_SERVED: ClassVar[frozenset[str]] = frozenset()
    IDLE: ClassVar[Mapping[str, Sequence[Any]]] = {}
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset()

    model: str | None = None
    _sent: Mapping[str, Any] = PrivateAttr()
    _aliases: Mapping[str, str] = PrivateAttr()

    @classmethod
    def read(cls, sent: Mapping[str, Any]) -> Self:
        """Raises Refusal."""
        given = {name: value for name, value in sent.items() if value is not None and name not in cls.WITHOUT_EFFECT}
        for name in [name for name in given if name in cls.NOT_SERVED]:
            if (value := given.pop(name)) not in cls.IDLE.get(name, ()):
                raise Refusal(f"{name} = {value!r:.60} is not supported: leave it out", param=name)
        aliases = {}
        for name, others in cls.ALSO_CALLED.items():
            found = [one for one in (name, *others) if one in given]
            for other in found[1:]:
                if given[other] != given[found[0]]:
                    raise Refusal(f"{found[0]} and {other} are aliases of one field: give one", param=other)
            for one in found:
                given[name], aliases[name] = given.pop(one), found[0]
        try:
            body = cls.model_validate(given)
        except ValidationError as error:
            raise _refusal_of(error, given, aliases) from None
        body._sent, body._aliases = sent, aliases
        return body

    @property
    def sent(self) -> Mapping[str, Any]:
        return self._sent

    def name_of(self, option: str) -> str:
        """The field that sets an option of the library, under the name that was sent."""
        name = self.NAMES.get(option, option)
        return self._aliases.get(name, name)

    def refusal_of(self, error: Exception) -> Refusal:
        """Refusal for a library error, with the option under the name that was sent."""
        if isinstance(error, OptionError):
            name = self.name_of(error.name)
            return Refusal(str(OptionError(name, error.value, error.remedy)), param=name)
        refusal = refusal_of(error)
        if isinstance(error, UsageError) and refusal.param is not None:
            refusal.param = self.PROMPT
        return refusal


def parse_json(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises Refusal."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal("the body is not a JSON object")
    return value


def _refusal_of(error: ValidationError, sent: Mapping[str, Any], aliases: Mapping[str, str]) -> Refusal:
    """A refusal that names the field, its value and what it should be."""
    found = [(_place(one, sent, aliases), one) for one in error.errors(include_url=False)]
    # A union has an error for each of its types: those of the type that fits best lie deepest.
    place, first = max(
        found, key=lambda pair: (pair[0].count(".") + pair[0].count("["), pair[1]["type"] == "literal_error")
    )
    if first["type"] == "extra_forbidden":
        return Refusal(f"unknown field {place!r:.60}: leave it out", param=place)
    if first["type"] == "missing":
        return Refusal(f"{place} is required", param=place)
    texts = [_PREFIX.sub("", one["msg"]) for at, one in found if at == place]
    remedy = ", or ".join(dict.fromkeys(texts))
    return Refusal(f"{place} = {first['input']!r:.60} is invalid: {remedy}", param=place)


def _place(error: ErrorDetails, sent: Mapping[str, Any], aliases: Mapping[str, str]) -> str:
    """The field of an error, like ``messages[0].role``. Pydantic has the names of a union's types in between."""
    (first, *others), is_missing = error["loc"], error["type"] == "missing"
    place, value = aliases.get(str(first), str(first)), sent.get(str(first))
    for number, part in enumerate(others, 1):
        if isinstance(value, dict) and part not in value and isinstance(value.get("function"), dict):  # see ``Tool``
            place, value = f"{place}.function", value["function"]
        if isinstance(part, int) and isinstance(value, list):
            place, value = f"{place}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or (is_missing and number == len(others))):
            place, value = f"{place}.{part}", value.get(part)
    return place


class TemplateBody(Body):
    """Options for the chat template, which ``ChatOptions`` checks."""

    documents: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    reasoning_effort: str | None = None

    def options(self, tools: ToolUse | None) -> ChatOptions:
        """Raises Refusal, OptionError."""
        names = ("documents", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if (effort := self.reasoning_effort) is not None:
            kwargs = given.get("chat_template_kwargs", {})
            if not isinstance(kwargs, Mapping) or kwargs.get("reasoning_effort", effort) != effort:
                raise Refusal("give reasoning_effort, or chat_template_kwargs with it", param="reasoning_effort")
            given["chat_template_kwargs"] = {**kwargs, "reasoning_effort": effort}
        return ChatOptions(tools=descriptions_of(tools), **given)


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
    stop_token_ids: Any = None
    bad_words: Annotated[list[Any], Field(max_length=1000)] | None = None
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
    prompt_logprobs: _NumLogprobs | None = None
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
        body = cls.read(sent)
        try:
            return body.ask()
        except (UsageError, RecursionError) as error:
            raise body.refusal_of(error) from None

    def chat_prompt(self, messages: list[dict[str, Any]], options: ChatOptions, *others: str) -> Prompt:
        """A chat; or with images its messages, which have no options. Raises Refusal, PromptError, OptionError.

        Args:
            others: further fields that cannot be given beside images.
        """
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
        *,
        max_tokens: int | None,
        stop: Sequence[str],
        form: tuple[str, Format | None],
        logprobs: int | None = None,
        tools: ToolUse | None = None,
        thinking_budget: int | None = None,
    ) -> ParsedRequest:
        """
        Args:
            form: of the output, with its field.
            thinking_budget: in place of ``thinking_token_budget``.

        Raises:
            Refusal
        """
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
        if self.top_k is not None:
            options["top_k"] = max(self.top_k, 0)
        budget = self.thinking_token_budget if thinking_budget is None else thinking_budget
        options["thinking_budget"] = None if budget == -1 else budget
        return ParsedRequest(self, prompts, max_tokens, options, structured_by, tools)

    def _structure(self, name: str, form: Format | None) -> tuple[dict[str, Any], str | None]:
        """Constraint in the form of ``Sampling``, and the field that sets it. Raises Refusal."""
        # field -> kind and value
        found: dict[str, tuple[str, Any]] = {name: ("json", None if form is None else form.constraint())}
        if (parts := self.structured_outputs) is not None:
            of_parts = {"json": parts.json_, "regex": parts.regex, "choice": parts.choice, "grammar": parts.grammar}
            found |= {f"structured_outputs.{kind}": (kind, value) for kind, value in of_parts.items()}
            found["structured_outputs.json_object"] = "json", {"type": "object"} if parts.json_object else None
        kinds = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
        kinds |= {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar"}
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


_OF_CHATS = frozenset(
    "top_logprobs tools tool_choice parallel_tool_calls include_reasoning separate_reasoning reasoning_effort "
    "chat_template_kwargs add_generation_prompt continue_final_message documents".split()
)


class OpenAIBody(GenerationBody):
    """Fields of completions and chat completions."""

    NAMES: ClassVar[Mapping[str, str]] = {"max_new_tokens": "max_tokens", "thinking_budget": "thinking_token_budget"}
    NOT_SERVED: ClassVar[frozenset[str]] = frozenset(
        (
            # OpenAI
            "suffix functions function_call modalities audio web_search_options verbosity "
            # vLLM
            "use_beam_search length_penalty structural_tag guided_whitespace_pattern prompt_embeds logits_processors "
            "spaces_between_special_tokens chat_template lora_request return_token_ids "
            "enable_thinking allowed_token_ids truncate_prompt_tokens "
            # SGLang
            "lora_path stop_regex no_stop_trim return_hidden_states custom_logit_processor "
            # llama.cpp
            "repeat_last_n typical_p tfs_z top_a top_n_sigma xtc_probability dynatemp_range dry_multiplier mirostat "
            "min_keep n_probs n_indent samplers lora "
            # Transformers
            "do_sample num_beams num_beam_groups penalty_alpha guidance_scale no_repeat_ngram_size "
            "encoder_repetition_penalty epsilon_cutoff eta_cutoff suppress_tokens begin_suppress_tokens bad_words_ids"
        ).split()
    )
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        (
            # OpenAI
            "user store metadata service_tier prediction safety_identifier prompt_cache_key prompt_cache_retention "
            "prompt_cache_options moderation "
            # vLLM, SGLang
            "request_id cache_salt stream_reasoning rid guided_decoding_backend "
            # llama.cpp; the last ones belong to samplers of the list above
            "cache_prompt id_slot n_keep n_discard timings_per_token return_progress use_cache xtc_threshold "
            "dynatemp_exponent mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n "
            "dry_sequence_breakers"
        ).split()
    )

    stop: Stops = []
    response_format: Format | None = None
    best_of: Integer | None = None

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 1, info.data.get("n")):
            raise ValueError("choices are not ranked: leave it out, or give n")
        return value


class CompletionBody(OpenAIBody):
    """Body of ``/v1/completions``."""

    NOT_SERVED: ClassVar[frozenset[str]] = OpenAIBody.NOT_SERVED | _OF_CHATS

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    max_tokens: Annotated[Integer, Field(ge=0)] = 16  # OpenAI's default
    logprobs: _NumLogprobs | None = None
    separate_reasoning: bool = False

    def ask(self) -> ParsedRequest:
        if self.max_tokens == 0 and not self.echo:
            name = self.name_of("max_new_tokens")
            raise Refusal(f"{name} = 0 is invalid: only with echo nothing is generated", param=name)
        form = "response_format", self.response_format
        return self._ask(self.prompt, max_tokens=self.max_tokens, stop=self.stop, form=form, logprobs=self.logprobs)


class RaceBody(CompletionBody):
    """Body of ``/v1/race``."""

    NOT_SERVED: ClassVar[frozenset[str]] = CompletionBody.NOT_SERVED | frozenset(
        "n echo add_special_tokens skip_special_tokens include_stop_str_in_output prompt_logprobs logprobs stream "
        "priority return_tokens_as_token_ids".split()
    )
    IDLE: ClassVar[Mapping[str, Sequence[Any]]] = {**CompletionBody.IDLE, "stream": (True,), "priority": (0,)}

    drafter: str | None = None


class ChatBody(OpenAIBody, TemplateBody):
    """Body of ``/v1/chat/completions``."""

    PROMPT: ClassVar[str] = "messages"
    NOT_SERVED: ClassVar[frozenset[str]] = OpenAIBody.NOT_SERVED | {"echo"}

    messages: list[Any]
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: _NumLogprobs | None = None
    tools: Functions = []
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    def ask(self) -> ParsedRequest:
        if self.top_logprobs and not self.logprobs:
            raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
        tools = ToolUse.of(self.tools, self.tool_choice, self.parallel_tool_calls)
        options, messages = self.options(tools), read_messages(self.messages)
        return self._ask(
            [self.chat_prompt(messages, options, "reasoning_effort")],
            max_tokens=self.max_tokens,
            stop=self.stop,
            form=("response_format", self.response_format),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            tools=tools,
        )


class TokenizeBody(TemplateBody):
    """Body of ``/tokenize``."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = OpenAIBody.WITHOUT_EFFECT
    PROMPT: ClassVar[str] = "messages"

    prompt: str | None = None
    messages: list[Any] | None = None
    tools: Functions = []
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    def text(self) -> str | Chat:
        """Text or chat that is tokenized. Raises Refusal, PromptError, OptionError."""
        if self.prompt is not None:
            return self.prompt
        return Chat(read_messages(self.messages or []), self.options(ToolUse.of(self.tools, None)))

    def refusal_of(self, error: Exception) -> Refusal:
        refusal = super().refusal_of(error)
        if refusal.param == self.PROMPT and self.prompt is not None:
            refusal.param = "prompt"
        return refusal


class DetokenizeBody(Body):
    """Body of ``/detokenize``."""

    tokens: Annotated[list[int], Field(fail_fast=True)]
