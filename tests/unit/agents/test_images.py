"""Images of agents: the model reads each where it was shown, once processed, whoever sends it."""

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image
from transformers import CLIPImageProcessorPil, LlavaProcessor

from openppo.agents import AgentPlayer
from openppo.agents.gateway.server import Gateway
from openppo.agents.session import Session
from openppo.agents.tool_agent import ToolAgent
from openppo.agents.tools import ToolResponse
from openppo.config import RowsConfig
from openppo.config.agents import AgentConfig
from openppo.datasets.message_parts import media_key, media_part, media_parts
from openppo.datasets.vision import Vision
from openppo.experience.replay_buffer import collate
from openppo.media import TokenIds, Tokens, distinct_ids
from openppo.models.media_inputs import media_inputs
from openppo.models.sampled_ids import SampledIds
from openppo.rollout.driver import EngineDriver
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.players import PlayerParts
from openppo.strategy.weights import WholeWeights
from openppo.tracking import Metrics
from openppo.types import Ending, EpisodeInput, Prompt, SamplingParams, SingleProcess
from tests.images import llava
from tests.playing import Plays
from tests.unit.agents.conftest import CHATML, ScriptedEngine, make_chat_tokenizer
from tests.unit.agents.test_gateway import Client
from tests.unit.agents.test_tool_agent import Paying, Plain, calls, then

RED, BLUE = (Image.new("RGB", (16, 16), color) for color in ((200, 10, 10), (10, 10, 200)))
PARTS = CHATML.replace(
    "{{ (message.content or '').split('</think>')[-1].lstrip('\\n') }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for c in message.content or [] %}"
    "{% if c.type == 'image' %}[<image>]{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}",
)
"""Parts of users alone: those of tools are written as Python writes a list."""


ONLY_PARTS = PARTS.replace(
    "{% if message.content is string %}{{ message.content }}{% else %}", "{% if true %}"
)
"""As SmolVLM's: of a content that is a text, nothing is written."""


def url_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def shows(image: Any, text: str = "see") -> list[dict[str, Any]]:
    return [
        {
            "role": "user",
            "content": [{"type": "text", "text": text}, {"type": "image", "image": image}],
        }
    ]


def sends(url: str, text: str = "see") -> list[dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": text}, part]}]


class SeeingEngine(ScriptedEngine):
    """Remembers the images of each request."""

    def submit(self, prompt: Tokens, *arguments: Any, **options: Any) -> int:
        self.seen = [*getattr(self, "seen", ()), prompt.media]
        return super().submit(prompt, *arguments, **options)


@pytest.fixture(params=["parts", "texts"])
def vision(request: Any) -> Vision:
    tokenizer = make_chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = {"parts": PARTS, "texts": CHATML, "only parts": ONLY_PARTS}[
        request.param
    ]
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    more = {"image_token": "<image>", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(CLIPImageProcessorPil(**sizes), tokenizer, 8, "default", **more)
    return Vision(
        lambda: processor, tokenizer.convert_tokens_to_ids(["<image>"]), tokenizer, RowsConfig()
    )


def sampler_of(
    vision: Vision | None, agent: Any, engine: Any, tokenizer: Any, **options: Any
) -> Plays:
    source = AgentPlayer(
        agent, AgentConfig(**{"tool_parser": "hermes", "check_rendering": "strict", **options})
    )
    source.check(tokenizer)
    driver = EngineDriver(engine)
    parts = PlayerParts(
        driver,
        tokenizer,
        [tokenizer.eos_token_id],
        SingleProcess(),
        4000,
        has_rewards=False,
        vision=vision,
    )
    return Plays(source.make(parts), driver)


def played(
    vision: Vision,
    agent: Any,
    script: Any = lambda _: "ok",
    prompt: Prompt | None = None,
    reads: bool = True,
    **options: Any,
) -> Any:
    """The sample of one episode, and the engine."""
    engine = SeeingEngine(vision.tokenizer, script)
    sampler = sampler_of(vision if reads else None, agent, engine, vision.tokenizer, **options)
    prompt = prompt or Prompt("task", [5, 6], messages=[{"role": "user", "content": "task"}])
    (sample,) = sampler.sample([prompt], SamplingParams(400), 1, 1, 0, Metrics(), evaluation=True)
    sampler.close()
    return sample, engine


def test_each_turn_reads_all_images_so_far(vision):
    async def solve(task: EpisodeInput, session: Session) -> float:
        first = await session.chat(shows(RED))
        second = await session.chat([*first.messages, *shows(np.asarray(BLUE), "and this")])
        assert second.parent is first, "its tokens continue those that were recorded"
        return 1.0

    sample, engine = played(vision, solve)
    assert sample.episode.ending is Ending.COMPLETED, sample.episode.error
    (segment,) = sample.segments
    red, blue = (vision.item(image) for image in (RED, BLUE))
    assert [[item.key for item in seen] for seen in engine.seen] == [[red.key], [red.key, blue.key]]
    assert [item.key for item in segment.media] == [red.key, blue.key]
    assert segment.token_ids.count(red.token_id) == 8
    around = "[<image>]" if "[<image>]" in vision.tokenizer.chat_template else "<image>"
    whole = f"<|im_start|>user\nsee{around}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    whole += f"<|im_start|>user\nand this{around}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
    assert segment.token_ids == vision.encode(whole, [red, blue])


@pytest.mark.parametrize("history", ["verbatim", "template"])
def test_only_a_conversation_with_the_same_image_is_continued(vision, history):
    parents = []

    async def solve(task: EpisodeInput, session: Session) -> float:
        first = await session.chat(sends(url_of(RED)))
        for image in (RED, BLUE):
            again = [*sends(url_of(image)), first.message, {"role": "user", "content": "more"}]
            parents.append((await session.chat(again)).parent)
        return 1.0

    sample, _ = played(vision, solve, history=history)
    assert sample.episode.ending is Ending.COMPLETED, sample.episode.error
    assert [parent is not None for parent in parents] == [True, False]
    assert len(sample.segments) == 2


def test_an_image_is_processed_once_in_an_episode(vision, monkeypatch):
    process = Vision.item
    processed = []

    def item(self, value, *options):
        processed.append(value)
        return process(self, value, *options)

    monkeypatch.setattr(Vision, "item", item)

    async def solve(task: EpisodeInput, session: Session) -> float:
        turn = await session.chat(sends(url_of(RED)))
        for _ in range(3):
            turn = await session.chat(
                [*sends(url_of(RED)), *turn.messages[1:], {"role": "user", "content": "more"}]
            )
        return 1.0

    sample, engine = played(vision, solve)
    (segment,) = sample.segments
    assert len(engine.seen) == 4 and len(segment.spans) == 4 and len(processed) == 1


def test_images_of_the_row_are_handed_on(vision):
    item = vision.item(RED)
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "row "}, media_part("image", item.key)],
        }
    ]
    prompt = Prompt("row <image>", [5], messages=messages, media=(item,))

    async def solve(task: EpisodeInput, session: Session) -> float:
        await session.chat(task.messages)
        return 1.0

    sample, engine = played(vision, solve, prompt=prompt)
    assert len(sample.segments) == 1
    assert engine.seen == [(item,)]
    assert sample.episode.messages[0] == messages[0]


def test_a_tool_may_return_images(vision):
    tool = Plain("look", (ToolResponse(text="here", image=[RED, np.asarray(BLUE)]), 0.5))
    agent = ToolAgent([tool], AgentConfig(tools="tools.py"))
    sample, engine = played(vision, agent, then(calls(("look", {})), "red and blue"))
    (segment,) = sample.segments
    assert sample.episode.ending is Ending.COMPLETED, sample.episode.error
    assert [len(seen) for seen in engine.seen] == [0, 2]
    (result,) = (message for message in sample.episode.messages if message["role"] == "tool")
    assert [part["type"] for part in result["content"]] == ["image_url", "image_url", "text"]
    assert segment.token_ids.count(vision.token_ids[0]) == 8


def test_what_is_sampled_after_images_is_what_training_computes(vision):
    torch.manual_seed(3)
    model = llava().eval()
    model.config.image_token_id = model.config.image_token_index = vision.token_ids[0]
    model.resize_token_embeddings(len(vision.tokenizer))
    ids = SampledIds(tuple(range(i, i + 1) for i in vision.token_ids))
    engine = HFEngine(model, [vision.tokenizer.eos_token_id], 0, 2, sampled_ids=ids)

    async def solve(task: EpisodeInput, session: Session) -> float:
        turn = await session.chat(shows(RED))
        await session.chat([*turn.messages, *shows(BLUE)])
        return 1.0

    sampler = sampler_of(vision, solve, engine, vision.tokenizer, check_rendering="off")
    prompt = Prompt("task", [5, 6], messages=[{"role": "user", "content": "task"}])
    with engine.with_weights(WholeWeights(model)):
        samples = sampler.sample([prompt], SamplingParams(6), 3, 1, 0, Metrics(), evaluation=True)
    sampler.close()
    rows = collate(samples, 0)
    shown = rows.inputs.media
    assert [len(of_row) for of_row in shown] == [2, 2, 2]
    for media, agrees in ((shown, True), ([of_row[::-1] for of_row in shown], False)):
        with torch.no_grad():
            logits = model(
                input_ids=rows.sequences, **media_inputs(model, rows.inputs.with_media(media))
            ).logits[:, :-1]
        logits[..., vision.token_ids] = -torch.inf  # they are not sampled
        computed = logits.log_softmax(-1).gather(-1, rows.sequences[:, 1:, None])[..., 0]
        mask = rows.action_mask[:, 1:]
        assert (
            torch.allclose(computed[mask], rows.rollout_log_probs[:, 1:][mask], atol=1e-4) == agrees
        )


@pytest.mark.parametrize("broken", ["gone.png", b"abc"])
def test_the_model_reads_that_a_tools_image_is_broken(vision, broken):
    tool = Paying("look", ToolResponse(text="here", image=[broken]))
    sample, _ = played(
        vision, ToolAgent([tool], AgentConfig(tools="t.py")), then(calls(("look", {})), "end")
    )
    assert len(sample.segments) == 1
    assert sample.episode.ending is Ending.COMPLETED, sample.episode.error
    (result,) = (
        message["content"] for message in sample.episode.messages if message["role"] == "tool"
    )
    assert result.startswith("Error: look: the image") and "cannot be read" in result


def test_texts_that_name_the_token_are_texts(vision):
    async def solve(task: EpisodeInput, session: Session) -> float:
        turn = await session.chat(shows(RED, "an <image> tag"))
        await session.chat([*turn.messages, {"role": "user", "content": "<image>?"}])
        return 1.0

    sample, engine = played(vision, solve, check_rendering="off")
    assert sample.episode.ending is Ending.COMPLETED, sample.episode.error
    assert [len(seen) for seen in engine.seen] == [1, 1]
    assert len(sample.segments) == 1, "the second turn reads only what is new"
    text = vision.tokenizer.decode(sample.last.token_ids)
    assert "an < image> tag" in text and "< image>?" in text


def test_what_the_processor_writes_is_guarded_too(vision):
    vision.tokens = {"image": "<start>"}  # as Gemma 3's, which is replaced by others
    assert vision.guarded("<start> <image> <end>") == "< start> < image> <end>"


def test_palettes_are_part_of_an_image(vision):
    seen = [image.quantize(4) for image in (RED, BLUE)]
    assert seen[0].tobytes() == seen[1].tobytes()

    async def solve(task: EpisodeInput, session: Session) -> float:
        turn = await session.chat(shows(seen[0]))
        await session.chat([*turn.messages, *shows(seen[1])])
        return 1.0

    sample, _ = played(vision, solve)
    (segment,) = sample.segments
    assert len({item.key for item in segment.media}) == 2


@pytest.mark.parametrize("vision", ["only parts"], indirect=True)
def test_a_template_of_parts_alone_writes_every_message(vision):
    async def solve(task: EpisodeInput, session: Session) -> float:
        turn = await session.chat([{"role": "system", "content": "be kind"}, *shows(RED)])
        await session.chat([*turn.messages, {"role": "user", "content": "and now"}])
        return 1.0

    sample, _ = played(vision, solve)
    (segment,) = sample.segments
    text = vision.tokenizer.decode(segment.token_ids)
    assert all(said in text for said in ("be kind", "see", "ok", "and now"))


def test_rows_with_images_need_a_chat(vision):
    prompt = Prompt("<image>", [104] * 4, media=(vision.item(RED),))

    async def solve(task: EpisodeInput, session: Session) -> float:
        return 1.0

    with pytest.raises(
        ValueError,
        match="--image_key: agents get images in chat messages: add --apply_chat_template",
    ):
        AgentPlayer(solve, AgentConfig()).check_prompts([prompt])


def test_a_program_sends_images_as_data_urls(vision):
    seen = {}

    async def solve(task: EpisodeInput, session: Session) -> float:
        gateway = Gateway()
        await gateway.start()
        key = gateway.open(session)
        client = Client.__new__(Client)
        import aiohttp

        async with aiohttp.ClientSession() as http:
            client.gateway, client.http, client.session, client.key = gateway, http, session, key
            seen["chat"] = await client.chat(sends(url_of(RED)))
            part = [
                {"type": "input_text", "text": "see"},
                {"type": "input_image", "image_url": url_of(BLUE)},
            ]
            seen["responses"] = await client.post(
                "responses", {"input": [{"role": "user", "content": part}]}
            )
            for url in (
                "x.png",
                "file:///etc/passwd",
                "https://a.b/c.png",
                "data:image/png;base64,AAAA",
            ):
                seen[url] = await client.chat(sends(url))
        await gateway.stop()
        return 1.0

    sample, engine = played(vision, solve)
    assert sample.episode.ending is Ending.COMPLETED, sample.episode.error
    assert (
        seen["chat"]["choices"][0]["message"]["content"] == "ok"
        and seen["responses"]["status"] == "completed"
    )
    assert [[item.key for item in of] for of in engine.seen] == [
        [vision.item(i).key] for i in (RED, BLUE)
    ]
    for url, said in (
        ("x.png", "no image: send a data URL"),
        ("file:///etc/passwd", "no image: send a data URL"),
        ("https://a.b/c.png", "is not fetched: send a data URL, or add --allow_image_urls"),
        ("data:image/png;base64,AAAA", "cannot be read"),
    ):
        status, message = seen[url]
        assert status == 400 and said in message


def test_addresses_are_fetched_where_that_is_allowed(vision, monkeypatch):
    monkeypatch.setattr("openppo.agents.fetching.is_public", lambda address: address == "127.0.0.1")
    content = base64.b64decode(url_of(RED).partition(",")[2])

    async def serve(request: web.Request) -> web.Response:
        return (
            web.Response(body=content) if request.path == "/red.png" else web.Response(status=404)
        )

    async def solve(task: EpisodeInput, session: Session) -> float:
        app = web.Application()
        app.add_routes([web.get("/{name}", serve)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        await session.chat(sends(f"{address}/red.png"))
        with pytest.raises(ValueError, match="gone.png' cannot be read: ClientResponseError 404"):
            await session.chat(sends(f"{address}/gone.png"))
        await runner.cleanup()
        return 1.0

    sample, engine = played(vision, solve, allow_image_urls=True)
    assert len(sample.segments) == 1
    assert sample.episode.ending is Ending.COMPLETED, sample.episode.error
    assert [[item.key for item in of] for of in engine.seen] == [[vision.item(RED).key]]


def test_an_address_of_the_machine_is_refused_by_name_and_flag(vision):
    async def solve(task: EpisodeInput, session: Session) -> float:
        with pytest.raises(ValueError) as error:
            await session.chat(sends("http://127.0.0.1:9/red.png"))
        seen.append(str(error.value))
        return 1.0

    seen: list[str] = []
    played(vision, solve, allow_image_urls=True)
    assert seen == [
        "the image 'http://127.0.0.1:9/red.png' cannot be read: --allow_image_urls fetches from public addresses only, "
        "and 127.0.0.1 is at 127.0.0.1: send a data URL."
    ]


def test_an_image_of_too_many_pixels_is_not_decoded(vision, monkeypatch):
    """A file of a few kilobytes may stand for gigabytes of pixels."""

    async def solve(task: EpisodeInput, session: Session) -> float:
        with pytest.raises(ValueError) as error:
            await session.chat(sends(url_of(Image.new("1", (8200, 8200)))))
        seen.append(str(error.value))
        return 1.0

    seen: list[str] = []
    monkeypatch.setattr(
        "openppo.datasets.vision.read_image", lambda *_: pytest.fail("it was decoded")
    )
    played(vision, solve)
    assert seen[0].startswith("the image 'data:image/png;base64,")
    assert seen[0].endswith(
        "it has 8200 x 8200 pixels, and messages may have images of 67108864: send a smaller one."
    )


def test_a_model_of_text_gets_no_images(vision):
    async def solve(task: EpisodeInput, session: Session) -> float:
        await session.chat(shows(RED))
        return 1.0

    sampler = sampler_of(
        None, solve, SeeingEngine(vision.tokenizer, lambda _: "ok"), vision.tokenizer
    )
    prompt = Prompt("task", [5, 6], messages=[{"role": "user", "content": "task"}])
    (sample,) = sampler.sample([prompt], SamplingParams(9), 1, 1, 0, Metrics(), evaluation=True)
    sampler.close()
    assert len(sample.segments) == 1
    assert "--pretrain reads none here" in sample.episode.error


def test_a_model_of_text_reads_the_text_beside_a_tools_image(vision, caplog):
    agent = ToolAgent(
        [Plain("look", ToolResponse(text="here", image=[RED]))], AgentConfig(tools="tools.py")
    )
    sample, _ = played(vision, agent, then(calls(("look", {}), ("look", {})), "end"), reads=False)
    assert len(sample.segments) == 1
    said = [message["content"] for message in sample.episode.messages if message["role"] == "tool"]
    assert said == ["here", "here"]
    assert (
        caplog.text.count(
            "the tool look returns images, and --pretrain reads none: they are left out"
        )
        == 1
    )


def test_a_key_stands_for_an_item_in_any_clients_form():
    part = media_part("image", 17)
    assert (media_key(part), list(media_parts([{"content": [part]}]))) == (17, [part])
    assert media_key({"type": "image_url", "image_url": {"url": "https://a.b"}}) is None
    assert media_key({"type": "image", "image": RED}) is None
    assert distinct_ids(TokenIds([1, 2])) == [1, 2]
