"""Logged samples: which, and what is said of each token, against numbers made by hand."""

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openppo.config import TrainPPOConfig, from_options
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.media import MediaItem
from openppo.rollout.rollout import Rollout
from openppo.tracking import JSONLTracker, Metrics
from openppo.trainer.sample_log import StepDiagnostics, trained_samples
from openppo.trainer.sample_rows import MAX_TOKENS, choose, rollout_row, sample_row, token_row
from openppo.trainer.self_check import token_texts
from openppo.types import (
    Ending,
    Episode,
    Experience,
    FinishReason,
    ModelInputs,
    Prompt,
    Sample,
    Segment,
    SingleProcess,
)
from tests.samples import one_segment, with_last


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, as byte-level BPE falls back to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


BYTES = byte_tokenizer()


def response_to(
    prompt: list[int], group: int, n_tokens: int = 2, mask: list[int] | None = None
) -> Sample:
    return one_segment(
        token_ids=[*prompt, *range(7, 7 + n_tokens)],
        action_mask=[False] * len(prompt) + [bool(a) for a in mask or [1] * n_tokens],
        log_probs=[0.0] * len(prompt) + [-0.5] * n_tokens,
        versions=[0] * (len(prompt) + n_tokens),
        finish_reason=FinishReason.STOP,
        prompt=Prompt(text=f"prompt {prompt}", token_ids=prompt, label="x"),
        group=group,
        scores={"a": 2.0},
    )


def experience_of(segment: Segment, **fields: list[float]) -> Experience:
    log_probs = torch.tensor([segment.log_probs])
    numbers = {name: torch.tensor([values]) for name, values in fields.items()}
    experience = Experience(
        ModelInputs.of([segment], pad_token_id=0),
        action_mask=torch.tensor([segment.action_mask]),
        rollout_log_probs=log_probs,
        truncated=torch.tensor([False]),
    )
    return experience.with_fields(**({"log_probs": log_probs} | numbers))


NINE = [response_to([i], group=i) for i in range(9)]
ONE = NINE[1]


def test_the_same_prompts_are_chosen_from_any_batch() -> None:
    prompts = [[i, i + 1] for i in range(40)]
    first = [response_to(prompt, group) for group, prompt in enumerate(prompts)]
    other = [response_to(prompt, 100 + group) for group, prompt in enumerate(reversed(prompts))]
    chosen = [first[i].prompt.token_ids for i in choose(first)]
    assert len(chosen) == 4
    for batch in (other, [sample for sample in first if sample.prompt.token_ids in chosen]):
        assert [batch[i].prompt.token_ids for i in choose(batch)] == chosen
    groups = [response_to([group], group) for group in range(6) for _ in range(8)]
    one, two, three, four = (groups[i].group for i in choose(groups))
    assert one == two != three == four, "two responses of each group"
    assert (choose([]), choose([ONE])) == ([], [0])


def test_a_label_of_any_type_is_json(tmp_path: Path) -> None:
    day, tracker = datetime.date(2026, 11, 22), JSONLTracker(tmp_path)
    for label in (
        "text",
        {"a": [1, 2.5, None, True]},
        day,
        Decimal("1.10"),
        b"\xff",
        (1, {day: math.nan, 2: "b"}),
    ):
        sample = dataclasses.replace(ONE, prompt=Prompt("p", [1], label=label))
        row = sample_row(sample, BYTES, weights={})
        assert json.loads(json.dumps(row)) == row
        tracker.log_samples(1, [row, row | {"label": label}])
    lines = [
        json.loads(line)["label"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()
    ]
    assert lines[::2] == lines[1::2]


def test_bytes_wait_for_the_end_of_their_character() -> None:
    ids, euro = BYTES("aé€b")["input_ids"], BYTES("€")["input_ids"]
    assert token_texts(ids, BYTES) == ["a", "", "é", "", "", "€", "b"]
    assert token_texts(ids, BYTES, first=3) == ["", "", "€", "b"]
    assert token_texts(euro[:2], BYTES) == ["", "\ufffd"], "the response ends within the character"
    assert token_texts([euro[0], *BYTES("ab")["input_ids"]], BYTES) == ["", "\ufffda", "b"]
    assert "".join(token_texts([euro[1]] * 20, BYTES)) == BYTES.decode([euro[1]] * 20)


@pytest.mark.parametrize("name", ["gpt2", "mistral-v3", "phi3-mini", "qwen2.5"])
def test_token_texts_of_real_tokenizers_put_together_are_the_text(name: str, assets: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    text = "Once  upon a time,\n\tthere was 日本 👩‍🚀 naïve</script> x."
    prompt, ids = (
        tokenizer("Say: ", add_special_tokens=False)["input_ids"],
        tokenizer(text)["input_ids"],
    )
    texts = token_texts([*prompt, *ids], tokenizer, first=len(prompt))
    assert len(texts) == len(ids)
    whole, before = tokenizer.decode([*prompt, *ids]), tokenizer.decode(prompt)
    assert "".join(texts) == whole[len(before) :]


def test_each_token_has_its_numbers_and_untrained_ones_have_none() -> None:
    sample = response_to([1, 2], group=0, n_tokens=3, mask=[1, 0, 1])
    experience = experience_of(
        sample.last,
        log_probs=[0.0, 0.0, -1.0, 0.0, -0.25],
        ref_log_probs=[0.0, 0.0, -1.5, 0.0, -0.125],
        values=[0.0, 0.0, 0.5, 9.0, 1 / 3],
        rewards=[0.0, 0.0, -0.01, 0.0, 2.0],
        advantages=[0.0, 0.0, -1.25, 0.0, 1.5],
        returns=[0.0, 0.0, 1.99, 0.0, 2.0],
    )
    row = token_row(sample, BYTES, experience)
    assert {name: value for name, value in row.items() if not name.endswith("texts")} == {
        "first": 2,
        "prompt_ids": [1, 2],
        "n_tokens": 3,
        "ids": [7, 8, 9],
        "trained": [1, 0, 1],
        "log_prob": [-1.0, None, -0.25],
        "kl": [0.5, None, -0.125],  # k1: log-prob less the reference's
        "value": [0.5, None, 0.333333],
        "reward": [-0.01, None, 2.0],
        "advantage": [-1.25, None, 1.5],
        "return": [1.99, None, 2.0],
    }
    bare = experience_of(sample.last, rewards=[0.0] * 5, advantages=[0.0] * 5)
    without = token_row(sample, BYTES, bare)
    assert {"kl", "value", "return"} & without.keys() == set(), (
        "what a run does not have is left out"
    )


def test_of_a_long_response_both_ends_are_kept() -> None:
    n, half = MAX_TOKENS + 500, MAX_TOKENS // 2
    sample = response_to([1, 1], group=0, n_tokens=n)
    sample = with_last(sample, token_ids=[1, 1, *(i % 200 for i in range(n))])
    experience = experience_of(sample.last, values=[float(i) for i in range(n + 2)])
    row = token_row(sample, BYTES, experience)
    assert row["n_tokens"] == n
    assert row["value"] == [float(i + 2) for i in [*range(half), *range(n - half, n)]]
    assert len(row["texts"]) == len(row["ids"]) == len(row["trained"]) == MAX_TOKENS


class Ranks(SingleProcess):
    """Rank ``rank`` of two; ``others`` is what the other hands over in each gathering."""

    def __init__(self, rank: int = 0, others: Sequence[Any] = ()) -> None:
        self.rank, self.world_size, self.others = rank, 2, list(others)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self.others.pop(0)] if self.others else [value]


class View(StepDiagnostics):
    """Keeps what it logs."""

    def __init__(self, total_steps: int = 3, comm: Any = None) -> None:
        self.samples: list[dict[str, Any]] = []
        self.tokens: list[dict[str, Any]] = []
        trackers = SimpleNamespace(
            log_samples=lambda step, rows: self.samples.extend(
                {"step": step} | row for row in rows
            ),
            log_tokens=lambda step, rows: self.tokens.extend({"step": step} | row for row in rows),
        )
        strategy = SimpleNamespace(comm=comm or SingleProcess())
        parts: Any = SimpleNamespace(
            strategy=strategy, tokenizer=BYTES, trackers=trackers, state=SimpleNamespace()
        )
        parts.grading = SimpleNamespace(measured_weights={"a": 0.25})
        options = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "self_check": False}
        super().__init__(from_options(TrainPPOConfig, **options), parts, total_steps)
        self.weights = {"a": 0.5}

    def train_on(
        self, step: int, buffer: ReplayBuffer, change: float = 0.0, entropy: float | None = 1.5
    ) -> None:
        """Forwards that find each token e^change times as likely as before."""
        self.components.state.global_step = step - 1
        for item in buffer.items:
            now = torch.where(item.action_mask, item.old_or_rollout_log_probs + change, 0.0)
            self.observe(item, now, None if entropy is None else torch.full_like(now, entropy))

    def show(
        self, step: int, samples: Sequence[Sample], buffer: ReplayBuffer | None = None
    ) -> None:
        self.trained_on = samples
        self.show_step(step, buffer or filled(samples), {})


def filled(samples: Sequence[Sample], **fields: list[float]) -> ReplayBuffer:
    buffer = ReplayBuffer()
    for sample in samples:
        for segment in sample.segments:
            mask = [float(is_action) for is_action in segment.action_mask]
            experience = experience_of(
                segment,
                advantages=[number * sample.group for number in mask],
                ref_log_probs=[-0.75 * number for number in mask],
                **fields,
            )
            buffer.append(experience)
    return buffer


def test_ratio_and_entropy_are_of_the_last_training_forward() -> None:
    view, buffer = View(), filled(NINE)
    for change, entropy in ((0.25, 2.0), (0.5, 1.5)):
        view.train_on(1, buffer, change, entropy)
    view.show(1, NINE, buffer)
    assert len(view.samples) == len(view.tokens) == 4
    for number, (row, tokens) in enumerate(zip(view.samples, view.tokens, strict=True)):
        group = int(row["prompt"].split("[")[1].rstrip("]"))
        assert row["sample"] == tokens["sample"] == number
        assert (row["reward"], row["rewards"], row["response_length"]) == (1.0, {"a": 2.0}, 2)
        assert row["kl"] == pytest.approx(2 * 0.25)
        assert tokens["advantage"] == [group, group]
        assert tokens["ratio"] == [pytest.approx(math.exp(0.5), rel=1e-5)] * 2
        assert tokens["entropy"] == [1.5, 1.5]


def test_what_training_does_not_compute_is_left_out() -> None:
    """Without an entropy bonus the entropy of the forward before training stands, if there was one."""
    view = View()
    view.train_on(1, filled([NINE[2], ONE]))  # a step that a loop of one's own never reports
    for buffer in (filled([ONE]), filled([ONE], entropy=[0.0, 0.5, 0.25])):
        view.train_on(3, buffer, entropy=None)
        view.show(3, [ONE], buffer)
    view.show(3, [ONE])  # the actor was not trained
    without, known, frozen = view.tokens
    assert "entropy" not in without and "ratio" not in frozen
    assert (without["ratio"], known["entropy"]) == ([1.0, 1.0], [0.5, 0.25])


def test_rank_0_logs_with_forwards_of_other_ranks() -> None:
    elsewhere = {tuple(ONE.last.token_ids): {"ratio": torch.tensor([1.0, 2.0, 3.0])}}
    view, other = View(comm=Ranks(others=[[], elsewhere])), View(comm=Ranks(rank=1))
    for each in (view, other):
        each.show(1, [ONE])
    assert view.tokens[0]["ratio"] == [2.0, 3.0]
    assert (other.samples, other.tokens) == ([], [])


def test_tokens_are_of_a_hundred_steps_and_samples_of_all() -> None:
    view = View(total_steps=995)
    for step in range(1, 996):
        view.show(step, [ONE])
    assert [row["step"] for row in view.tokens] == [1, *range(10, 995, 10), 995]
    assert len(view.samples) == 995


def test_held_out_samples_have_the_engines_log_probs() -> None:
    view, dumped = View(), list[Any]()
    view.config = dataclasses.replace(
        view.config, dump=dataclasses.replace(view.config.dump, dump_rollouts="d")
    )
    view.components.trackers.log_rollouts = lambda step, split, rows: dumped.extend(rows)
    graded = dataclasses.replace(ONE, scores={"a": 2.0}, extras={"n": 3.0}, notes={"pred": "é"})
    view.show_evaluation(5, [graded])
    [row] = view.samples
    [tokens] = view.tokens
    assert (row["reward"], row["extra"]) == (0.5, {"n": 3.0, "pred": "é"}), (
        "with the weights of evaluations"
    )
    assert [(row["reward"], row["extra"]) for row in dumped] == [(0.5, '{"n": 3.0, "pred": "é"}')]
    assert row["evaluation"] is tokens["evaluation"] is True
    assert row["step"] == tokens["step"] == 5
    assert tokens["log_prob"] == [-0.5, -0.5]
    assert {"kl", "value", "entropy", "advantage", "ratio"} & (tokens.keys() | row.keys()) == set()


def test_an_episode_is_logged_as_a_conversation_with_the_places_of_its_turns() -> None:
    messages = [
        {"role": "user", "content": "look"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "see", "arguments": "{}"}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "a wall"}]},
        {"role": "assistant", "content": "left"},
    ]
    played = Episode(messages, Ending.MAX_TURNS, n_turns=2, output="a wall")
    sample = response_to([1, 2], 0, n_tokens=7, mask=[1, 1, 0, 0, 1, 1, 1])
    sample = dataclasses.replace(sample, episode=played, prompt=Prompt("", [1, 2]))
    row = sample_row(sample, BYTES, weights={})
    tokens = token_row(sample, BYTES)
    expected = {
        "prompt": "look",
        "ending": "max_turns",
        "turns": 2,
        "messages": messages,
        "output": "a wall",
    }
    assert {name: row[name] for name in expected} == expected
    assert (tokens["turns"], tokens["trained"]) == ([[0, 2], [4, 7]], [1, 1, 0, 0, 1, 1, 1])
    assert "turns" not in token_row(ONE, BYTES)
    first = response_to([3, 4], 0, n_tokens=4).last
    cut = dataclasses.replace(sample, segments=[first, sample.last])
    row = sample_row(cut, BYTES, weights={})
    assert (choose([cut]), row["response_length"]) == ([0], 4 + 5), "one sample in two segments"
    assert row["response"] == BYTES.decode(sample.last.response_ids), "of the last segment"
    assert token_row(cut, BYTES) == tokens, "of the last segment"


def test_what_the_model_reads_before_its_first_turn_is_logged_once() -> None:
    """An agent's messages are not all of it: its template writes tools, marks of roles, and perhaps a system text."""
    read = '<|system|>Tools: {"name": "see"}<|user|>look<|assistant|>'
    ids = BYTES(read)["input_ids"]
    messages = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "a wall"}]
    played = Episode(messages, Ending.COMPLETED, n_turns=1)
    sample = response_to(ids, 0)
    sample = dataclasses.replace(sample, episode=played, prompt=Prompt("look", ids))
    row = sample_row(sample, BYTES, weights={})
    tokens = token_row(sample, BYTES)
    assert (row["prompt"], row["rendered_prompt"]) == ("look", read)
    assert row["rendered_prompt"] + row["response"] == BYTES.decode(sample.last.token_ids), (
        "all that it read and wrote"
    )
    assert (tokens["first"], tokens["prompt_ids"], "".join(tokens["prompt_texts"])) == (
        len(ids),
        ids,
        read,
    )
    plain = dataclasses.replace(sample, episode=None, prompt=Prompt(read, ids))
    assert "rendered_prompt" not in sample_row(plain, BYTES, weights={}), (
        "its prompt is what it read"
    )
    unread = dataclasses.replace(sample, episode=dataclasses.replace(played, n_turns=0))
    assert "rendered_prompt" not in sample_row(unread, BYTES, weights={})
    dumped = [rollout_row(each, BYTES, {}) for each in (sample, plain)]
    assert [each["rendered_prompt"] for each in dumped] == [read, ""]


def test_of_a_long_prompt_both_ends_are_kept() -> None:
    row = token_row(response_to([i % 200 for i in range(MAX_TOKENS + 9)], group=0), BYTES)
    assert (
        row["first"] == MAX_TOKENS + 9
        and len(row["prompt_ids"]) == len(row["prompt_texts"]) == MAX_TOKENS
    )
    assert row["prompt_ids"][MAX_TOKENS // 2 - 1 :][:2] == [
        (MAX_TOKENS // 2 - 1) % 200,
        (MAX_TOKENS // 2 + 9) % 200,
    ]


def test_the_places_of_an_image_in_the_prompt_are_counted() -> None:
    ids, (pad,) = BYTES("<vision>~~~~~~ look")["input_ids"], BYTES("~")["input_ids"]
    item = MediaItem({}, token_id=pad, n_tokens=6, key=1)
    sample = with_last(response_to(ids, 0), media=(item,))
    sample = dataclasses.replace(sample, prompt=Prompt("look", ids, media=(item,)))
    assert sample_row(sample, BYTES, weights={})["rendered_prompt"] == "<vision>~ x 6 look"


def test_failed_episodes_of_a_step_follow_those_trained_on() -> None:
    error = Episode(
        [{"role": "user", "content": "look"}],
        Ending.AGENT_ERROR,
        0,
        "exit status 3: broken",
        "broken",
    )
    failed = with_last(ONE, action_mask=[False] * 3)
    failed = dataclasses.replace(failed, scores={"reward": 0.0}, episode=error)
    view, rollout = View(), Rollout([ONE], Metrics(), failed=[failed])
    view.show(2, rollout, filled([ONE]))
    view.show_failed(3, [failed])
    assert [(row["step"], row["sample"], row.get("error")) for row in view.samples] == [
        (2, 0, None),
        (2, 1, "exit status 3: broken"),
        (3, 0, "exit status 3: broken"),
    ]
    assert [(row["step"], row["sample"]) for row in view.tokens] == [(2, 0), (2, 1), (3, 0)]
    assert (view.samples[1]["output"], view.samples[1]["turns"], view.samples[1]["reward"]) == (
        "broken",
        0,
        0.0,
    )


def test_logs_and_dumps_have_the_reward_of_the_whole_episode() -> None:
    """An episode in two segments, of which each earned something, and another one."""
    first = dataclasses.replace(ONE.last, token_rewards=[0.0, 0.0, 1.0])
    last = dataclasses.replace(ONE.last, token_rewards=[0.0, 0.0, 0.25])
    played = Episode([], Ending.COMPLETED, n_turns=2)
    both = dataclasses.replace(ONE, episode=played, segments=[first, last])
    other = NINE[2]
    view, dumped = View(), list[Any]()
    shown = dataclasses.replace(view.config.tracking, use_tensorboard="tb")
    dump = dataclasses.replace(view.config.dump, dump_rollouts="d")
    view.config = dataclasses.replace(view.config, dump=dump, tracking=shown)
    view.components.trackers.log_rollouts = lambda step, split, rows: dumped.extend(rows)
    histograms: dict[str, Any] = {}
    view.components.trackers.log_histograms = lambda step, shown: histograms.update(shown)
    view.show(1, [both, other])
    assert [row["reward"] for row in dumped] == [2.25, 1.0], "a score of 2, weighted by 0.5"
    assert sorted(row["reward"] for row in view.samples) == [1.0, 2.25]
    assert histograms["reward"].total == 3.25, "each episode counts once"


def segments_from(first_id: int, n: int) -> list[Segment]:
    """Segments of distinct tokens, the first of one action, each of one more than the one before."""
    return [response_to([first_id + place], 0, n_tokens=1 + place).last for place in range(n)]


THREE = [
    dataclasses.replace(response_to([1], group=group), segments=segments_from(10 * group, n))
    for group, n in ((1, 1), (2, 3), (3, 2))
]
"""Samples of one, three and two segments."""


def test_each_sample_has_the_rows_of_its_segments() -> None:
    buffer = filled(THREE)
    trained = trained_samples(THREE, buffer.items)
    assert [(each.sample, len(each.rows)) for each in trained] == list(
        zip(THREE, [1, 3, 2], strict=True)
    )
    rows = [row for each in trained for row in each.rows]
    assert list(map(id, rows)) == list(map(id, buffer.items))
    for each, sample in zip(trained, THREE, strict=True):
        assert [segment for segment, _ in each.pairs()] == sample.segments
        for segment, row in each.pairs():
            assert row.sequences[0].tolist() == segment.token_ids
            assert row.action_mask[0].tolist() == segment.action_mask
    assert trained_samples([], []) == []


def test_a_sample_of_several_segments_is_logged_with_all_its_rows() -> None:
    view = View()
    view.show(1, THREE)
    by_group = {row["group"]: row for row in view.samples}
    assert by_group[2]["kl"] == pytest.approx(0.25 * (1 + 2 + 3))
    assert by_group[2]["response_length"] == 1 + 2 + 3
    assert len(by_group[2]["segments"]) == 3
    numbers = {row["sample"]: row["group"] for row in view.samples}
    for row in view.tokens:
        group = numbers[row["sample"]]
        n_last = {1: 1, 2: 3, 3: 2}[group]
        assert row["ids"] == list(range(7, 7 + n_last)), "the last segment"
        assert row["advantage"] == [float(group)] * n_last


def test_rows_that_the_limit_of_an_episode_cut_off_are_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that ``--generate_max_len`` cut off is checked."""
    checked: list[tuple[list[list[int]], list[Any]]] = []

    def note(step: int, rows: list[Experience], *_: Any, labels: list[Any], **__: Any) -> None:
        checked.append(([row.sequences[0].tolist() for row in rows], labels))

    monkeypatch.setattr("openppo.trainer.sample_log.check_samples", note)
    monkeypatch.setattr("openppo.trainer.sample_log.eos_token_ids", lambda *_: [])
    view = View()
    view._checks_next = True
    actor = SimpleNamespace(module=SimpleNamespace(model=None))
    view.components.actor = actor
    first, middle, last = segments_from(20, 3)
    cut = dataclasses.replace(middle, finish_reason=FinishReason.LENGTH)
    played = Episode([], Ending.MAX_TURNS, n_turns=3)
    limited = dataclasses.replace(ONE, segments=[first, cut, last], episode=played)
    long = with_last(NINE[2], finish_reason=FinishReason.LENGTH)
    long = dataclasses.replace(long, prompt=Prompt("", [2], label="y"))
    view.show(1, [limited, long])
    assert checked == [([first.token_ids, last.token_ids, long.last.token_ids], ["x", "x", "y"])]


GREEDY = dataclasses.replace(response_to([1, 2], group=4, n_tokens=1), scores={"a": 1.0})
TWO_SEGMENTS = Sample(
    Prompt("look", [1, 2], label="x", source="s", index=6),
    group=4,
    segments=[
        Segment(
            token_ids=[1, 2, 7, 8, 9],
            action_mask=[False, False, True, False, True],
            log_probs=[0.0, 0.0, -0.5, 0.0, -0.25],
            versions=[-1, -1, 3, -1, 4],
            n_prompt=2,
            finish_reason=FinishReason.STOP,
            token_rewards=[0.0, 0.0, 0.5, 0.0, 0.0],
        ),
        Segment(
            token_ids=[1, 2, 7, 10, 11, 12, 13],
            action_mask=[False, False, False, True, True, True, True],
            log_probs=[0.0, 0.0, 0.0, -0.5, -0.5, -1.0, -1.5],
            versions=[-1, -1, -1, 4, 4, 4, 5],
            n_prompt=3,
            finish_reason=FinishReason.LENGTH,
            token_rewards=[0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0],
            step_ends=[False, False, False, False, True, False, True],
        ),
    ],
    scores={"a": 2.0},
    greedy=GREEDY,
)
BARE = dataclasses.replace(TWO_SEGMENTS.with_scores({}), greedy=None)
"""The same sample in a run without rewards and a greedy baseline."""


def test_a_row_tells_versions_and_rewards_of_each_segment() -> None:
    row = sample_row(TWO_SEGMENTS, BYTES, weights={"a": 0.5})
    row = json.loads(json.dumps(row))
    assert row["segments"] == [
        {
            "n_prompt": 2,
            "n_tokens": 5,
            "actions": [[2, 3], [4, 5]],
            "versions": [[3, 1], [4, 1]],
            "token_rewards": [[2, 0.5], [4, 0.0]],  # each action is a step
            "finish_reason": "stop",
        },
        {
            "n_prompt": 3,
            "n_tokens": 7,
            "actions": [[3, 7]],
            "versions": [[4, 3], [5, 1]],
            "token_rewards": [[4, -1.0], [6, 0.0]],  # where steps end
            "finish_reason": "length",
        },
    ]
    expected = {
        "prompt": "look",
        "response": BYTES.decode([10, 11, 12, 13]),
        "response_length": 2 + 4,
        "finish_reason": "length",
        "reward": 0.5 * 2.0 + 0.5 - 1.0,
        "rewards": {"a": 2.0},
        "source": "s",
        "row": 6,
        "group": 4,
        "rendered_prompt": BYTES.decode([1, 2, 7]),
    }
    assert {name: row[name] for name in expected} == expected
    assert row["greedy"] == {
        "response": BYTES.decode([7]),
        "finish_reason": "stop",
        "response_length": 1,
        "reward": 0.5,
        "rewards": {"a": 1.0},
    }
    bare = sample_row(BARE, BYTES, weights=None)
    assert {"reward", "rewards", "greedy"} & bare.keys() == set()
    assert [segment["token_rewards"] for segment in bare["segments"]] == [[], []]
    unrewarded = sample_row(TWO_SEGMENTS, BYTES, weights=None)
    assert unrewarded["greedy"].keys() == {"response", "finish_reason", "response_length"}


def test_a_dump_has_numbers_and_lists_of_each_segment() -> None:
    row = rollout_row(TWO_SEGMENTS, BYTES, {"a": 0.5})
    first, last = TWO_SEGMENTS.segments
    summaries = [
        {
            "n_prompt": 2,
            "n_tokens": 5,
            "n_actions": 2,
            "oldest_version": 3,
            "newest_version": 4,
            "finish_reason": "stop",
        },
        {
            "n_prompt": 3,
            "n_tokens": 7,
            "n_actions": 4,
            "oldest_version": 4,
            "newest_version": 5,
            "finish_reason": "length",
        },
    ]
    lists = ("token_ids", "action_mask", "log_probs", "versions", "token_rewards")
    assert row["segments"] == [
        summary | {name: getattr(segment, name) for name in lists}
        for summary, segment in zip(summaries, (first, last), strict=True)
    ]
    logged = sample_row(TWO_SEGMENTS, BYTES, weights={"a": 0.5})
    assert json.loads(row["greedy"]) == logged["greedy"]
    assert (row["reward"], row["rewards"]) == (logged["reward"], '{"a": 2.0}')

    bare = rollout_row(BARE, BYTES, None)
    assert [segment["token_rewards"] for segment in bare["segments"]] == [[0.0] * 5, [0.0] * 7]
    assert (bare["reward"], bare["rewards"], bare["greedy"]) == (None, "{}", "null")
    failed = with_last(ONE, action_mask=[False] * 3)
    [segment] = rollout_row(failed, BYTES, {})["segments"]
    counts = [segment[name] for name in ("n_actions", "oldest_version", "newest_version")]
    assert counts == [0, -1, -1]


def types_of(value: Any) -> Any:
    """The types of a column: of a list those of its entries, which are all of one."""
    if isinstance(value, dict):
        return {name: types_of(entry) for name, entry in value.items()}
    if not isinstance(value, list):
        return type(value)
    of_entries = [types_of(entry) for entry in value]
    assert all(each == of_entries[0] for each in of_entries)
    return of_entries[:1]


def test_columns_of_a_dump_have_the_same_types_in_any_run() -> None:
    played = Episode([{"role": "user", "content": "look"}], Ending.COMPLETED, n_turns=2)
    extras = {"extras": {"n": 1.0}, "notes": {"pred": "é"}}
    rows = [
        rollout_row(sample, BYTES, weights)
        for sample, weights in (
            (TWO_SEGMENTS, {"a": 0.5}),
            (dataclasses.replace(TWO_SEGMENTS, greedy=None, **extras), {}),
            (dataclasses.replace(TWO_SEGMENTS, scores={}, episode=played), {}),
            (dataclasses.replace(ONE, scores={"a": 2}), {}),
            (TWO_SEGMENTS, None),
            (BARE, None),
        )
    ]
    types = [types_of(row) for row in rows]
    assert [each.pop("reward") for each in types] == [float] * 4 + [type(None)] * 2
    assert all(each == types[0] for each in types)
