"""Images of rows become tokens and inputs of the model; what cannot be read names the row and the remedy."""

import base64
import io
import random
import struct
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image, ImageOps
from transformers import CLIPImageProcessorPil, LlavaProcessor
from transformers.image_transforms import convert_to_rgb

from openppo.config import PreferenceConfig, RowsConfig, SupervisedConfig
from openppo.config.data import PromptDataConfig, SFTDataConfig
from openppo.datasets import load_preferences, load_prompts, load_sft_examples
from openppo.datasets.media import RowVision
from openppo.datasets.media_files import read_image, values_of, within_pixels
from openppo.datasets.message_parts import media_key, media_parts
from openppo.datasets.sources import load_rows, number_rows
from openppo.datasets.templates import text_of
from tests.conftest import save_tokenizer

RED = Image.new("RGB", (20, 16), (200, 10, 10))
BLUE = Image.new("RGB", (8, 32), (10, 10, 200))
PARTS = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type=='image' %}[<image>]{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
ONLY_PARTS = (
    "{% for m in messages %}{{ m.role[0] }}:{% for c in m.content %}{% if c.type=='image' %}<image>{% endif %}"
    "{% endfor %}{% for c in m.content %}{{ c.text }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""As that of LLaVA: images first, and nothing of a content that is a text."""
TEXTS = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content }};{% endfor %}"
    + "{% if add_generation_prompt %}a:{% endif %}"
)


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer", "abcdefgh:;[]u?", ["<image>"])


@pytest.fixture
def processor(tokenizer):
    """Of four tokens for an image."""
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    more = {"image_token": "<image>", "num_additional_image_tokens": 1}
    return LlavaProcessor(CLIPImageProcessorPil(**sizes), tokenizer, 8, "default", **more)


@pytest.fixture
def load(tokenizer, processor):
    """``load(rows, **options)`` gives prompts."""

    def load(rows, template=None, flag="--prompt_data", **options):
        tokenizer.chat_template = template
        options = PromptDataConfig(prompt_data="-", image_key="images", **options)
        vision = RowVision(
            lambda: processor, tokenizer.convert_tokens_to_ids(["<image>"]), tokenizer, options
        )
        return load_prompts(number_rows(rows, flag=flag), tokenizer, options, vision=vision)

    return load


def pixels(prompt):
    return torch.cat([item.inputs["pixel_values"] for item in prompt.media])


def test_ids_and_pixels_are_those_of_the_processor(load, processor):
    (prompt,) = load([{"input": "a<image>b<image>", "images": [RED, BLUE]}])
    expected = processor(text=["a<image>b<image>"], images=[RED, BLUE], return_tensors="pt")
    assert prompt.token_ids == expected["input_ids"][0].tolist()
    assert torch.equal(pixels(prompt), expected["pixel_values"])
    assert [item.n_tokens for item in prompt.media] == [4, 4]
    assert prompt.text == "a<image>b<image>"


FORMS = {
    "PIL": lambda image, folder: image,
    "bytes": lambda image, folder: png(image),
    "base64": lambda image, folder: base64.b64encode(png(image)).decode(),
    "wrapped base64": lambda image, folder: base64.encodebytes(png(image)).decode(),
    "data URL": lambda image, folder: (
        "data:image/png;base64," + base64.b64encode(png(image)).decode()
    ),
    "bytes of datasets": lambda image, folder: {"bytes": png(image), "path": None},
    "path of datasets": lambda image, folder: {"bytes": None, "path": str(folder / "red.png")},
    "path": lambda image, folder: str(folder / "red.png"),
    "path beside the data": lambda image, folder: "red.png",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_the_same_in_every_form(tmp_path, form):
    RED.save(tmp_path / "red.png")
    value = FORMS[form](RED, tmp_path)
    for given in (value, [value]):
        (image,) = (read_image(one, str(tmp_path / "rows.jsonl")) for one in values_of(given))
        assert image.tobytes() == RED.tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_lies_on_white_as_with_transformers(mode):
    drawing = Image.new("RGBA", (9, 7), (0, 0, 0, 0))
    drawing.paste((200, 10, 10, 128), (2, 2, 6, 5))
    given = png(drawing.convert(mode))
    found, expected = (
        np.asarray(read_image(given)),
        np.asarray(convert_to_rgb(Image.open(io.BytesIO(given)))),
    )
    assert (found[0, 0].tolist(), found.shape) == ([255, 255, 255], (7, 9, 3))
    np.testing.assert_allclose(found.astype(int), expected.astype(int), atol=1)


def test_values_of_16_bits_keep_their_order():
    values = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    found = np.asarray(read_image(png(Image.fromarray(values))))[..., 0]
    np.testing.assert_allclose(found, values / 257, atol=1)
    with pytest.raises(ValueError, match="mode F.* have no fixed range: save it with 8 or 16 bits"):
        read_image(Image.new("F", (2, 2)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_upright_whatever_else_is_in_their_exif(orientation):
    picture, exif = Image.frombytes("RGB", (3, 2), bytes(range(18))), Image.Exif()
    exif[0x0112], exif[0x011A] = orientation, 72.0
    file = io.BytesIO()
    picture.save(file, "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(file)).tobytes()
    assert read_image(file.getvalue()).tobytes() == expected
    file = io.BytesIO()
    odd = exif.tobytes().replace(
        b"\x01\x1a\x00\x05", b"\x01\x1a\x00\x01"
    )  # a resolution of another type
    picture.save(file, "PNG", exif=odd)
    with pytest.raises((struct.error, TypeError)) if orientation > 1 else nullcontext():
        ImageOps.exif_transpose(Image.open(file))
    assert read_image(file.getvalue()).tobytes() == expected


def test_arrays_are_images():
    assert read_image(np.asarray(RED)).tobytes() == RED.tobytes()
    with pytest.raises(ValueError, match="is no image that PIL can read"):
        read_image(np.zeros((2, 2, 3)))


def test_images_of_a_saved_data_set_are_read(tmp_path, load):
    rows = {"input": ["<image>a"], "images": [[png(RED)]]}
    data = Dataset.from_dict(rows).cast_column("images", [ImageFeature()])
    data.save_to_disk(tmp_path / "saved")
    found = load_rows(
        str(tmp_path / "saved"), flag="--prompt_data", split="train", max_samples=None
    )
    (prompt,), (other,) = (
        load([row.row for row in found]),
        load([{"input": "<image>a", "images": [RED]}]),
    )
    assert prompt.media[0].key == other.media[0].key


def test_equal_images_are_processed_to_one_item(load):
    first, second, third = load(
        [{"input": "<image>a", "images": [image]} for image in (RED, png(RED), BLUE)]
    )
    assert first.media[0] is second.media[0]
    assert third.media[0].key != first.media[0].key


def test_rows_may_have_no_images(load):
    nulls = {"bytes": None, "path": None}  # as Parquet may have it
    some = load([{"input": "ab", "images": empty} for empty in (None, [], nulls, [nulls])])
    some += load([{"input": "<image>", "images": RED}])
    assert [len(prompt.media) for prompt in some] == [0, 0, 0, 0, 1]
    assert some[0].token_ids == some[1].token_ids


def test_images_without_a_place_come_first(load):
    (prompt,) = load([{"input": "ab", "images": [RED, BLUE]}])
    assert prompt.text == "<image><image>ab"
    (chat,) = load([{"input": "ab", "images": [RED]}], PARTS, apply_chat_template=True)
    assert chat.text == "u:[<image>]ab;a:"


@pytest.mark.parametrize("template", [PARTS, TEXTS])
def test_chats_have_images_in_verl_and_openai_form(load, template):
    verl = [{"role": "user", "content": "<image>a<image>"}, {"role": "assistant", "content": "b"}]
    verl.append({"role": "user", "content": "c<image>"})
    url = {"url": "data:image/png;base64," + base64.b64encode(png(BLUE)).decode()}
    openai = [
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": url},
            ],
        },
        verl[1],
        {
            "role": "user",
            "content": [{"type": "text", "text": "c"}, {"type": "image", "image": RED}],
        },
    ]
    rows = [{"prompt": verl, "images": [RED, BLUE, RED]}, {"prompt": openai, "images": [RED]}]
    one, other = load(rows, template, apply_chat_template=True, input_key="prompt")
    around = "[<image>]" if template == PARTS else "<image>"
    assert one.text == other.text == f"u:{around}a{around};a:b;u:c{around};a:"
    assert (one.token_ids, [i.key for i in one.media]) == (
        other.token_ids,
        [i.key for i in other.media],
    )
    assert one.messages == other.messages
    assert [text_of(message["content"]) for message in one.messages] == [
        message["content"] for message in verl
    ]
    assert [media_key(part) for part in media_parts(one.messages)] == [
        item.key for item in one.media
    ]


def test_a_template_that_writes_parts_alone_gets_parts(load):
    question = [{"role": "user", "content": "a<image>"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": [*question, {"role": "user", "content": "c"}], "images": [RED]}]
    rows.append({"prompt": [{"role": "user", "content": "ab"}], "images": None})
    one, text = load(rows, ONLY_PARTS, apply_chat_template=True, input_key="prompt")
    assert (one.text, text.text) == ("u:<image>a;a:b;u:c;a:", "u:ab;a:")
    assert one.token_ids.count(one.media[0].token_id) == 4


def test_a_response_that_names_an_image_is_refused(tokenizer, processor):
    options = SupervisedConfig(pretrain="-", dataset="-", image_key="images")
    vision = RowVision(
        lambda: processor, tokenizer.convert_tokens_to_ids(["<image>"]), tokenizer, options
    )
    rows = number_rows([{"input": "<image>a", "images": [RED], "output": "b<image>"}])
    with pytest.raises(ValueError, match=r"row 1.*5 tokens stand for 1 images"):
        load_sft_examples(rows, tokenizer, options, SFTDataConfig(), vision=vision)


def test_a_source_without_the_column_has_no_images(load):
    some = load(
        [{"input": "ab"}, {"input": "<image>a", "images": [RED]}, {"input": "a", "images": [None]}]
    )
    assert [len(prompt.media) for prompt in some] == [0, 1, 0]


def test_what_is_held_out_may_have_no_images(load):
    assert [prompt.media for prompt in load([{"input": "ab"}], flag="--eval_data")] == [()]
    with pytest.raises(ValueError, match="--prompt_data.*no column 'images'"):
        load([{"input": "ab"}])


def test_the_response_to_images_is_what_is_trained_on(tokenizer, processor):
    tokenizer.chat_template = PARTS
    vision_ids = tokenizer.convert_tokens_to_ids(["<image>"])
    for chat, text in ((True, "u:[<image>]a;a:bc;"), (False, "[<image>]abc")):
        options = SupervisedConfig(
            pretrain="-", dataset="-", image_key="images", apply_chat_template=chat
        )
        vision = RowVision(lambda: processor, vision_ids, tokenizer, options)
        rows = number_rows([{"input": "<image>a", "images": [RED], "output": "bc"}])
        (example,) = load_sft_examples(rows, tokenizer, options, SFTDataConfig(), vision=vision)
        expected = processor(text=[text], images=[RED], return_tensors="pt")["input_ids"][
            0
        ].tolist()
        assert example.token_ids == [*expected, tokenizer.eos_token_id]
        targets = [
            i
            for i, is_target in zip(example.token_ids, example.loss_mask, strict=True)
            if is_target
        ]
        assert tokenizer.decode(targets) == ("bc;<eos>" if chat else "bc<eos>")
        assert len(example.media) == 1


@pytest.mark.parametrize("template", [PARTS, TEXTS])
def test_all_turns_of_a_conversation_with_images_are_trained(tokenizer, processor, template):
    tokenizer.chat_template, image = template, tokenizer.convert_tokens_to_ids("<image>")
    options = SupervisedConfig(
        pretrain="-", dataset="-", image_key="images", apply_chat_template=True
    )
    vision = RowVision(lambda: processor, [image], tokenizer, options)
    said = [("user", "<image>a"), ("assistant", "bc"), ("user", "<image>"), ("assistant", "d")]
    row = {
        "messages": [{"role": role, "content": text} for role, text in said],
        "images": [RED, BLUE],
    }
    (example,) = load_sft_examples(
        number_rows([row]), tokenizer, options, SFTDataConfig(), vision=vision
    )
    around = "[<image>]" if template == PARTS else "<image>"
    text = f"u:{around}a;a:bc;u:{around};a:d;"
    expected = processor(text=[text], images=[RED, BLUE], return_tensors="pt")["input_ids"][
        0
    ].tolist()
    assert example.token_ids == [*expected, tokenizer.eos_token_id]
    targets = [
        i for i, is_target in zip(example.token_ids, example.loss_mask, strict=True) if is_target
    ]
    assert tokenizer.decode(targets) == "bc;d;<eos>"
    assert [item.key for item in example.media] == [vision.item(image).key for image in (RED, BLUE)]


@pytest.mark.parametrize("chat", [True, False])
def test_both_responses_of_a_pair_follow_the_images(tokenizer, processor, chat):
    tokenizer.chat_template, image = PARTS, tokenizer.convert_tokens_to_ids("<image>")
    options = SupervisedConfig(
        pretrain="-", dataset="-", image_key="images", apply_chat_template=chat
    )
    vision = RowVision(lambda: processor, [image], tokenizer, options)
    rows = [{"prompt": "<image>a", "images": [RED], "chosen": "b", "rejected": "c"}]
    rows.append({"prompt": "a", "images": None, "chosen": "b", "rejected": "c"})
    shown, plain = load_preferences(
        number_rows(rows), tokenizer, options, PreferenceConfig(), vision=vision
    )
    around = "u:[<image>]a;a:{};" if chat else "[<image>]a{}"
    for ids, answer in ((shown.chosen_ids, "b"), (shown.rejected_ids, "c")):
        made = processor(text=[around.format(answer)], images=[RED], return_tensors="pt")[
            "input_ids"
        ][0].tolist()
        assert ids == [*made, tokenizer.eos_token_id]
    assert (len(shown.media), plain.media) == (1, ())
    assert tokenizer.decode(plain.chosen_ids) == ("u:a;a:b;<eos>" if chat else "ab<eos>")


def test_prompts_that_are_too_long_are_counted_with_their_images(load, caplog):
    rows = [{"input": "<image>ab", "images": [RED]}, {"input": "abcde", "images": None}]
    (kept,) = load(rows, prompt_max_len=5)
    assert kept.text == "abcde"
    with pytest.raises(
        ValueError, match=r"row 1.*6 tokens, those of its images.*--prompt_truncation drop"
    ):
        load(rows, prompt_max_len=5, prompt_truncation="left")


def test_pixels_are_bounded_and_the_shape_stays():
    assert within_pixels(RED, None, None).size == (20, 16)
    assert within_pixels(RED, None, 80).size == (10, 8)
    assert within_pixels(RED, 1280, None).size == (40, 32)
    assert within_pixels(BLUE, 100, 300).size == (8, 32)
    rng = random.Random(1)
    for _ in range(200):
        image = Image.new("RGB", (rng.randint(1, 90), rng.randint(1, 90)))
        least, most = 500, 2000
        width, height = within_pixels(image, least, most).size
        assert width * height <= most or (
            width * height < most + width + height and 1 in (width, height)
        )
        assert width * height >= least or image.width * image.height >= least


BROKEN = {
    "too few": (
        {"input": "<image><image>", "images": [RED]},
        r"row 1.*2 places for images, and 1 images",
    ),
    "too many": (
        {"input": "<image>a", "images": [RED, BLUE]},
        r"row 1.*1 places for images, and 2 images",
    ),
    "misspelt": (
        {"input": "<image>a", "images": ["images/001"]},
        r"row 1.*'images/001' is neither a file .* nor base64",
    ),
    "no picture": (
        {"input": "<image>a", "images": [b"abc"]},
        r"row 1.*b'abc' is no image that PIL can read. Correct it",
    ),
    "second": (
        {"input": "<image><image>", "images": [RED, 7]},
        r"row 1.*image 2 of 2 cannot be read: 7 is no image",
    ),
    "broken": (
        {"input": "<image>a", "images": [b"abc"]},
        r"row 1.*image 1 of 1 cannot be read.*remove the row",
    ),
    "missing": (
        {"input": "<image>a", "images": ["gone.png"]},
        r"row 1.*there is no file 'gone.png'",
    ),
    "address": (
        {"input": "<image>a", "images": ["https://a.b/c.png"]},
        r"row 1.*nothing is fetched: download it",
    ),
    "no image": ({"input": "<image>a", "images": [7]}, r"row 1.*7 is no image: give bytes"),
    "none with a struct": (
        {
            "input": [
                {
                    "role": "user",
                    "content": [{"type": "image", "text": None}, {"type": "text", "text": "a"}],
                }
            ]
        },
        r"row 1.*1 places for images, and 0 images",
    ),
    "none": (
        {"input": "<image>a", "images": None},
        r"row 1.*a place for an image, and the row has none",
    ),
    "no column": ({"input": "<image>a"}, r"row 1.*images"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rows_that_cannot_be_used_are_named(load, name):
    row, message = BROKEN[name]
    chat = {"apply_chat_template": True} if isinstance(row["input"], list) else {}
    with pytest.raises(ValueError, match=message):
        load([{"images": None} | row] if chat else [row], PARTS, **chat)


def test_parts_with_the_struct_of_parquet_keep_their_places(load):
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "text": None},
        {"type": "text", "text": "b"},
    ]
    (prompt,) = load(
        [{"prompt": [{"role": "user", "content": parts}], "images": [RED]}],
        PARTS,
        apply_chat_template=True,
    )
    assert prompt.text == "u:a[<image>]b;a:"


@pytest.mark.parametrize("column", ["images", "text alone"])
def test_supervised_rows_that_name_an_image_and_have_none_are_refused(tokenizer, processor, column):
    options = SupervisedConfig(
        pretrain="-", dataset="-", image_key="images" if column == "images" else None
    )
    vision = RowVision(lambda: processor, [9999], tokenizer, options)
    rows = number_rows([{"input": "<image>a", "output": "b", "images": None}])
    with pytest.raises(ValueError, match=r"row 1.*a place for an image, and the row has none"):
        load_sft_examples(rows, tokenizer, options, SFTDataConfig(), vision=vision)


def test_a_model_of_text_refuses_images(tokenizer):
    options = PromptDataConfig(prompt_data="-", image_key="images")
    vision = RowVision(lambda: None, (), tokenizer, options, "--pretrain tiny")
    with pytest.raises(
        ValueError, match=r"row 1.*the row has images, and --pretrain tiny reads none"
    ):
        load_prompts(
            number_rows([{"input": "a", "images": [RED]}]), tokenizer, options, vision=vision
        )


def test_options_of_images_that_contradict_are_refused():
    with pytest.raises(ValueError, match="min_pixels 9 is above --max_pixels 4"):
        RowsConfig(min_pixels=9, max_pixels=4).validate()
    with pytest.raises(ValueError, match="--dataset_num_proc keeps texts"):
        RowsConfig(image_key="images", dataset_num_proc=2).validate()
