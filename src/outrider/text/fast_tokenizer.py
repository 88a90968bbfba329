"""A tokenizer of the package ``tokenizers``, with the roles of its tokens and its chat template.

Its members have the names and the results of Transformers' fast tokenizers, as far as they are read here, so that the
same code serves those, too. Texts are neither padded nor truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names that tokens have in every tokenizer, though most have no token for some."""
# Options of Transformers' ``apply_chat_template``, which are no variables of templates.
_OPTIONS = {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
_OPTIONS |= {"sanitize_control_tokens", "tokenizer_kwargs"}


@final
class Encoded(dict[str, list[int]]):
    """Tokens of a text and their mask, in the form of a prompt."""

    @property
    def input_ids(self) -> list[int]:
        return self["input_ids"]


@final
@dataclass(slots=True, eq=False)
class FastTokenizer:
    """Tokenizer of texts and chats. Each role is an attribute, too: ``bos_token``, and ``bos_token_id``.

    Attributes:
        backend_tokenizer: makes tokens of texts, and texts of tokens.
        special_tokens_map: tokens by role: those of ``ROLES``, and those that a model has beside them
            (``image_token``).
        chat_template: a template, or several by name; None if there is none.
        extra_special_tokens: further tokens that are no text.
    """

    backend_tokenizer: Tokenizer = field(repr=False)
    special_tokens_map: dict[str, str] = field(default_factory=dict)
    chat_template: str | dict[str, str] | None = None
    extra_special_tokens: Sequence[str] = ()

    def __post_init__(self) -> None:
        if padding := self.backend_tokenizer.padding:
            self.special_tokens_map.setdefault("pad_token", padding["pad_token"])
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()

    def __getattr__(self, name: str) -> Any:
        role = name.removesuffix("_id")
        if not role.endswith("_token") or role not in {*ROLES, *self.special_tokens_map}:
            raise AttributeError(f"the tokenizer has no {name!r}")
        token = self.special_tokens_map.get(role)
        return token if token is None or name == role else self.convert_tokens_to_ids(token)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = False) -> Encoded:
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Encoded(input_ids=encoding.ids, attention_mask=encoding.attention_mask)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self(text, add_special_tokens=add_special_tokens).input_ids

    def decode(
        self,
        token_ids: int | Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: Literal[False] = False,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Id of a token, or those of several; where there is no such token, that of the unknown token, or None."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found, unknown = self.backend_tokenizer.token_to_id(tokens), self.special_tokens_map.get("unk_token")
        return found if found is not None or unknown is None else self.backend_tokenizer.token_to_id(unknown)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Token of an id, or those of several; None where there is no such id."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token_id)) for token_id in ids]

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens that are found whole in a text, before it is split, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def all_special_tokens(self) -> list[str]:
        return [*dict.fromkeys((*self.special_tokens_map.values(), *self.extra_special_tokens))]

    @property
    def all_special_ids(self) -> list[int]:
        return [*map(self.convert_tokens_to_ids, self.all_special_tokens)]

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """Text of the template that is named or given; else of the one for tools, if there are tools and a template for
        them; else of the default. Raises ValueError: there is none."""
        own = self.chat_template
        named = own if isinstance(own, dict) else {} if own is None else {"default": own}
        if chat_template is not None:
            return named.get(chat_template, chat_template) if isinstance(own, dict) else chat_template
        name = "tool_use" if tools is not None and "tool_use" in named else "default"
        if name not in named:
            raise ValueError(f"no chat template is given, and none of the tokenizer's ({sorted(named)}) is the default")
        return named[name]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Text that the template makes of messages, or its tokens. Raises TypeError: an option is no variable; or the
        errors of ``templates.render``."""
        from outrider.text.templates import render

        if options := _OPTIONS & kwargs.keys():
            raise TypeError(f"{', '.join(sorted(options))}: chats become texts or lists of tokens, without options")
        text = render(
            self.get_chat_template(chat_template, tools),
            conversation,
            {**self.special_tokens_map, **kwargs},
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self(text, add_special_tokens=False) if tokenize else text

    def save_pretrained(self, folder: Path) -> None:
        """Write the files that Transformers reads."""
        from transformers import PreTrainedTokenizerFast

        PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            chat_template=self.chat_template,
            extra_special_tokens=[*self.extra_special_tokens],
            split_special_tokens=self.backend_tokenizer.encode_special_tokens,
            **self.special_tokens_map,
        ).save_pretrained(folder)
