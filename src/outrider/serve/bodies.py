"""Bodies of requests of OpenAI's endpoints, and of ours beside them, each a class.

A field that may change the output is honoured or refused by name. Unknown fields are refused, too, as OpenAI does;
fields known to be harmless are listed. ``null`` requests nothing. Source: OpenAI's API reference (completions, chat
completions, ``messages``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import from_json

from outrider.errors import PromptError
from outrider.serve.body import Body
from outrider.serve.generation_body import Format, GenerationBody, Integer, NumLogprobs, ParsedRequest, Stops
from outrider.serve.http_errors import Refusal
from outrider.serve.tools import Functions, ToolChoice, ToolUse, descriptions_of
from outrider.text.chat import Chat, ChatOptions, read_message
from outrider.text.tokenizer import Prompt

_NOT_READ = ("audio", "function_call")  # of messages: no template reads these
_MOST_DETOKENIZED = 2**17  # ids, in 0.05 s, in which streams stop


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages with contents of text, or in parts if there are images among them. The arguments of calls become
    objects: templates write them as JSON. Raises Refusal."""
    if not isinstance(messages, list) or not messages:
        raise Refusal("messages must be a list with at least one message", param="messages")
    read = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal(f"{where} must be an object with a role", param=where)
        if (name := next((one for one in _NOT_READ if message.get(one) is not None), None)) is not None:
            raise Refusal(f"{where}.{name} is not supported: leave it out", param=where)
        if (calls := message.get("tool_calls")) is not None:
            message = {**message, "tool_calls": _read_calls(calls, f"{where}.tool_calls")}
        content = message.get("content")
        try:
            has_image = isinstance(content, list) and any(map(_is_image, content))
            read.append({**message} if has_image else read_message(index, message))
        except PromptError:
            forms = "a string, or a list of text parts and image_url parts"
            raise Refusal(f"{where}.content must be {forms}", param=where) from None
    return read


def _is_image(part: Any) -> bool:
    image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    return isinstance(image, dict) and isinstance(image.get("url"), str)


def _read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    found = calls if isinstance(calls, list) else [None]
    functions: list[Any] = [call.get("function") if isinstance(call, dict) else None for call in found]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
        raise Refusal(f"{where} must be a list of objects with a function, which has a name", param=where)
    return [
        {**call, "function": {**function, "arguments": read_arguments(function.get("arguments"))}}
        for call, function in zip(calls, functions, strict=True)
    ]


def read_arguments(value: Any) -> Any:
    """Arguments of a call as an object; unchanged if the model has written none."""
    try:
        read = from_json(value or "{}") if isinstance(value, str | None) else value
    except ValueError:
        return value
    return read if isinstance(read, Mapping) else value


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


def _prompts(value: Any) -> list[Prompt]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if {*map(type, value)} == {int}:
            return [value]
        if all(isinstance(one, str) or (isinstance(one, list) and {*map(type, one)} == {int}) for one in value):
            return value
    raise ValueError("give a string, a list of strings, a list of token ids, or a list of these")


class CompletionBody(OpenAIBody):
    """Body of ``/v1/completions``."""

    NOT_SERVED: ClassVar[frozenset[str]] = OpenAIBody.NOT_SERVED | _OF_CHATS

    prompt: Annotated[list[Any], BeforeValidator(_prompts)]
    max_tokens: Annotated[Integer, Field(ge=0)] = 16  # OpenAI's default
    logprobs: NumLogprobs | None = None
    separate_reasoning: bool = False

    def ask(self) -> ParsedRequest:
        if self.max_tokens == 0 and not self.echo:
            name = self.name_of("max_new_tokens")
            raise Refusal(f"{name} = 0 is invalid: only with echo nothing is generated", param=name)
        form = "response_format", self.response_format
        return self._ask(self.prompt, self.max_tokens, self.stop, form, logprobs=self.logprobs)


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
    top_logprobs: NumLogprobs | None = None
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
            self.max_tokens,
            self.stop,
            ("response_format", self.response_format),
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

    tokens: Annotated[list[int], Field(max_length=_MOST_DETOKENIZED, fail_fast=True)]
