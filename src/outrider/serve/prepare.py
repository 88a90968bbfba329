"""From a request's body to rows for the engine. Runs in a thread pool, since tokenizing is slow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.decoder import ReadPrompt
from outrider.errors import OptionError, PromptError, UsageError
from outrider.options import CONSTRAINTS, with_checked
from outrider.requests.engine_loop import RequestState
from outrider.requests.hooks import ReadOptions
from outrider.serve.answers import Answer
from outrider.serve.bodies import DetokenizeBody, TokenizeBody
from outrider.serve.generation_body import GenerationBody, ParsedRequest
from outrider.serve.http_errors import Refusal
from outrider.serve.logprobs import TokenTexts, check_scores
from outrider.serve.messages import MessageBody
from outrider.serve.served_model import ServedModel
from outrider.text.chat import Chat
from outrider.text.chat_images import chat_inputs, has_images
from outrider.text.output_parser import CallParser, OutputParser
from outrider.text.prompts import begun_of, is_chat, rows_of, without_media
from outrider.text.thinking import Thinking
from outrider.text.tokenizer import Prompt, encode, special_ids
from outrider.text.tool_formats import ToolFormat

# Assumed bytes per token if no token is longer: some tokenizers drop spaces or map unknown words to one token.
_LEAST_BYTES_A_TOKEN = 64
_MOST_TOKENIZED_BYTES = 2**20  # for /tokenize, which has no other limit


class Preparer:
    """Prepares requests for the model, which may have a known format of calls and known markers of thoughts."""

    def __init__(self, model: ServedModel, tool_format: ToolFormat | None, thinking: Thinking | None) -> None:
        self.model, self._tool_format, self._thinking = model, tool_format, thinking
        self.decoder, self.capacity = model.decoder, model.capacity
        assert model.decoder.tokenizer is not None
        self._tokenizer: Any = model.decoder.tokenizer
        vocabulary = self._tokenizer.get_vocab()
        longest = max(len(token.encode()) for token in vocabulary)
        # Of a prompt that may fit; longer ones are refused before tokenizing.
        self._most_bytes = self.capacity * max(longest, _LEAST_BYTES_A_TOKEN)
        markers = tool_format.tokens if tool_format else ()
        self._marker_ids = {marker: vocabulary[marker] for marker in markers if marker in vocabulary}

    def parse(self, body: type[GenerationBody], sent: Mapping[str, Any]) -> ParsedRequest:
        """The request of a body, with the constraint that its tools demand. Raises Refusal."""
        ask = body.read_request(sent)
        if ask.tools is None:
            return ask
        if self._tool_format is None:
            message = "it is not known how this model writes tool calls: name it at the server's start (--tool-parser)"
            raise Refusal(message, param="tools")
        given = {name: value for name in CONSTRAINTS if (value := ask.options.get(name)) is not None}
        own = ask.tools.constraint(self._tool_format, self._marker_ids, given, ask.structured_by)
        if own is None:
            return ask
        others = {name: value for name, value in ask.options.items() if name not in CONSTRAINTS}
        return replace(ask, options=others | own, structured_by="tools")

    def prepare(self, answer: type[Answer], ask: ParsedRequest) -> Answer:
        """The answer of an endpoint, with its rows. Raises Refusal."""
        try:
            return self._prepare(answer, ask)
        except Exception as error:
            raise ask.refusal_of(error) from None

    def _prepare(self, answer: type[Answer], ask: ParsedRequest) -> Answer:
        if ask.body.acceptance not in (None, own := self.decoder.acceptance):
            message = f"acceptance = {ask.body.acceptance!r:.60} is not supported: this server's rule is {own}"
            raise Refusal(message, param="acceptance")
        if ask.num_draft_tokens is not None and ask.num_draft_tokens > (max_k := self.model.schedule.max_k):
            message = f"num_draft_tokens = {ask.num_draft_tokens} is not supported: this server drafts at most {max_k}"
            raise Refusal(message, param="num_draft_tokens")
        most_rows = self.model.admission.most_of_one
        if len(ask.prompts) * ask.body.n > most_rows:  # before they are tokenized
            message = f"the request needs {len(ask.prompts) * ask.body.n} completions: this server allows {most_rows}"
            raise Refusal(message, param="n" if len(ask.prompts) <= most_rows else ask.body.PROMPT)
        prompts, all_ids = list[Prompt](), list[list[int]]()
        for given in ask.prompts:
            ask.check_open()
            prompts.append(self._with_images(given))
            all_ids.append(self.token_ids(prompts[-1], ask.body.add_special_tokens))
        check_scores(ask.scores, sum(map(len, all_ids)) * ask.body.n)
        budget = ask.options.get("thinking_budget")
        if budget is not None and self._thinking is None:
            raise OptionError("thinking_budget", budget, "this model has no known markers of thoughts: leave it out")
        separates = ask.body.separate_reasoning
        thinking = self._thinking if separates or budget is not None else None
        if thinking is not None and ask.tools is not None and ask.tools.is_forced:
            thinking = replace(thinking, answer_ids=())  # the grammar of calls has their headers
        jobs: list[RequestState] = []
        if ask.max_tokens != 0:
            options = self.decoder.read_options(ask.options)
            for prompt, ids in zip(prompts, all_ids, strict=True):
                read = self.decoder.read(prompt if isinstance(prompt, Mapping) else ids)
                read = read._replace(begun=begun_of(ask.prompts[0]))
                room = self.capacity - len(ids)
                max_tokens = room if ask.max_tokens is None else min(ask.max_tokens, room)
                for _ in range(ask.body.n):
                    ask.check_open()
                    jobs.append(self._job(ask, options, read, max_tokens, len(jobs), thinking))
        texts = []
        if ask.body.echo:
            pairs = zip(ask.prompts, all_ids, strict=True)
            texts = [prompt if isinstance(prompt, str) else self._decode(ids) for prompt, ids in pairs]

        def new_parser(job: RequestState) -> OutputParser:
            calls = None
            if ask.tools is not None and self._tool_format is not None:
                calls = CallParser(self._tool_format, [tool.name for tool in ask.tools.callable])
            return OutputParser(job.text.parts, calls, has_content=ask.tools is None or not ask.tools.is_forced)

        tokens = TokenTexts(self._tokenizer, ask.body.return_tokens_as_token_ids)
        splits = thinking is not None and separates
        return answer(ask, all_ids, texts, jobs, tokens, new_parser, self._tool_format, self.model, splits)

    def token_ids(self, prompt: Prompt, has_special: bool | None = None) -> list[int]:
        """Token ids of a prompt that fits, encoded with special tokens or without; with images it is the processor's
        output. Raises PromptError, OptionError."""
        if isinstance(prompt, Mapping):
            ids = rows_of(without_media(prompt))[0]
        else:
            if isinstance(prompt, str) or is_chat(prompt):
                self._check_room(_num_bytes(prompt), self._most_bytes, "bytes")
            ids = self.decoder.encode(encode(self._tokenizer, prompt, has_special=has_special))
        self._check_room(len(ids), self.capacity - 1, "tokens")
        return ids

    def count_tokens(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Count the tokens of messages of any length. Raises Refusal."""
        ask = self.parse(MessageBody, sent)
        try:
            prompt = self._with_images(ask.prompts[0])
            ids = self.token_ids(prompt) if isinstance(prompt, Mapping) else self._ids_of_any_length(prompt)
        except UsageError as error:
            raise ask.refusal_of(error) from None
        return {"input_tokens": len(ids)}

    def tokenize(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Tokenize a prompt or messages of any length. Raises Refusal."""
        body = TokenizeBody.read(sent)
        try:
            ids = self._ids_of_any_length(body.text(), body.add_special_tokens)
        except UsageError as error:
            raise body.refusal_of(error) from None
        answer = {"count": len(ids), "max_model_len": self.capacity, "tokens": ids}
        if body.return_token_strs:
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

    def detokenize(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Decode token ids. Raises Refusal."""
        ids, vocab_size = DetokenizeBody.read(sent).tokens, self.decoder.target.vocab_size
        if not all(0 <= i < vocab_size for i in ids):
            raise Refusal(f"tokens must be a list of token ids below {vocab_size}", param="tokens")
        return {"prompt": self._decode(ids)}

    def _with_images(self, prompt: Prompt) -> Prompt:
        """A prompt whose images are read, without opening files. Raises PromptError."""
        if not has_images(prompt):
            return prompt
        return chat_inputs(self.decoder.processor, prompt, reads_files=False)  # type: ignore[arg-type]

    def _ids_of_any_length(self, prompt: Prompt, has_special: bool | None = None) -> list[int]:
        if (num_bytes := _num_bytes(prompt)) > _MOST_TOKENIZED_BYTES:
            most = f"at most {_MOST_TOKENIZED_BYTES} are tokenized per request"
            raise PromptError(f"{num_bytes} bytes are too many: {most}")
        return encode(self._tokenizer, prompt, has_special=has_special) if prompt else []

    def _job(
        self,
        ask: ParsedRequest,
        options: ReadOptions,
        prompt: ReadPrompt,
        max_tokens: int,
        choice: int,
        thinking: Thinking | None,
    ) -> RequestState:
        seed = ask.options["seed"]
        own = {"max_new_tokens": max_tokens, "seed": None if seed is None else (seed + choice) % 2**63}
        options = options._replace(sampling=with_checked(options.sampling, **own))
        separates = ask.body.separate_reasoning
        shown_ids = [*(() if ask.tools is None else self._marker_ids.values())]
        shown_ids += thinking.ids if thinking and separates else ()
        if not ask.body.skip_special_tokens:
            shown_ids = [*special_ids(self._tokenizer)]
        job = self.decoder.request(
            prompt,
            options,
            shown_ids=shown_ids,
            includes_stop=ask.body.include_stop_str_in_output,
            thinking=thinking,
            splits_thoughts=separates,
        )
        if ask.num_draft_tokens is not None:
            job.request = replace(job.request, num_draft_tokens=ask.num_draft_tokens)
        return job

    def _check_room(self, size: int, most: int, unit: str) -> None:
        if size > most:
            context = f"the context is {self.capacity} tokens, prompt and output together"
            raise PromptError(f"the prompt has {size} {unit}, but {context}: shorten it")

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _num_bytes(prompt: Prompt) -> int:
    given: Any = prompt
    if isinstance(prompt, Chat):
        given = [*prompt.messages, *prompt.options.documents, *prompt.options.tools]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return len(text.encode(errors="surrogatepass"))
