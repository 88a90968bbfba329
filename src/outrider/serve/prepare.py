"""From a request's body to rows for the engine. Runs in a thread pool, since tokenizing is slow."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from outrider.decoder import Decoder, ReadPrompt
from outrider.errors import MissingExtra, OptionError, PromptError, UsageError
from outrider.options import CONSTRAINTS, Sampling
from outrider.requests.state import RequestState
from outrider.serve import messages, responses
from outrider.serve.chat_json import ChatForm
from outrider.serve.completion_json import CompletionForm, Form
from outrider.serve.fields import check_names
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.messages_json import MessageForm
from outrider.serve.protocol import ParsedRequest, parse_chat, parse_chat_prompt, parse_completions
from outrider.serve.responses import named_as_sent
from outrider.serve.responses_answer import ItemForm
from outrider.serve.responses_json import ResponseForm, asked_of
from outrider.serve.scoring import check_scores
from outrider.serve.served_model import ServedModel
from outrider.serve.streaming import PreparedRequest
from outrider.serve.token_texts import TokenTexts
from outrider.serve.tools import descriptions_of, tools_of
from outrider.text.chat import Chat
from outrider.text.chat_images import chat_inputs, has_images
from outrider.text.output_parser import CallParser, OutputParser, ThoughtSplitter
from outrider.text.prompts import is_chat, last_ids, rows_of, without_media
from outrider.text.thinking import AfterThinking, Thinking
from outrider.text.tokenizer import Prompt, encode, special_ids
from outrider.text.tool_formats import ToolFormat

# Assumed bytes per token if no token is longer: some tokenizers drop spaces or map unknown words to one token.
_LEAST_BYTES_A_TOKEN = 64
_MOST_TOKENIZED_BYTES = 2**20  # for /tokenize, which has no other limit


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed body.

    Attributes:
        prepare: does the slow rest.
    """

    ask: ParsedRequest
    prepare: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Preparer:
    """Prepares requests for one model.

    Attributes:
        tool_format: how the model writes calls; None if that is not known.
        thinking: markers of the model's thoughts; None if it has none.
        most_bytes: of a prompt that may fit; longer ones are refused before tokenizing.
        marker_ids: of the format's markers that are tokens.
    """

    model: ServedModel
    tool_format: ToolFormat | None
    thinking: Thinking | None
    most_bytes: int = field(init=False)
    marker_ids: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = self._tokenizer.get_vocab()
        longest = max(len(token.encode()) for token in vocabulary)
        object.__setattr__(self, "most_bytes", self.capacity * max(longest, _LEAST_BYTES_A_TOKEN))
        markers = self.tool_format.tokens if self.tool_format else ()
        ids = {marker: vocabulary[marker] for marker in markers if marker in vocabulary}
        object.__setattr__(self, "marker_ids", ids)

    @property
    def decoder(self) -> Decoder:
        return self.model.decoder

    @property
    def capacity(self) -> int:
        """Maximum tokens of a sequence, prompt included."""
        return self.model.capacity

    def completions(self, body: Mapping[str, Any]) -> Parsed:
        """Parse a completion request; prepares a ``PreparedRequest``. Raises Refusal."""
        ask = parse_completions(body)
        return Parsed(ask, lambda: self._prepare(ask, lambda ids: CompletionForm(self._texts(ask))))

    def chat(self, body: Mapping[str, Any]) -> Parsed:
        """Parse a chat request; prepares a ``PreparedRequest``. Raises Refusal."""
        ask = self._with_tool_constraint(parse_chat(body))
        thinking = self.thinking if ask.splits_thoughts else None
        return Parsed(ask, lambda: self._prepare(ask, partial(self._chat_form, ask, thinking), thinking))

    def responses(self, body: Mapping[str, Any]) -> Parsed:
        """Parse a request for a response; prepares a ``PreparedRequest``. Raises Refusal."""
        asked = asked_of(body, self.decoder.sampling_defaults)

        def form_of(ask: ParsedRequest, parser: OutputParser) -> ItemForm:
            return ResponseForm(asked, parser, self._new_call_id, ask.shows_thoughts)

        chat, places = responses.chat_body(body)
        return self._items(chat, places, responses.NAMES, form_of)

    def messages(self, body: Mapping[str, Any]) -> Parsed:
        """Parse a request of ``/v1/messages``; prepares a ``PreparedRequest``. Raises Refusal."""
        chat, places = messages.chat_body(body)
        return self._items(chat, places, messages.NAMES, lambda ask, parser: MessageForm(parser, self._new_call_id))

    def _items(
        self,
        body: Mapping[str, Any],
        places: Sequence[str],
        names: Mapping[str, str],
        form_of: Callable[[ParsedRequest, OutputParser], ItemForm],
    ) -> Parsed:
        """Parse a request with a form of its own as a chat.

        Args:
            body: of the chat.
            places, names: see ``named_as_sent``.
        """
        with named_as_sent(places, names):
            ask = self._with_tool_constraint(parse_chat(body))
        if ask.structured_by == "response_format":
            ask = replace(ask, structured_by=names["response_format"])

        def prepare() -> PreparedRequest:
            with named_as_sent(places, names):
                return self._prepare(
                    ask, lambda ids: form_of(ask, self._new_parser(ask, self.thinking, ids)()), self.thinking
                )

        return Parsed(ask, prepare)

    def token_ids(self, prompt: Prompt, most: int | None = None, has_special: bool | None = None) -> list[int]:
        """Token ids of a prompt that fits; with images it is the processor's output.

        Args:
            most: see ``last_ids``; None: all.
            has_special: see ``encode``.

        Raises:
            Refusal
        """
        has_messages = isinstance(prompt, Mapping) or is_chat(prompt)
        try:
            if not isinstance(prompt, Mapping) and (has_messages or isinstance(prompt, str)):
                self._check_room(_num_bytes(prompt), self.most_bytes, "bytes")
            if not isinstance(prompt, Mapping):
                ids = encode(self._tokenizer, prompt, has_special=has_special)
                ids = self.decoder.encode(ids if most is None else last_ids(self._tokenizer, ids, most))
            elif most is None:
                ids = rows_of(without_media(prompt))[0]
            else:
                raise PromptError("a prompt with images cannot be truncated: leave truncate_prompt_tokens out")
            self._check_room(len(ids), self.capacity - 1, "tokens")
        except PromptError as error:
            raise Refusal(str(error), param="messages" if has_messages else "prompt") from None
        except OptionError as error:  # of a chat
            raise refusal_of(error) from None
        return ids

    def tokenize(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenize a prompt or messages of any length. Raises Refusal."""
        check_names(value, "tokenize")
        prompt = value.get("prompt")
        has_special = value.get("add_special_tokens")
        if not isinstance(has_special, bool | None):
            raise Refusal("add_special_tokens must be true or false", param="add_special_tokens")
        if prompt is None:
            prompt = parse_chat_prompt({**value, "tools": descriptions_of(tools_of(value)) or None})
        elif not isinstance(prompt, str):
            raise Refusal("prompt must be a string", param="prompt")
        if (num_bytes := _num_bytes(prompt)) > _MOST_TOKENIZED_BYTES:
            message = f"{num_bytes} bytes are too many: at most {_MOST_TOKENIZED_BYTES} are tokenized per request"
            raise Refusal(message, param="prompt" if isinstance(prompt, str) else "messages")
        try:
            ids = encode(self.decoder.tokenizer, prompt, has_special=has_special)
        except UsageError as error:
            if prompt:
                raise refusal_of(error) from None
            ids = []
        answer = {"count": len(ids), "max_model_len": self.capacity, "tokens": ids}
        if value.get("return_token_strs") is True:
            answer["token_strs"] = self._tokenizer.convert_ids_to_tokens(ids)
        return answer

    def tokenizer_info(self) -> dict[str, Any]:
        """Tokenizer facts for clients without its files."""
        tokenizer = self._tokenizer
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        return special | {
            **tokenizer.special_tokens_map,
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": self.capacity,
            "chat_template": tokenizer.chat_template,
            "added_tokens_decoder": {str(i): token.content for i, token in tokenizer.added_tokens_decoder.items()},
        }

    def detokenize(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """Decode token ids. Raises Refusal."""
        check_names(value, "detokenize")
        ids, vocab_size = value.get("tokens"), self.decoder.target.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise Refusal(f"tokens must be a list of token ids below {vocab_size}", param="tokens")
        return {"prompt": self._decode(ids)}

    def _prepare(
        self,
        ask: ParsedRequest,
        form_of: Callable[[Sequence[int]], Form | ItemForm],
        thinking: Thinking | None = None,
    ) -> PreparedRequest:
        """
        Args:
            form_of: takes the ids of the first prompt.
            thinking: markers of thoughts that come before the output.

        Raises:
            Refusal
        """
        self._check_rule_and_k(ask)
        most_rows = self.model.most_rows
        if len(ask.prompts) * ask.n > most_rows:  # before they are tokenized
            message = f"the request needs {len(ask.prompts) * ask.n} completions: this server allows {most_rows}"
            raise Refusal(message, param="n" if len(ask.prompts) <= most_rows else "prompt")
        prompts = [self._with_images(prompt, ask.fetched) for prompt in ask.prompts]
        most = self._most_prompt_tokens(ask)
        all_ids = [self.token_ids(prompt, most, ask.adds_special) for prompt in prompts]
        check_scores(ask.scores, sum(map(len, all_ids)) * ask.n)
        jobs: list[RequestState] = []
        if ask.max_tokens != 0:
            try:
                ask = replace(ask, options={**ask.options, **self._only_allowed(ask)})
                for prompt, ids in zip(prompts, all_ids, strict=True):
                    read = self.decoder.read(prompt if isinstance(prompt, Mapping) else ids)
                    room = self.capacity - len(ids)
                    max_tokens = room if ask.max_tokens is None else min(ask.max_tokens, room)
                    for _ in range(ask.n):
                        jobs.append(self._job(ask, read, max_tokens, len(jobs), thinking))
            except Exception as error:
                raise named_refusal(ask, error) from None
        texts = []
        if ask.echo:
            pairs = zip(ask.prompts, all_ids, strict=True)
            texts = [
                prompt if isinstance(prompt, str) and len(ids) != most else self._decode(ids) for prompt, ids in pairs
            ]
        num_thoughts = None
        if thinking is not None:
            stage = thinking.stage_of(self._tokenizer, all_ids[0], _begun(ask))
            num_thoughts = partial(thinking.num_thoughts, self._tokenizer, stage)
        name, fingerprint, max_k = ask.model or self.model.names[0], self.model.fingerprint, self.model.schedule.max_k
        return PreparedRequest(ask, all_ids, texts, jobs, form_of(all_ids[0]), name, fingerprint, max_k, num_thoughts)

    def _with_tool_constraint(self, ask: ParsedRequest) -> ParsedRequest:
        """The request with the constraint that its tools demand. Raises Refusal."""
        if ask.tools is None:
            return ask
        if self.tool_format is None:
            message = "it is not known how this model writes tool calls: name it at the server's start (--tool-parser)"
            raise Refusal(message, param="tools")
        given = {name: value for name in CONSTRAINTS if (value := ask.options.get(name)) is not None}
        own = ask.tools.constraint(self.tool_format, self.marker_ids, given)
        if own is None:
            return ask
        others = {name: value for name, value in ask.options.items() if name not in CONSTRAINTS}
        return replace(ask, options=others | own, structured_by="tools")

    def _most_prompt_tokens(self, ask: ParsedRequest) -> int | None:
        """Raises Refusal."""
        most = ask.most_prompt_tokens
        if most is not None and most >= self.capacity:
            message = f"{most} tokens and the output do not fit into {self.capacity}"
            raise Refusal(f"truncate_prompt_tokens: {message}", param="truncate_prompt_tokens")
        return max(1, self.capacity - (ask.max_tokens or 1)) if most == -1 else most

    def _only_allowed(self, ask: ParsedRequest) -> dict[str, Any]:
        """``allowed_token_ids``, as biases. Raises Refusal."""
        vocab_size, bias = self.decoder.target.vocab_size, ask.options["logit_bias"] or {}
        allowed = {*(ask.allowed_ids or ())}
        if ask.allowed_ids is None:
            return {}
        if not 0 <= min(allowed) <= max(allowed) < vocab_size:
            raise Refusal(f"allowed_token_ids must be below {vocab_size}", param="allowed_token_ids")
        if ask.structured_by is not None:
            message = f"they may forbid what {ask.structured_by} requires: give one of the two"
            raise Refusal(f"allowed_token_ids: {message}", param="allowed_token_ids")
        Sampling(logit_bias=bias)  # checked before it is changed
        return {"logit_bias": bias | dict.fromkeys(set(range(vocab_size)) - allowed, -math.inf)}

    def _texts(self, ask: ParsedRequest) -> TokenTexts:
        return TokenTexts(self._tokenizer, ask.as_token_ids)

    def _chat_form(self, ask: ParsedRequest, thinking: Thinking | None, ids: Sequence[int]) -> ChatForm:
        return ChatForm(self._texts(ask), self._new_parser(ask, thinking, ids), self._new_call_id, ask.shows_thoughts)

    def _new_parser(
        self, ask: ParsedRequest, thinking: Thinking | None, ids: Sequence[int]
    ) -> Callable[[], OutputParser]:
        format_, tools = self.tool_format, ask.tools

        def new_parser() -> OutputParser:
            return OutputParser(
                self._new_splitter(ask, thinking, ids),
                None if tools is None or format_ is None else CallParser(format_, tools.names),
                has_content=tools is None or not tools.is_forced,
            )

        return new_parser

    def _new_splitter(
        self, ask: ParsedRequest, thinking: Thinking | None, ids: Sequence[int]
    ) -> ThoughtSplitter | None:
        if thinking is None:
            return None
        begun = _begun(ask)
        return ThoughtSplitter(thinking, thinking.stage_of(self._tokenizer, ids, begun), is_continued=bool(begun))

    def _new_call_id(self) -> str:
        assert self.tool_format is not None
        return self.tool_format.new_id()

    def _with_images(self, prompt: Prompt, fetched: Mapping[str, bytes]) -> Prompt:
        """Read the images of a chat, which are in the request or fetched: no file is opened. Raises Refusal."""
        if not has_images(prompt):
            return prompt
        try:
            return chat_inputs(self.decoder.processor, prompt, reads_files=False, fetched=fetched)  # type: ignore[arg-type]
        except (PromptError, MissingExtra) as error:
            raise Refusal(str(error), param="messages") from None

    def _job(
        self,
        ask: ParsedRequest,
        prompt: ReadPrompt,
        max_tokens: int,
        choice: int,
        thinking: Thinking | None,
    ) -> RequestState:
        seed = ask.options["seed"]
        own = {"max_new_tokens": max_tokens, "seed": None if seed is None else (seed + choice) % 2**63}
        shown_ids = [*(() if ask.tools is None else self.marker_ids.values()), *(thinking.ids if thinking else ())]
        if not ask.skips_special:
            shown_ids = [*special_ids(self._tokenizer)]
        options = {**ask.options, **own}
        job = self.decoder.request(
            prompt,
            options,
            shown_ids=shown_ids,
            includes_stop=ask.includes_stop,
            thoughts=self._new_splitter(ask, thinking, prompt.ids),
        )
        if thinking is not None and ask.structured_by is not None and job.request.constraint is not None:
            stage = thinking.stage_of(self._tokenizer, job.request.prompt_ids, _begun(ask))
            ends = self.decoder.target.vocab_size, self.decoder.ends_of(job.request.prompt_ids)
            constraint = AfterThinking(job.request.constraint, thinking, stage, *ends)
            job.request = replace(job.request, constraint=constraint)
        if ask.num_draft_tokens is not None:
            job.request = replace(job.request, num_draft_tokens=ask.num_draft_tokens)
        return job

    def _check_rule_and_k(self, ask: ParsedRequest) -> None:
        own = self.decoder.acceptance
        if ask.acceptance not in (None, own):
            raise Refusal(
                f"acceptance = {ask.acceptance!r:.60} is not supported: this server's rule is {own}", param="acceptance"
            )
        if ask.num_draft_tokens is not None and ask.num_draft_tokens > (max_k := self.model.schedule.max_k):
            raise Refusal(
                f"num_draft_tokens = {ask.num_draft_tokens} is not supported: this server drafts at most {max_k}",
                param="num_draft_tokens",
            )

    def _check_room(self, size: int, most: int, unit: str) -> None:
        """Raises PromptError."""
        if size > most:
            raise PromptError(
                f"the prompt has {size} {unit}, but the context is {self.capacity} tokens, prompt and output together: "
                "shorten it"
            )

    @property
    def _tokenizer(self) -> Any:
        return self.decoder.tokenizer

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def named_refusal(ask: ParsedRequest, error: Exception) -> Refusal:
    """Refusal for a library error, with the option under the request's name for it."""
    refusal = refusal_of(error)
    if isinstance(error, OptionError) and error.name in CONSTRAINTS and ask.structured_by == "tools":
        return Refusal(f"the schemas of the tools are not accepted: {error.remedy}", param="tools")
    if refusal.param in CONSTRAINTS:
        refusal.param = ask.structured_by
    elif refusal.param is not None:
        refusal.param = ask.names.get(refusal.param, refusal.param)
    return refusal


def _begun(ask: ParsedRequest) -> str:
    """Text that the output continues."""
    prompt = ask.prompts[0]
    return prompt.begun if isinstance(prompt, Chat) else ""


def _num_bytes(prompt: Prompt) -> int:
    """UTF-8 size of a string, or of a chat's messages, tools and documents."""
    given: Any = prompt
    if isinstance(prompt, Chat):
        given = [*prompt.messages, *prompt.options.documents, *prompt.options.tools]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return len(text.encode(errors="surrogatepass"))
