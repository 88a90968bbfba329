"""Chats with images: in every form of an image, the text is that of the model's own ``generate``."""

import base64
import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
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


def picture(colour: int) -> Image.Image:
    image = Image.effect_noise((24, 20), 80)
    return Image.merge("RGB", (image, image.point(lambda _: colour), image))


def data_url(image: Image.Image, kind: str = "PNG") -> str:
    stored = io.BytesIO()
    image.save(stored, kind)
    return f"data:image/png;base64,{base64.b64encode(stored.getvalue()).decode()}"


def chat(part: dict[str, Any], text: str = "w5 w8 w2") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    """From a folder, with its processor."""
    folder = tmp_path_factory.mktemp("llava")
    save(folder, multimodal("llava"), word_tokenizer())
    llava_processor().save_pretrained(folder)
    yield outrider.load(folder, random_llama(), num_draft_tokens=2)


def generated(decoder: Decoder, image: Image.Image, text: str = " w5 w8 w2 ") -> list[int]:
    inputs = decoder.processor(text=[f"w90{text} w3"], images=[image], return_tensors="pt")
    output = decoder.target.model.generate(**inputs, do_sample=False, max_new_tokens=10)
    ids: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
    return ids


def test_an_image_in_every_form(decoder: Decoder, tmp_path: Path) -> None:
    """Also in chats of a decoder and of sessions, where options of the template are refused."""
    image = picture(40)
    image.save(tmp_path / "image.png")
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": image},
        {"type": "image", "image": str(tmp_path / "image.png")},
        {"type": "image", "path": tmp_path / "image.png"},
        {"type": "image_url", "image_url": {"url": data_url(image)}},
    ]
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
    done, want = decoder.generate([chat(form) for form in forms], **options), generated(decoder, image)
    messages = chat(forms[0])
    with decoder.session(slots=1) as session:
        done += [decoder.chat(messages, system=None, **options), session.chat(messages, **options)]
        streams = [decoder.stream_chat(messages, **options), session.stream_chat(messages, **options)]
        streamed = [[i for chunk in stream for i in chunk.token_ids] for stream in streams]
    assert [list(one.token_ids) for one in done] == [want] * 6 and done[0].num_prompt_tokens == 8
    assert streamed == [want] * 2
    (other,) = decoder.generate([chat({"type": "image", "image": picture(250)})], **options)
    assert list(other.token_ids) != want
    with pytest.raises(OptionError, match=r"system = 'w5' .*beside images: .*give it to generate\(\)"):
        decoder.chat(messages, system="w5")


def test_images_that_cannot_be_read_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    """Nothing is fetched. GenerationCalls without images say so."""
    # Some bytes are millions of pixels, which Pillow sets one by one.
    header = struct.pack("<IiiHHIIiiII", 40, 8192, 8192, 1, 8, 1, 4, 0, 0, 256, 0)
    runs = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(header) + 1024) + header + bytes(1024) + b"\0\0\0\1"
    for value, message in (
        (f"data:image/bmp;base64,{base64.b64encode(runs).decode()}", "it is a BMP of run lengths: store it as PNG"),
        ("https://example.com/image.png", "has the image 'https://example.com/image.png', which is not fetched"),
        (str(tmp_path / "gone.png"), "cannot be read: .*No such file"),
        ("data:image/png;base64,AAAA", "cannot be read"),
        ("data:image/png,AAAA", "not base64"),
        (data_url(Image.new("1", (8192, 8193))), "have 67117056 pixels, more than 67108864 in all"),
        (data_url(picture(1), "TIFF"), "not in one of the formats PNG, JPEG,"),
    ):
        with pytest.raises(PromptError, match=message):
            decoder.generate([chat({"type": "image", "image": value})])
    url = data_url(picture(1))
    for low in ({"image_url": {"url": url, "detail": "low"}}, {"url": url, "detail": "low"}):
        kind = "image_url" if "image_url" in low else "image"
        with pytest.raises(PromptError, match="in detail 'low': they are read as they are"):
            decoder.generate([chat({"type": kind, **low})])
    with pytest.raises(PromptError, match="a part of type 'video'"):
        decoder.generate([[*chat({"type": "video"}), *chat({"type": "image", "image": picture(1)})]])
    with pytest.raises(PromptError, match="a part of type 'image': only text can be given here"):
        decoder.encode(chat({"type": "image", "image": picture(1)}))
    with pytest.raises(PromptError, match="this model reads no images .*: leave them out"):
        outrider.load(random_llama()).generate([chat({"type": "image", "image": picture(1)})])


def exif(kind: int) -> bytes:
    """Of a camera that was held upright, with its maker's name in a type of TIFF: 2 is text, 5 a fraction."""
    maker, upright = struct.pack("<HHII", 0x10F, kind, 1, 38), struct.pack("<HHII", 0x112, 3, 1, 6)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 2) + maker + upright + bytes(4) + b"outrider"


def test_photos_are_upright(decoder: Decoder) -> None:
    """As Transformers loads them, and not as the camera was held. One that cannot be read is refused."""
    files = [io.BytesIO(), io.BytesIO()]
    for file, kind in zip(files, (2, 5), strict=True):
        picture(40).save(file, "JPEG", quality=95, exif=exif(kind))
    upright = load_image(Image.open(files[0]))
    assert upright.size == (20, 24)
    urls = [f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}" for file in files]
    messages = [chat({"type": "image_url", "image_url": {"url": url}}) for url in urls]
    (done,) = decoder.generate(messages[:1], temperature=0, max_new_tokens=10, ignore_eos=True)
    assert list(done.token_ids) == generated(decoder, upright) != generated(decoder, Image.open(files[0]))
    with pytest.raises(PromptError, match="an image of the prompt cannot be read"):
        decoder.generate(messages[1:])


def test_many_images_are_counted_before_one_is_decoded(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files with more pixels in all than fit; those of a JPEG count for every 16 scans, all of which are read."""

    def decode(*_: Any) -> None:
        raise AssertionError("decoded")

    parts = chat({"type": "image", "image": data_url(Image.new("1", (4096, 4096)))})[0]["content"]
    small = chat({"type": "image", "image": data_url(picture(1))})[0]["content"]
    stored = io.BytesIO()
    Image.new("L", (1024, 1024)).save(stored, "JPEG", progressive=True)
    head, *scans = stored.getvalue()[:-2].split(b"\xff\xda")
    many = b"\xff\xda".join([head, *scans, *scans[-1:] * (1024 - len(scans))]) + b"\xff\xd9"
    # Other data of a file are no scans.
    Image.new("RGB", (256, 256)).save(stored := io.BytesIO(), "JPEG", comment=b"\xff\xda" * 30_000)
    one = f"data:image/jpeg;base64,{base64.b64encode(stored.getvalue()).decode()}"
    decoder.generate([chat({"type": "image_url", "image_url": {"url": one}})], max_new_tokens=1)
    url = f"data:image/jpeg;base64,{base64.b64encode(many).decode()}"
    scanned = chat({"type": "image_url", "image_url": {"url": url}})[0]["content"]
    monkeypatch.setattr(Image.Image, "convert", decode)
    for content, message in (
        ([*parts[:1] * 5, parts[1]], "have 83886080 pixels, more than 67108864 in all: give fewer or smaller"),
        ([*scanned[:1] * 2, small[1]], "have 134217728 pixels, more than 67108864 in all: give fewer or smaller"),
        ([*small[:1] * 65, small[1]], "more than 64 images: give fewer"),
    ):
        with pytest.raises(PromptError, match=message):
            decoder.generate([[{"role": "user", "content": content}]])


def test_a_processor_without_pixels_is_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images in another form would be dropped."""
    processor = type(decoder.processor)

    def renamed(own: Any, *given: Any, **named: Any) -> dict[str, Any]:
        return {name.replace("pixel_values", "patches"): value for name, value in process(own, *given, **named).items()}

    process = processor.__call__
    monkeypatch.setattr(processor, "__call__", renamed)
    with pytest.raises(PromptError, match="no 'pixel_values' for images, but input_ids, attention_mask, patches"):
        decoder.generate([chat({"type": "image", "image": picture(1)})])


def answer(client: OpenAI, url: str, **more: Any) -> Any:
    messages: Any = chat({"type": "image_url", "image_url": {"url": url}})
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 10, "extra_body": {"ignore_eos": True}} | more
    return client.chat.completions.create(model="toy", messages=messages, **options)


def test_the_server_takes_images_in_the_request(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither files nor addresses. An image is read once for all choices."""
    reads: list[Any] = []
    monkeypatch.setattr(decoder_module, "read_media", lambda *given: reads.append(given) or read_media(*given))
    image = picture(40)
    image.save(tmp_path / "image.png")
    with running(decoder, context_len=64) as server, server.openai() as client:
        found = answer(client, data_url(image), n=2)
        want = decoder.tokenizer.decode(generated(decoder, image), skip_special_tokens=True)
        assert [choice.message.content.split() for choice in found.choices] == [want.split()] * 2
        assert found.usage.prompt_tokens == 8 and len(reads) == 1
        kind, _, data = data_url(image).removeprefix("data:").partition(";base64,")
        source = {"type": "base64", "media_type": kind, "data": data}
        messages = chat({"type": "image", "source": source})  # Anthropic's
        body = {"messages": messages, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        with server.http() as http:
            (block,) = http.post("/v1/messages", json=body).json()["content"]
        assert block["text"].split() == want.split()
        fields = {"prompt_logprobs": 1, "add_special_tokens": True, "add_generation_prompt": False}
        for field, value in fields.items():
            with pytest.raises(BadRequestError, match=f"{field} is not supported beside images"):
                answer(client, data_url(image), extra_body={field: value})
        idle = {"add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}}
        assert answer(client, data_url(image), max_tokens=1, extra_body=idle).choices
        for url in ("https://example.com/image.png", str(tmp_path / "image.png"), f"file://{tmp_path}/image.png"):
            with pytest.raises(BadRequestError, match="which is not fetched: give a data URL"):
                answer(client, url)
