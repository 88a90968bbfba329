"""Chats with images: in every form of an image, the text is that of the model's own ``generate``."""

import base64
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from servers import running
from transformers.image_utils import load_image

import outrider
from multimodal import llava_processor, multimodal
from outrider import decoder as decoder_module
from outrider.decoder import Decoder
from outrider.errors import OptionError, PromptError
from outrider.runtime.media import read_media
from pairs import random_llama, save, word_tokenizer

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}


def picture(colour: int) -> Image.Image:
    image = Image.effect_noise((24, 20), 80)
    return Image.merge("RGB", (image, image.point(lambda _: colour), image))


def stored(image: Image.Image, kind: str = "JPEG", **more: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **more)
    return file.getvalue()


def url_of(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def chat(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "w5 w8 w2"}]}]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    folder = tmp_path_factory.mktemp("llava")
    save(folder, multimodal("llava"), word_tokenizer())
    llava_processor().save_pretrained(folder)
    yield outrider.load(folder, random_llama(), num_draft_tokens=2)


def generated(decoder: Decoder, image: Image.Image) -> list[int]:
    inputs = decoder.processor(text=["w90 w5 w8 w2  w3"], images=[image], return_tensors="pt")
    output = decoder.target.model.generate(**inputs, do_sample=False, max_new_tokens=10)
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


def test_an_image_in_every_form(decoder: Decoder, tmp_path: Path) -> None:
    image, path = picture(40), tmp_path / "image.png"
    image.save(path)
    url = {"type": "image_url", "image_url": {"url": url_of(path.read_bytes())}}
    forms = [part(image), part(str(path)), {"type": "image", "path": path}, url]
    done, want = decoder.generate([chat(form) for form in forms], **GREEDY), generated(decoder, image)
    done.append(decoder.chat(chat(part(image)), system=None, **GREEDY))
    with decoder.session(slots=1) as session:
        streamed = [i for chunk in session.stream_chat(chat(part(image)), **GREEDY) for i in chunk.token_ids]
    assert [list(one.token_ids) for one in done] == [want] * 5 and done[0].num_prompt_tokens == 8
    assert streamed == want
    file = stored(image, quality=95, exif=exif())  # photos are upright, and not as the camera was held
    (done,) = decoder.generate([chat(part(url_of(file)))], **GREEDY)
    held, upright = (Image.open(io.BytesIO(file)) for _ in range(2))
    assert list(done.token_ids) == generated(decoder, load_image(upright)) != generated(decoder, held)
    with pytest.raises(OptionError, match=r"system = 'w5' .*beside images: .*give it to generate\(\)"):
        decoder.chat(chat(part(image)), system="w5")


def exif() -> bytes:
    return b"Exif\0\0II*\0" + struct.pack("<IHHHIII", 8, 1, 0x112, 3, 1, 6, 0)


def test_unreadable_images_are_refused(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files with too many pixels in all are refused before one is decoded; a JPEG counts for every 16 scans."""
    # Some bytes are millions of pixels, which Pillow sets one by one.
    header = struct.pack("<IiiHHIIiiII", 40, 8192, 8192, 1, 8, 1, 4, 0, 0, 256, 0)
    runs = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(header) + 1024) + header + bytes(1024) + b"\0\0\0\1"
    large, small = part(url_of(stored(Image.new("1", (4096, 4096)), "PNG"))), part(url_of(stored(picture(1))))
    head, *scans = stored(Image.new("L", (1024, 1024)), progressive=True)[:-2].split(b"\xff\xda")
    scanned = part(url_of(b"\xff\xda".join([head, *scans, *scans[-1:] * (1024 - len(scans))]) + b"\xff\xd9"))
    url = small["image"]
    refused: list[tuple[list[dict[str, Any]], str]] = [
        ([part(url_of(runs))], "it is a BMP of run lengths: store it as PNG"),
        ([part("https://example.com/a.png")], "has the image 'https://example.com/a.png', which is not fetched"),
        ([part(str(tmp_path / "gone.png"))], "cannot be read: .*No such file"),
        ([part(url_of(stored(picture(1), "TIFF")))], "not in one of the formats PNG, JPEG,"),
        ([{"type": "image_url", "image_url": {"url": url, "detail": "low"}}], "in detail 'low': they are read as"),
        ([small, {"type": "video"}], "a part of type 'video'"),
        ([large] * 5, "have 83886080 pixels, more than 67108864 in all: give fewer or smaller"),
        ([scanned] * 2, "have 134217728 pixels, more than 67108864 in all: give fewer or smaller"),
        ([small] * 65, "more than 64 images: give fewer"),
    ]
    for parts, message in refused:
        with pytest.raises(PromptError, match=message):
            decoder.generate([chat(*parts)])
        if len(parts) > 1:  # the next are refused undecoded
            monkeypatch.setattr(Image.Image, "convert", None)
    with pytest.raises(PromptError, match="a part of type 'image': only text can be given here"):
        decoder.encode(chat(small))
    with pytest.raises(PromptError, match="this model reads no images .*: leave them out"):
        outrider.load(random_llama()).generate([chat(small)])


def test_server_takes_images_in_requests(decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor addresses. An image is read once for all choices."""
    reads: list[Any] = []
    monkeypatch.setattr(decoder_module, "read_media", lambda *given: reads.append(given) or read_media(*given))
    image = picture(40)
    url = url_of(stored(image, "PNG"))
    want = decoder.tokenizer.decode(generated(decoder, image), skip_special_tokens=True).split()  # type: ignore[union-attr]
    with running(decoder, context_len=64) as server, server.http() as http:

        def answer(url: str, **more: Any) -> Any:
            messages = chat({"type": "image_url", "image_url": {"url": url}})
            body = {"messages": messages, "temperature": 0, "max_tokens": 10, "ignore_eos": True}
            return http.post("/v1/chat/completions", json=body | more).json()

        found = answer(url, n=2)
        assert [choice["message"]["content"].split() for choice in found["choices"]] == [want] * 2
        assert found["usage"]["prompt_tokens"] == 8 and len(reads) == 1
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}  # Anthropic's
        body = {"messages": chat({"type": "image", "source": source}), "max_tokens": 10, "temperature": 0}
        (block,) = http.post("/v1/messages", json=body | {"ignore_eos": True}).json()["content"]
        assert block["text"].split() == want
        error = answer(url, prompt_logprobs=1)["error"]["message"]
        assert "prompt_logprobs is not supported beside images" in error
        for other in ("https://example.com/image.png", str(tmp_path / "image.png"), f"file://{tmp_path}/image.png"):
            assert "which is not fetched: give a data URL" in answer(other)["error"]["message"]
