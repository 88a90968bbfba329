"""Chats with images, read by the model's processor.

An image is a part of a message's content: ``{"type": "image", "image": X}`` (or ``path``), where X is an image of PIL
or a file; or OpenAI's ``{"type": "image_url", "image_url": {"url": U}}``, where U holds the image
("data:image/png;base64,..."). Nothing is fetched from the network here.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from outrider.errors import MissingExtra, OptionError, PromptError, reason_of
from outrider.text.chat import IMAGE_KINDS, Chat, ChatOptions, read_message
from outrider.text.prompts import is_chat, media_of

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others run programs (EPS), or are rarely tested
# Limits of one prompt: a small file may hold a huge image.
MOST_IMAGES = 64
_MOST_PIXELS = 2**26
_NUM_SCANS = 16  # of a JPEG that count once; each has as little as 8 bytes, and takes some 2 ns for each pixel
_START_OF_SCAN = re.compile(rb"\xff\xda\x00[\x08\x0a\x0c\x0e][\x01-\x04]")  # with its length: other data may have FF DA
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError)  # of PIL, for broken files


def has_images(prompt: Any) -> bool:
    if isinstance(prompt, Chat) or not is_chat(prompt):  # a ``Chat`` is text alone
        return False
    contents = [message.get("content") for message in prompt if isinstance(message, Mapping)]
    parts = [part for one in contents if isinstance(one, Sequence) and not isinstance(one, str) for part in one]
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS for part in parts)


def chat_of(
    messages: str | Sequence[Mapping[str, Any]], given: Mapping[str, Any]
) -> tuple[Chat | Sequence[Mapping[str, Any]], dict[str, Any]]:
    """A chat with those of the given options that are its own, and the other options. With images it is the messages,
    which have no options. Raises PromptError, OptionError."""
    own = {one.name: given[one.name] for one in fields(ChatOptions) if one.name in given}
    others = {name: value for name, value in given.items() if name not in own}
    options = ChatOptions(**own)
    if not has_images(messages):
        return Chat(messages, options), others  # type: ignore[arg-type]
    if options.given():
        name, value = next(iter(options.given().items()))
        remedy = "not supported beside images: render the chat with the model's processor, and give it to generate()"
        raise OptionError(name, value, remedy)
    return messages, others  # type: ignore[return-value]


def chat_inputs(processor: Any | None, messages: Sequence[Any], *, reads_files: bool = True) -> dict[str, Any]:
    """Token ids, mask and images of a chat, as the processor returns them; images may be files if ``reads_files``.
    Raises PromptError: there is no processor; an image cannot be read, or would have to be fetched; or the template or
    the processor does not accept the messages; MissingExtra."""
    if processor is None or not getattr(processor, "chat_template", None):
        remedy = "leave them out of the messages"
        raise PromptError(f"this model reads no images (it has no processor with a chat template): {remedy}")
    if find_spec("PIL") is None:
        raise MissingExtra("pillow", "images", "an image")
    images: list[Any] = []
    sizes: list[int] = []

    def read_image(index: int, part: Mapping[str, Any]) -> dict[str, Any]:
        value = part.get("image_url", part.get("url", part.get("image", part.get("path"))))
        # OpenAI's, which chats have in the image and /v1/responses beside it.
        of_url = part.get("image_url")
        detail = of_url.get("detail") if isinstance(of_url, Mapping) else part.get("detail")
        if detail not in (None, "auto", "high"):
            raise PromptError(f"message {index} asks for images in detail {detail!r}: they are read as they are")
        value = value.get("url") if isinstance(value, Mapping) else value
        image, num_pixels = _opened(value, f"message {index}", reads_files=reads_files)
        images.append(image)
        sizes.append(num_pixels)
        # Images that need too much memory or time are refused before any is decoded.
        if len(sizes) > MOST_IMAGES:
            raise PromptError(f"the prompt has more than {MOST_IMAGES} images: give fewer")
        if (num_pixels := sum(sizes)) > _MOST_PIXELS:
            remedy = f"give fewer or smaller ones (the pixels of a JPEG count once for every {_NUM_SCANS} scans)"
            found = f"have {num_pixels} pixels, more than {_MOST_PIXELS} in all"
            raise PromptError(f"the images of the prompt {found}: {remedy}")
        return {"type": "image"}

    written = [
        {"content": [], **read_message(index, message, partial(read_image, index))}
        for index, message in enumerate(messages)
    ]
    images = [_decoded(image) for image in images]
    try:
        text = processor.apply_chat_template(written, add_generation_prompt=True, tokenize=False)
        bos = processor.tokenizer.bos_token
        has_bos = bool(bos) and text.startswith(bos)  # as chat templates write
        found = processor(text=[text], images=images, return_tensors="pt", add_special_tokens=not has_bos)
    except Exception as error:  # templates and processors compute with the content of messages
        raise PromptError(f"the model's processor does not accept these messages: {reason_of(error)}") from None
    if images and not media_of(dict(found)):
        message = f"the model's processor returns no 'pixel_values' for images, but {', '.join(found)}"
        raise PromptError(f"{message}: give text alone")
    return dict(found)


def _opened(value: Any, where: str, *, reads_files: bool) -> tuple[Any, int]:
    from PIL import Image

    try:
        if isinstance(value, Image.Image):
            return value, _num_pixels(value)
        if isinstance(value, str) and value.startswith("data:"):
            kind, _, data = value.partition(",")
            if not kind.endswith(";base64"):
                raise PromptError(f"{where} has an image as a data URL that is not base64")
            return _read(io.BytesIO(base64.b64decode(data, validate=True)))
        if isinstance(value, str | Path) and reads_files and "://" not in str(value):
            return _read(Path(value).expanduser())
    except _UNREADABLE as error:
        raise PromptError(f"{where} has an image that cannot be read: {reason_of(error)}") from None
    forms = "an image of PIL, a file or a data URL" if reads_files else "a data URL"
    raise PromptError(f"{where} has the image {str(value)!r:.80}, which is not fetched: give {forms}")


def _read(source: Any) -> tuple[Any, int]:
    """The header of an image, and ``_num_pixels``. Raises the errors of ``_UNREADABLE``."""
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image = Image.open(source, formats=_FORMATS)
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from None
        except UnidentifiedImageError:
            raise ValueError(f"it is not in one of the formats {', '.join(_FORMATS)}") from None
    if any(tile[0] == "bmp_rle" for tile in image.tile):  # two bytes are as many pixels as a row has, set one by one
        raise ValueError("it is a BMP of run lengths: store it as PNG")
    return image, _num_pixels(image)


def _num_pixels(image: Any) -> int:
    """Pixels that are decoded. The scans of a JPEG are decoded one after another, each over all of them."""
    num_scans, file = 0, getattr(image, "fp", None)
    if file is not None and image.format in ("JPEG", "MPO"):
        place = file.tell()
        file.seek(0)
        num_scans = len(_START_OF_SCAN.findall(file.read()))
        file.seek(place)
    return int(image.width * image.height * max(1, -(-num_scans // _NUM_SCANS)))


def _decoded(image: Any) -> Any:
    """An image as Transformers loads it: upright, since cameras store it as they were held, and in RGB."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # PIL computes with all that a camera has written
        raise PromptError(f"an image of the prompt cannot be read: {reason_of(error)}") from None
