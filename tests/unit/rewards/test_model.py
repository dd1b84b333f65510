"""Reward models in process: what they read, where they are read, and how scores are normalized."""

import math
import string

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from openppo.config import RowsConfig
from openppo.datasets.prompts import render_prompt
from openppo.datasets.templates import encode_start
from openppo.datasets.turns import render_response
from openppo.media import MediaItem
from openppo.models.batching import MicroBatchSize
from openppo.models.scalar_head import ScalarHeadModel
from openppo.rewards import ModelScorer
from openppo.rewards.model import RewardModelText, policy_tokens
from openppo.rewards.scoring import span_texts, step_tokens
from openppo.rollout.kept import without_old
from openppo.types import FinishReason, Prompt, SingleProcess
from tests.samples import with_last
from tests.unit.rewards.conftest import score_by_transformers


@pytest.fixture(scope="module")
def classifier():
    """Random and far from uniform."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=40, initializer_range=0.5, num_labels=1, pad_token_id=None, **sizes
    )
    return LlamaForSequenceClassification(config).eval()


class CountingModel:
    """Scores a row by its real length and last real token; remembers the shapes of its batches."""

    def __init__(self):
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, inputs):
        self.shapes.append(tuple(inputs.sequences.shape))
        lengths = inputs.attention_mask.sum(-1)
        return lengths * 100.0 + inputs.sequences.gather(1, lengths[:, None] - 1)[:, 0]


def model_scorer(model, size=2, pad=0, **options):
    """A scorer on the CPU."""
    return ModelScorer(
        model, MicroBatchSize(size), pad, SingleProcess(), torch.device("cpu"), **options
    )


def scores_of(scorer, samples):
    """The rewards, which all have the scorer's name."""
    return [score.rewards[scorer.name] for score in scorer.score(samples)]


@pytest.fixture(scope="module")
def samples(make_sample):
    """Of unequal lengths, some equal."""
    return [make_sample([4], list(range(5, 5 + n))) for n in (3, 1, 6, 2, 6)]


# The policy's own token ids


@pytest.mark.parametrize(("size", "shapes"), [(2, [(2, 7), (2, 4), (1, 2)]), (8, [(2, 7), (3, 4)])])
def test_neighbours_in_length_share_a_forward_and_scores_keep_their_order(size, shapes, samples):
    model = CountingModel()
    assert scores_of(model_scorer(model, size, name="reward_model"), samples) == [
        407.0,
        205.0,
        710.0,
        306.0,
        710.0,
    ]
    assert model.shapes == shapes
    with pytest.raises(ValueError, match="the reward model returned nan for prompt 'ask'"):
        model_scorer(lambda inputs: torch.full((len(inputs),), math.nan), size).score(samples)


@pytest.mark.parametrize("pad", [0, 1, 9])
def test_a_reward_model_is_read_at_the_last_real_token_whatever_fills_the_padding(
    pad, samples, classifier
):
    scores = scores_of(model_scorer(ScalarHeadModel(classifier, "reward"), 3, pad=pad), samples)
    np.testing.assert_allclose(
        scores,
        [score_by_transformers(classifier, sample.last.token_ids) for sample in samples],
        atol=1e-5,
    )


def test_a_reward_model_sees_each_samples_own_images_or_refuses_them(samples):
    def keys(inputs):
        of_rows = inputs.media or [()] * len(inputs)
        return torch.tensor([float(sum(item.key for item in of_row)) for of_row in of_rows])

    shown = [MediaItem({}, 3, 1, key) for key in range(1, 6)]
    media = [(shown[0],), (), (shown[1], shown[2]), (shown[3],), (shown[4],)]
    seen = [with_last(sample, media=of) for sample, of in zip(samples, media, strict=True)]
    assert scores_of(model_scorer(keys, sees=True), seen) == [1.0, 0.0, 5.0, 4.0, 5.0]
    with pytest.raises(
        ValueError, match="the reward model reads no images, and .* has some: use a --reward_fn"
    ):
        model_scorer(keys).score(seen)


# A tokenizer and a chat template of its own

OWN_IDS = {
    token: i
    for i, token in enumerate(
        ["<s>", "</s>", "<u>", "<bot>", " ", *reversed(string.ascii_lowercase)]
    )
}
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<u>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<bot>' + m['content'] + '</s>' + ' ' }}"
    "{% else %}{{ raise_exception('no ' + m['role']) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)


@pytest.fixture
def own():
    """The reward model's: one token per character, letters backwards, BOS in front; a template that closes turns."""
    core = Tokenizer(WordLevel(OWN_IDS, unk_token=" "))
    core.add_special_tokens(["<s>", "</s>", "<u>", "<bot>"])
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids_of(*tokens):
    """Ids of the reward model's tokens."""
    return [OWN_IDS[token] for token in tokens]


CHAT = [{"role": "user", "content": "ab"}]
START = ["<s>", "<u>", "a", "b", "<bot>"]
TURNS = [*CHAT, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]


@pytest.mark.parametrize(
    ("messages", "response_ids", "tokens"),  # a response ends with 1 unless it is cut off
    [
        (None, [6, 7, 1], ["<s>", "a", "b", "c", "d", "</s>"]),
        (None, [6, 7], ["<s>", "a", "b", "c", "d"]),
        (None, [1], ["<s>", "a", "b", "</s>"]),
        (CHAT, [6, 7, 1], [*START, "c", "d", "</s>"]),
        (CHAT, [6, 7], [*START, "c", "d"]),
        (CHAT, [1], [*START, "</s>"]),
        (TURNS, [6, 1], [*START, "c", "</s>", " ", "<u>", "d", "<bot>", "c", "</s>"]),
    ],
)
def test_text_is_written_again_for_a_reward_model_with_its_own_tokenizer_and_read_at_its_last_token(
    messages, response_ids, tokens, own, make_tokenizer, make_sample, classifier
):
    truncated = response_ids[-1] != 1
    sample = make_sample([4, 5], response_ids, text="ab", messages=messages, truncated=truncated)
    encode = RewardModelText(make_tokenizer(), own, "--reward_pretrain m")
    assert encode(sample) == ids_of(*tokens)
    longer = make_sample([4, 5], [6] * 9 + [1], text="ab")  # so that the other is padded
    scores = scores_of(
        model_scorer(ScalarHeadModel(classifier, "reward"), encode=encode), [sample, longer]
    )
    assert scores[0] == pytest.approx(score_by_transformers(classifier, ids_of(*tokens)), abs=1e-5)


def test_templates_may_rewrite_what_was_cut_off_and_need_not_write_eos(
    own, make_tokenizer, make_sample
):
    encode = RewardModelText(make_tokenizer(), own, "--reward_pretrain m")
    own.chat_template = TEMPLATE.replace(
        "'<bot>' + m['content']", "'<bot>' + m['content'].replace('c', 'x')"
    )
    assert encode(make_sample([4, 5], [7, 6, 7], messages=CHAT, truncated=True)) == ids_of(
        *START, "d", "x", "d"
    )
    own.chat_template = TEMPLATE.replace("</s>", "<u>")
    assert encode(make_sample([4, 5], [6, 1], messages=CHAT)) == ids_of(
        *START, "c", "<u>", " ", "</s>"
    )
    assert encode(make_sample([4, 5], [6, 7], messages=CHAT, truncated=True)) == ids_of(
        *START, "c", "d"
    )


def chat_prompt(*roles):
    """A chat of one letter per turn."""
    return Prompt("a", [4], messages=[{"role": role, "content": "a"} for role in roles])


@pytest.mark.parametrize(
    ("roles", "template", "message"),
    [
        (["user"], None, "the tokenizer has no chat template"),
        (
            ["user"],
            "{% for i in range(10 ** 9) %}a{% endfor %}",
            "user, assistant, user, assistant: Range too big",
        ),
        (["system", "user"], TEMPLATE, "with the roles system, user, assistant: .*no system"),
        (["user"], "{{ messages[0]['content'] }}", "it leaves the assistant's turn out"),
    ],
)
def test_chats_that_cannot_be_rendered_are_an_error_before_the_run(
    roles, template, message, own, make_tokenizer
):
    text = RewardModelText(make_tokenizer(), own, "--reward_pretrain m")
    text.check([chat_prompt("user"), Prompt("a", [4])])
    own.chat_template = template
    text.check([Prompt("a", [4])])
    with pytest.raises(ValueError, match=f"^--reward_pretrain m: .*{message}"):
        text.check([chat_prompt("user", "assistant", "user"), chat_prompt(*roles)])


SKIPS = TEMPLATE.replace("{{ raise_exception('no ' + m['role']) }}", "")


def test_a_reward_model_that_skips_a_message_is_an_error_before_the_run(own, make_tokenizer):
    own.chat_template = SKIPS
    text = RewardModelText(make_tokenizer(), own, "--reward_pretrain m")
    text.check([chat_prompt("user")])
    with pytest.raises(
        ValueError,
        match=r"^--reward_pretrain m: the chat template leaves out turn 1, .*'system': 'a'",
    ):
        text.check([chat_prompt("system", "user")])


def test_a_reward_model_that_skips_tools_says_so(own, make_tokenizer, caplog):
    own.chat_template = SKIPS
    text = RewardModelText(make_tokenizer(), own, "--reward_pretrain m")
    text.check([chat_prompt("user")])
    assert not caplog.messages
    text.check([chat_prompt("user")], episodes=True)
    assert caplog.messages == [
        "--reward_pretrain m: its chat template leaves out calls and results of tools, so they are not scored"
    ]


def test_a_response_continues_the_turn_that_its_prompt_ends_in(own, make_tokenizer, make_sample):
    messages = [*CHAT, {"role": "assistant", "content": "c"}]
    finished = make_sample([4, 5], [7, 1], text="ab", messages=messages)
    cut_off = make_sample([4, 5], [7], text="ab", messages=messages, truncated=True)
    encode = RewardModelText(make_tokenizer(), own, "--reward_pretrain m")
    assert encode(finished) == ids_of(*START, "c", "d", "</s>")
    assert encode(cut_off) == ids_of(*START, "c", "d")
    own.chat_template = TEMPLATE.replace("</s>", "<u>")
    sampled = make_sample(ids_of(*START, "c"), ids_of("d", "<u>"), messages=messages)
    assert policy_tokens(own, sampled) == ids_of(*START, "c", "d", "<u>", " ", "</s>")


def test_a_tokenizer_without_eos_is_an_error(own, make_tokenizer):
    own.eos_token = None
    with pytest.raises(ValueError, match="^--reward_pretrain m: its tokenizer has no EOS token"):
        RewardModelText(make_tokenizer(), own, "--reward_pretrain m")


@pytest.mark.parametrize(
    "messages", [None, CHAT], ids=["plain", "chat whose template has no <u> behind the turn"]
)
def test_a_text_that_ended_with_another_token_than_eos_is_read_at_eos(messages, own, make_sample):
    sample = make_sample(ids_of("a"), ids_of("c", "<u>"), messages=messages)
    assert policy_tokens(own, sample) == ids_of("a", "c", "<u>", "</s>")


def test_a_text_gets_one_bos_if_its_tokenizer_wants_one(own, make_tokenizer):
    assert encode_start(own, "ab") == encode_start(own, "<s>ab") == ids_of("<s>", "a", "b")
    assert encode_start(own, "") == ids_of("<s>")
    assert encode_start(make_tokenizer(), "ab") == [4, 5]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize(
    ("name", "end"), [("qwen2.5", "<|im_end|>"), ("mistral-v3", "</s>"), ("phi3-mini", "<|end|>")]
)
def test_real_tokenizers_end_a_finished_response_as_training_does_and_a_cut_one_with_its_last_word(
    name, end, chat, assets, make_tokenizer, make_sample
):
    real = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    options = RowsConfig(apply_chat_template=chat)
    question = CHAT if chat else "ab"
    messages = CHAT if chat else None
    before = render_prompt(question, real, options).token_ids
    example = render_response(question, "cd", real, options).token_ids
    stop = real.convert_tokens_to_ids(end) if chat else real.eos_token_id
    sampled = example[len(before) : example.index(stop, len(before)) + 1]
    assert policy_tokens(real, make_sample(before, sampled, messages=messages)) == example
    cut_off = make_sample(before, sampled[:-1], messages=messages, truncated=True)
    assert policy_tokens(real, cut_off) == [*before, *sampled[:-1]]

    encode = RewardModelText(make_tokenizer(), real, "m")  # the policy is another
    ended = encode(make_sample([4, 5], [6, 7, 1], text="ab", messages=messages))
    cut = encode(make_sample([4, 5], [6, 7], text="ab", messages=messages, truncated=True))
    assert ended[-1] == real.eos_token_id
    assert ended[: len(cut)] == cut
    assert real.decode(cut).endswith("cd")
    assert cut.count(real.bos_token_id) == (1 if name == "mistral-v3" else 0)


def test_reward_models_read_the_whole_episode(game, make_tokenizer):
    assert policy_tokens(make_tokenizer(), game) == game.last.token_ids
    assert RewardModelText(make_tokenizer(), make_tokenizer(), "m")(game) == game.last.token_ids


def test_an_episode_is_rendered_with_the_templates_of_the_reward_model(
    episode, own, make_tokenizer
):
    own.chat_template = (
        "{% for m in messages %}{{ '<' ~ m.role[0] ~ '>' ~ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.at }}{% endfor %}"
        "{% if m.role == 'assistant' %}{{ '</s>' }}{% endif %}{% endfor %}"
    )
    text = RewardModelText(make_tokenizer(), own, "--reward_pretrain m")
    whole = "<a>h</s><u>ab<a>cde</s><t>ef<a>czd</s>"
    assert text(episode) == own(whole, add_special_tokens=False)["input_ids"]
    cut = with_last(episode, finish_reason=FinishReason.LENGTH)
    assert text(cut) == text(episode)[:-1], "nothing follows what was cut off"
    assert policy_tokens(make_tokenizer(), episode) == episode.last.token_ids
    own.chat_template = None
    text.check([])
    with pytest.raises(
        ValueError, match="no chat template, which episodes are rendered with. Use a reward model"
    ):
        text.check([], episodes=True)


def test_a_response_with_masked_tokens_is_scored_whole(own, make_tokenizer, make_sample):
    """Tokens that are too old to train on were answered all the same."""
    sample = make_sample([4, 5], [6, 7, 8, 1], text="ab")
    whole = with_last(sample, versions=[-1, -1, 0, 0, 1, 1])
    masked = without_old(whole, oldest=1)
    assert masked.last.loss_mask == [False] * 4 + [True] * 2
    policy = make_tokenizer()
    read = RewardModelText(policy, own, "--reward_pretrain x")
    assert read(masked) == read(whole)
    assert span_texts(masked, policy) == span_texts(whole, policy)
    assert step_tokens(masked, policy, "z") == step_tokens(whole, policy, "z")
