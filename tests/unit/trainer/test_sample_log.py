"""Logged samples: which, and what is said of each token, against numbers made by hand."""

import dataclasses
import datetime
import json
import math
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from openppo.experience.replay_buffer import ReplayBuffer
from openppo.tracking import JSONLTracker
from openppo.trainer.sample_log import MAX_TOKENS, SampleLog, choose, sample_row, token_row, token_texts
from openppo.types import Experience, FinishReason, Prompt, SingleProcess, Trajectory


@pytest.fixture(scope="module")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, as byte-level BPE falls back to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def response_to(prompt: list[int], group: int, n_tokens: int = 2, mask: list[int] | None = None) -> Trajectory:
    actions = [bool(a) for a in mask or [1] * n_tokens]
    return Trajectory(
        token_ids=[*prompt, *range(7, 7 + n_tokens)],
        action_mask=[False] * len(prompt) + actions,
        log_probs=[0.0] * len(prompt) + [-0.5] * n_tokens,
        versions=[0] * (len(prompt) + n_tokens),
        finish_reason=FinishReason.STOP,
        prompt=Prompt(text=f"prompt {prompt}", token_ids=prompt, label="x"),
        group=group,
        scores={"a": 2.0},
    )


def experience_of(t: Trajectory, **fields: list[float]) -> Experience:
    mask = torch.tensor([t.action_mask])
    numbers = {name: torch.tensor([values]) for name, values in fields.items()}
    rollout = torch.tensor([t.log_probs])
    made = Experience(torch.tensor([t.token_ids]), torch.ones_like(mask), mask, rollout, torch.tensor([False]))
    return made.with_fields(**({"log_probs": rollout} | numbers))


def test_the_same_prompts_are_chosen_whatever_else_is_in_the_batch_and_wherever_they_stand() -> None:
    prompts = [[i, i + 1] for i in range(40)]
    first = [response_to(prompt, group) for group, prompt in enumerate(prompts)]
    other = [response_to(prompt, 100 + group) for group, prompt in enumerate(reversed(prompts))]
    chosen = [first[i].prompt.token_ids for i in choose(first)]
    assert len(chosen) == 4
    assert [other[i].prompt.token_ids for i in choose(other)] == chosen
    without_the_rest = [t for t in first if t.prompt.token_ids in chosen]
    assert [without_the_rest[i].prompt.token_ids for i in choose(without_the_rest)] == chosen


def test_of_groups_two_responses_each_are_chosen() -> None:
    groups = [response_to([group], group) for group in range(6) for _ in range(8)]
    numbers = [groups[i].group for i in choose(groups)]
    assert len(numbers) == 4
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert choose([]) == []
    assert choose([response_to([1], 0)]) == [0]


@pytest.mark.parametrize(
    "label",
    [
        "text",
        {"a": [1, 2.5, None, True]},
        datetime.date(2026, 11, 22),
        datetime.datetime(2026, 11, 22, 4, 5, tzinfo=datetime.UTC),
        Decimal("1.10"),
        b"\xff",
        (1, {datetime.date(2026, 1, 1): math.nan, 2: "b"}),
    ],
)
def test_a_label_of_any_type_is_json(label: Any, byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trajectory = response_to([1, 2], 0)
    trajectory = dataclasses.replace(trajectory, prompt=dataclasses.replace(trajectory.prompt, label=label))
    sample = sample_row(trajectory, byte_tokenizer, {})
    assert json.loads(json.dumps(sample)) == sample
    tracker = JSONLTracker(tmp_path)
    tracker.log_samples(1, [sample, sample | {"label": label}])
    logged, raw = map(json.loads, (tmp_path / "samples.jsonl").read_text().split("\n")[:-1])
    assert logged["label"] == raw["label"]


def test_token_texts_put_together_are_the_text_and_half_characters_wait_for_their_end(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = byte_tokenizer("aé€b")["input_ids"]
    assert token_texts(ids, byte_tokenizer) == ["a", "", "é", "", "", "€", "b"]
    assert token_texts(ids, byte_tokenizer, first=3) == ["", "", "€", "b"]


def test_bytes_that_never_become_a_character_are_shown(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    ids = byte_tokenizer("€")["input_ids"]
    assert token_texts(ids[:2], byte_tokenizer) == ["", "\ufffd"]  # the response ends within the character
    broken = [ids[0], *byte_tokenizer("ab")["input_ids"]]
    assert token_texts(broken, byte_tokenizer) == ["", "\ufffda", "b"]
    many = [ids[1]] * 20
    assert "".join(token_texts(many, byte_tokenizer)) == byte_tokenizer.decode(many)


@pytest.mark.parametrize("name", ["gpt2", "mistral-v3", "phi3-mini", "qwen2.5"])
def test_token_texts_of_real_tokenizers_put_together_are_the_text(name: str, assets: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    text = "Once  upon a time,\n\tthere was 日本 👩‍🚀 naïve</script> x."
    prompt, ids = tokenizer("Say: ", add_special_tokens=False)["input_ids"], tokenizer(text)["input_ids"]
    texts = token_texts([*prompt, *ids], tokenizer, first=len(prompt))
    assert len(texts) == len(ids)
    whole, before = tokenizer.decode([*prompt, *ids]), tokenizer.decode(prompt)
    assert "".join(texts) == whole[len(before) :]


def test_each_token_has_its_numbers_and_untrained_ones_have_none(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    t = response_to([1, 2], group=0, n_tokens=3, mask=[1, 0, 1])
    experience = experience_of(
        t,
        log_probs=[0.0, 0.0, -1.0, 0.0, -0.25],
        ref_log_probs=[0.0, 0.0, -1.5, 0.0, -0.125],
        values=[0.0, 0.0, 0.5, 9.0, 1 / 3],
        rewards=[0.0, 0.0, -0.01, 0.0, 2.0],
        advantages=[0.0, 0.0, -1.25, 0.0, 1.5],
        returns=[0.0, 0.0, 1.99, 0.0, 2.0],
    )
    row = token_row(t, byte_tokenizer, experience)
    assert row["first"] == 2
    assert row["n_tokens"] == 3
    assert row["ids"] == [7, 8, 9]
    assert row["trained"] == [1, 0, 1]
    assert row["log_prob"] == [-1.0, None, -0.25]
    assert row["kl"] == [0.5, None, -0.125]  # k1: log-prob less the reference's
    assert row["value"] == [0.5, None, 0.333333]
    assert row["reward"] == [-0.01, None, 2.0]
    assert row["advantage"] == [-1.25, None, 1.5]
    assert row["return"] == [1.99, None, 2.0]
    assert "entropy" not in row


def test_what_a_run_does_not_have_is_left_out(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    t = response_to([1], group=0)
    row = token_row(t, byte_tokenizer, experience_of(t, rewards=[0.0, 0.0, 1.0], advantages=[0.0, 1.0, 1.0]))
    assert {"kl", "value", "return"} & row.keys() == set()


def test_of_a_long_response_both_ends_are_kept(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    n = MAX_TOKENS + 500
    t = response_to([1, 1], group=0, n_tokens=n)
    t.token_ids[2:] = [i % 200 for i in range(n)]
    row = token_row(t, byte_tokenizer, experience_of(t, values=[float(i) for i in range(n + 2)]))
    assert row["n_tokens"] == n
    half = MAX_TOKENS // 2
    assert row["value"] == [float(i + 2) for i in [*range(half), *range(n - half, n)]]
    assert len(row["texts"]) == len(row["ids"]) == len(row["trained"]) == MAX_TOKENS


class Recorded:
    """Trackers that keep what they get."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.tokens: list[dict[str, Any]] = []

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None:
        self.samples += [{"step": step} | sample for sample in samples]

    def log_tokens(self, step: int, rows: list[dict[str, Any]]) -> None:
        self.tokens += [{"step": step} | row for row in rows]


class Ranks(SingleProcess):
    """Rank ``rank`` of several; ``others`` is what the last of them hands over in each gathering."""

    def __init__(self, rank: int = 0, others: Sequence[Any] = ()) -> None:
        self.rank, self.world_size = rank, 2 if others else 1
        self.others = list(others)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self.others.pop(0)] if self.others else [value]


def sample_log(tokenizer: Any, total_steps: int, comm: Ranks | None = None) -> tuple[SampleLog, Recorded]:
    logged = Recorded()
    return SampleLog(comm or Ranks(), logged, tokenizer, {"a": 0.5}, total_steps), logged  # type: ignore[arg-type]


def filled(trajectories: list[Trajectory], limit: int = 0, **fields: list[float]) -> ReplayBuffer:
    buffer = ReplayBuffer(limit=limit)
    for t in trajectories:
        numbers = [float(a) * t.group for a in t.action_mask]
        buffer.append(experience_of(t, advantages=numbers, ref_log_probs=[-0.75 * a for a in t.action_mask], **fields))
    return buffer


def train_on(log: SampleLog, step: int, items: Sequence[Experience], change: float, entropy: float | None) -> None:
    """Forwards that find each token e^change times as likely as before."""
    for item in items:
        now = torch.where(item.action_mask, item.old_or_rollout_log_probs + change, 0.0)
        log.observe(step, item, now, None if entropy is None else torch.full_like(now, entropy))


def test_ratio_and_entropy_are_of_the_last_training_forward(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    log, logged = sample_log(byte_tokenizer, total_steps=3)
    trajectories = [response_to([i], group=i) for i in range(9)]
    buffer = filled(trajectories)
    for change, entropy in ((0.25, 2.0), (0.5, 1.5)):
        train_on(log, 1, buffer.items, change, entropy)
    log.write(1, trajectories, buffer)
    assert len(logged.samples) == len(logged.tokens) == 4
    for number, (sample, tokens) in enumerate(zip(logged.samples, logged.tokens, strict=True)):
        group = int(sample["prompt"].split("[")[1].rstrip("]"))
        assert sample["sample"] == tokens["sample"] == number
        assert (sample["reward"], sample["rewards"], sample["response_length"]) == (1.0, {"a": 2.0}, 2)
        assert sample["kl"] == pytest.approx(2 * 0.25)
        assert tokens["advantage"] == [group, group]
        assert tokens["ratio"] == [pytest.approx(math.exp(0.5), rel=1e-5)] * 2
        assert tokens["entropy"] == [1.5, 1.5]


def test_what_training_does_not_compute_is_left_out(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Without an entropy bonus the entropy of the forward before training stands, if there was one."""
    log, logged = sample_log(byte_tokenizer, total_steps=3)
    t = response_to([1], group=1)
    for buffer in (filled([t]), filled([t], entropy=[0.0, 0.5, 0.25])):
        train_on(log, 1, buffer.items, 0.0, None)
        log.write(1, [t], buffer)
    log.write(1, [t], filled([t]))  # the actor was not trained
    without, known, frozen = logged.tokens
    assert "entropy" not in without
    assert without["ratio"] == [1.0, 1.0]
    assert known["entropy"] == [0.5, 0.25]
    assert "ratio" not in frozen


def test_steps_that_are_never_written_leave_nothing(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    """Of a loop of one's own that does not report."""
    log, logged = sample_log(byte_tokenizer, total_steps=3)
    before, t = response_to([2], group=2), response_to([1], group=1)
    train_on(log, 1, filled([before]).items, 0.0, None)
    train_on(log, 2, filled([t]).items, 0.0, None)
    assert len(log._trained) == 1
    log.write(2, [t, before], filled([t, before]))
    assert sum("ratio" in row for row in logged.tokens) == 1


def test_forwards_of_other_ranks_are_collected(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    t = response_to([1], group=1)
    elsewhere = {tuple(t.token_ids): {"ratio": [1.0, 2.0, 3.0]}}
    log, logged = sample_log(byte_tokenizer, 3, Ranks(others=[[], elsewhere]))
    log.write(1, [t], filled([t]))
    assert logged.tokens[0]["ratio"] == [2.0, 3.0]
    other, logged = sample_log(byte_tokenizer, 3, Ranks(rank=1))
    other.write(1, [t], filled([t]))
    assert (logged.samples, logged.tokens) == ([], [])


def test_tokens_are_of_a_hundred_steps_of_a_long_run_and_samples_of_all(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    log, logged = sample_log(byte_tokenizer, total_steps=995)
    t = response_to([1], group=1)
    for step in range(1, 996):
        log.write(step, [t], filled([t]))
    assert [row["step"] for row in logged.tokens] == [1, *range(10, 995, 10), 995]
    assert len(logged.samples) == 995


def test_samples_that_the_buffer_has_dropped_are_not_logged(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    log, logged = sample_log(byte_tokenizer, total_steps=3)
    trajectories = [response_to([i], group=i) for i in range(9)]
    log.write(1, trajectories, filled(trajectories, limit=2))
    assert sorted(row["advantage"][0] for row in logged.tokens) == [7.0, 8.0]


def test_held_out_samples_have_the_engines_log_probs(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    log, logged = sample_log(byte_tokenizer, total_steps=3)
    log.write_evaluation(5, [response_to([1], group=0)])
    (sample,), (tokens,) = logged.samples, logged.tokens
    assert sample["evaluation"] is tokens["evaluation"] is True
    assert sample["step"] == tokens["step"] == 5
    assert tokens["log_prob"] == [-0.5, -0.5]
    assert {"kl", "value", "entropy", "advantage", "ratio"} & (tokens.keys() | sample.keys()) == set()
