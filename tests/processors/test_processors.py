"""Prompts of rows are what the processors of six families make of them, and what plain transformers then computes."""

import base64
import io
import struct

import av
import numpy as np
import pytest
import torch
from PIL import Image

from openppo.datasets.media_files import read_frames
from openppo.models import Actor
from openppo.models.attention import use_fast_attention
from openppo.models.media_inputs import media_inputs
from openppo.models.prefixes import share_where_exact
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.weights import WholeWeights
from openppo.types import ModelInputs, SamplingParams
from tests.images import (
    FAMILIES,
    IMAGE,
    PLACES,
    SAMPLED,
    VIDEO,
    connected,
    load,
    pictures,
    processor_of,
)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def processor(family):
    return processor_of(family)


def test_prompts_are_those_of_the_processor(family, processor):
    one, three = pictures(1), pictures(3)
    rows = [{"input": "ab", "images": []}, {"input": "<image>a", "images": one}]
    rows.append({"input": "a<image>b<image><image>", "images": three})
    place = PLACES.get(family, processor.image_token)
    for row, prompt in zip(rows, load(processor, rows), strict=True):
        given = {"images": row["images"]} if row["images"] else {}
        expected = processor(
            text=[row["input"].replace("<image>", place)], return_tensors="pt", **given
        )
        assert prompt.token_ids == expected["input_ids"][0].tolist()
        assert len(prompt.media) == len(row["images"])
        if row["images"]:
            pixels = torch.cat([item.inputs["pixel_values"] for item in prompt.media])
            assert torch.equal(pixels, expected["pixel_values"].reshape(pixels.shape))


def test_engine_actor_and_transformers_agree_on_what_processors_make(family, processor):
    torch.manual_seed(3)
    model = connected(FAMILIES[family]()).eval()
    rows = [{"input": "<image>a", "images": pictures(1)}, {"input": "ab", "images": None}]
    rows.append({"input": "a<image>b<image><image>", "images": pictures(3)})
    prompts = load(processor, rows)
    engine = HFEngine(model, [], 0, 3, sampled_ids=SAMPLED)
    with engine.with_weights(WholeWeights(model)):
        sampled = engine.generate(prompts, SamplingParams(5), [1, 2, 3])
    for row, prompt, completion in zip(rows, prompts, sampled, strict=True):
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        ours = Actor(model)(
            ModelInputs(ids, torch.ones_like(ids, dtype=torch.bool), media=(prompt.media,))
        )[0, 1:]
        place = PLACES.get(family, processor.image_token)
        given = {"images": row["images"]} if row["images"] else {}
        made = processor(
            text=[row["input"].replace("<image>", place)], return_tensors="pt", **given
        )
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in made:
                made[name] = torch.nn.functional.pad(made[name], (0, 5))
        made |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            logits = model(**made).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        logits[:, [IMAGE, VIDEO]] = -torch.inf
        own = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[-5:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), own, atol=1e-4, rtol=1e-4)


FRAMES = [Image.new("RGB", (32, 16), (30 * i, 255 - 30 * i, 60)) for i in range(8)]


def mp4(frames=FRAMES, rate=4, form="mp4"):
    """A film of eight frames, four a second."""
    file = io.BytesIO()
    with av.open(file, "w", form) as film:
        stream = film.add_stream("mpeg4", rate)
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            film.mux(stream.encode(av.VideoFrame.from_image(frame)))
        film.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    ("fps", "most", "chosen", "rate"),
    [(4.0, 32, range(8), 4.0), (2.0, 32, (0, 2, 4, 6), 2.0), (4.0, 2, (0, 4), 1.0)],
)
def test_frames_are_evenly_spaced_and_at_most_so_many(tmp_path, fps, most, chosen, rate):
    (tmp_path / "film.mp4").write_bytes(mp4())
    forms = [
        mp4(),
        str(tmp_path / "film.mp4"),
        f"file://{tmp_path}/film.mp4",
        "film.mp4",
        {"video": mp4()},
    ]
    forms.append("data:video/mp4;base64," + base64.b64encode(mp4()).decode())
    for form in forms:
        frames, found = read_frames(form, fps, most, str(tmp_path / "rows.jsonl"))
        assert found == pytest.approx(rate)
        for frame, i in zip(frames, chosen, strict=True):
            np.testing.assert_allclose(
                np.asarray(frame).mean((0, 1)), FRAMES[i].getpixel((0, 0)), atol=8
            )


def test_a_film_may_begin_at_any_time():
    frames, rate = read_frames(mp4(form="mpegts"), 2.0, 32)  # at 1.4 seconds
    assert rate == pytest.approx(2.0)
    for frame, i in zip(frames, (0, 2, 4, 6), strict=True):
        np.testing.assert_allclose(
            np.asarray(frame).mean((0, 1)), FRAMES[i].getpixel((0, 0)), atol=8
        )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_a_film_of_one_frame_is_read(family, processor):
    assert len(read_frames(mp4(FRAMES[:1]), 2.0, 32)[0]) == 1
    (prompt,) = load(processor, [{"input": "<video>", "images": None, "videos": [FRAMES[:1]]}])
    assert prompt.media[0].inputs["video_grid_thw"].tolist() == [[1, 4, 8]]


def test_films_are_turned_as_they_say():
    film = bytearray(mp4([Image.new("RGB", (32, 16), "black")] * 2))
    matrix = film.find(b"tkhd") + 44
    film[matrix : matrix + 36] = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    assert [frame.size for frame in read_frames(bytes(film), 2.0, 32)[0]] == [(16, 32)]


def test_a_list_of_frames_is_thinned_to_as_many():
    assert read_frames(FRAMES, 4.0, 32) == read_frames({"video": FRAMES}, 4.0, 32) == (FRAMES, 4.0)
    frames, rate = read_frames(FRAMES, 4.0, 4)
    assert ([FRAMES.index(frame) for frame in frames], rate) == ([0, 2, 4, 6], 2.0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"], indirect=True)
def test_videos_and_images_are_read_as_transformers_reads_them(family, processor):
    torch.manual_seed(3)
    model, picture = connected(FAMILIES[family]()).eval(), pictures(1)
    rows = [{"input": "a<video>b<image>c", "images": picture, "videos": [FRAMES[:4]]}]
    rows.append({"input": "<video>a", "images": [], "videos": mp4()})
    prompts = load(processor, rows, video_fps=2.0)
    assert [[item.kind for item in prompt.media] for prompt in prompts] == [
        ["video", "image"],
        ["video"],
    ]
    prompt, text = (
        prompts[0],
        f"a{PLACES.get(family, '')}b{PLACES.get(family)}c".replace("image", "video", 1),
    )
    about = {"fps": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3], "duration": 2.0}
    given = {"videos": [FRAMES[:4]], "video_metadata": [about], "do_sample_frames": False}
    if family != "smolvlm":
        made = processor(text=[text], images=picture, return_tensors="pt", **given)
        assert prompt.token_ids == made["input_ids"][0].tolist()
        with torch.no_grad():
            logits = model(**made).logits[0, :-1].float()
        ids = torch.tensor([prompt.token_ids])
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        ours = Actor(model)(
            ModelInputs(ids, torch.ones_like(ids, dtype=torch.bool), media=(prompt.media,))
        )[0, 1:]
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
        use_fast_attention(model)
        actor, rows = (
            Actor(model),
            torch.tensor([[*[5, 6, 7] * 6, *prompt.token_ids, 8, k] for k in range(9, 13)]),
        )
        inputs = ModelInputs(rows, torch.ones_like(rows, dtype=torch.bool), (prompt.media,) * 4)
        separate = actor(inputs)
        share_where_exact(actor, actor, torch.device("cpu"), "actor")
        assert actor.shares_prompts
        torch.testing.assert_close(actor(inputs), separate, atol=1e-4, rtol=1e-4)
    engine = HFEngine(model, [], 0, 3, sampled_ids=SAMPLED)
    with engine.with_weights(WholeWeights(model)):
        sampled = engine.generate(prompts, SamplingParams(5), [1, 2])
    for prompt, completion in zip(prompts, sampled, strict=True):
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        with torch.no_grad():
            logits = (
                model(
                    input_ids=ids,
                    **media_inputs(model, ModelInputs(ids, ids > -1, (prompt.media,))),
                )
                .logits[0, :-1]
                .float()
            )
        logits[:, [IMAGE, VIDEO]] = -torch.inf
        found = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[-5:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input": "<video>", "videos": [b"abc"]},
            r"video 1 of 1 cannot be read: no video that PyAV can decode",
        ),
        ({"input": "<video>", "videos": ["gone.mp4"]}, r"there is no file 'gone.mp4'"),
        ({"input": "<video><video>", "videos": [FRAMES]}, r"2 places for videos, and 1 videos"),
        (
            {"input": "<video>", "videos": [[FRAMES[0], FRAMES[0].resize((8, 8))]]},
            r"video 1 of 1 cannot be read: its frames have sizes \(32, 16\) and others: give frames of one size",
        ),
        ({"input": "<video>", "videos": [7]}, r"7 is no video: give a path"),
    ],
)
def test_videos_that_cannot_be_used_name_their_row(family, processor, row, message):
    with pytest.raises(ValueError, match=rf"row 1.*{message}"):
        load(processor, [row | {"images": None}])


@pytest.mark.parametrize("family", ["llava"], indirect=True)
def test_a_model_without_videos_refuses_them(family, processor):
    with pytest.raises(ValueError, match=r"row 1.*the row has videos, and this command reads none"):
        load(processor, [{"input": "<video>", "videos": [FRAMES], "images": None}])
