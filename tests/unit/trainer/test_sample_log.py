"""Logged samples: which, and what is said of each token, against numbers made by hand."""

import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Sequence
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
from openppo.tracking import JSONLTracker
from openppo.trainer.sample_log import MAX_TOKENS, StepDiagnostics, choose, sample_row, token_row
from openppo.trainer.self_check import token_texts
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


def test_the_same_prompts_are_chosen_from_any_batch() -> None:
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
    first, second, third, fourth = (groups[i].group for i in choose(groups))
    assert first == second != third == fourth
    assert choose([]) == []
    assert choose([response_to([1], 0)]) == [0]


def test_a_label_of_any_type_is_json(byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    day, tracker = datetime.date(2026, 11, 22), JSONLTracker(tmp_path)
    for label in ("text", {"a": [1, 2.5, None, True]}, day, Decimal("1.10"), b"\xff", (1, {day: math.nan, 2: "b"})):
        prompt = Prompt("p", [1, 2], label=label)
        sample = sample_row(dataclasses.replace(response_to([1, 2], 0), prompt=prompt), byte_tokenizer, {})
        assert json.loads(json.dumps(sample)) == sample
        tracker.log_samples(1, [sample, sample | {"label": label}])
    lines = [json.loads(line)["label"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines[::2] == lines[1::2]


def test_bytes_wait_for_the_end_of_their_character(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokenizer("aé€b")["input_ids"]
    assert token_texts(ids, byte_tokenizer) == ["a", "", "é", "", "", "€", "b"]
    assert token_texts(ids, byte_tokenizer, first=3) == ["", "", "€", "b"]
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
    assert {name: value for name, value in row.items() if name != "texts"} == {
        "first": 2,
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
    without = token_row(t, byte_tokenizer, experience_of(t, rewards=[0.0] * 5, advantages=[0.0] * 5))
    assert {"kl", "value", "return"} & without.keys() == set(), "what a run does not have is left out"


def test_of_a_long_response_both_ends_are_kept(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    n = MAX_TOKENS + 500
    t = response_to([1, 1], group=0, n_tokens=n)
    t.token_ids[2:] = [i % 200 for i in range(n)]
    row = token_row(t, byte_tokenizer, experience_of(t, values=[float(i) for i in range(n + 2)]))
    assert row["n_tokens"] == n
    half = MAX_TOKENS // 2
    assert row["value"] == [float(i + 2) for i in [*range(half), *range(n - half, n)]]
    assert len(row["texts"]) == len(row["ids"]) == len(row["trained"]) == MAX_TOKENS


class Ranks(SingleProcess):
    """Rank ``rank`` of several; ``others`` is what the last of them hands over in each gathering."""

    def __init__(self, rank: int = 0, others: Sequence[Any] = ()) -> None:
        self.rank, self.world_size = rank, 2 if others else 1
        self.others = list(others)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, self.others.pop(0)] if self.others else [value]


class View(StepDiagnostics):
    """Keeps what it logs."""

    def __init__(self, tokenizer: Any, total_steps: int, comm: Any) -> None:
        self.samples: list[dict[str, Any]] = []
        self.tokens: list[dict[str, Any]] = []
        trackers = SimpleNamespace(
            log_samples=lambda step, rows: self.samples.extend({"step": step} | row for row in rows),
            log_tokens=lambda step, rows: self.tokens.extend({"step": step} | row for row in rows),
        )
        parts: Any = SimpleNamespace(
            strategy=SimpleNamespace(comm=comm), tokenizer=tokenizer, trackers=trackers, state=SimpleNamespace()
        )
        given = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "self_check": False}
        super().__init__(from_options(TrainPPOConfig, **given), parts, total_steps)
        self.weights = {"a": 0.5}

    def train_on(
        self, step: int, items: Sequence[Experience], change: float = 0.0, entropy: float | None = 1.5
    ) -> None:
        """Forwards that find each token e^change times as likely as before."""
        self.components.state.global_step = step - 1
        for item in items:
            now = torch.where(item.action_mask, item.old_or_rollout_log_probs + change, 0.0)
            self.observe(item, now, None if entropy is None else torch.full_like(now, entropy))

    def show(self, step: int, trajectories: list[Trajectory], buffer: ReplayBuffer) -> None:
        self.trained_on = trajectories
        self.show_step(step, buffer, {})


@pytest.fixture
def view_of(byte_tokenizer: PreTrainedTokenizerFast) -> Callable[..., View]:
    """The view of a run of so many steps."""
    return lambda total_steps=3, comm=None: View(byte_tokenizer, total_steps, comm or Ranks())


def filled(trajectories: list[Trajectory], limit: int = 0, **fields: list[float]) -> ReplayBuffer:
    buffer = ReplayBuffer(limit=limit)
    for t in trajectories:
        numbers = [float(a) * t.group for a in t.action_mask]
        buffer.append(experience_of(t, advantages=numbers, ref_log_probs=[-0.75 * a for a in t.action_mask], **fields))
    return buffer


def test_ratio_and_entropy_are_of_the_last_training_forward(view_of: Callable[..., View]) -> None:
    view, trajectories = view_of(), [response_to([i], group=i) for i in range(9)]
    buffer = filled(trajectories)
    for change, entropy in ((0.25, 2.0), (0.5, 1.5)):
        view.train_on(1, buffer.items, change, entropy)
    view.show(1, trajectories, buffer)
    assert len(view.samples) == len(view.tokens) == 4
    for number, (sample, tokens) in enumerate(zip(view.samples, view.tokens, strict=True)):
        group = int(sample["prompt"].split("[")[1].rstrip("]"))
        assert sample["sample"] == tokens["sample"] == number
        assert (sample["reward"], sample["rewards"], sample["response_length"]) == (1.0, {"a": 2.0}, 2)
        assert sample["kl"] == pytest.approx(2 * 0.25)
        assert tokens["advantage"] == [group, group]
        assert tokens["ratio"] == [pytest.approx(math.exp(0.5), rel=1e-5)] * 2
        assert tokens["entropy"] == [1.5, 1.5]


def test_what_training_does_not_compute_is_left_out(view_of: Callable[..., View]) -> None:
    """Without an entropy bonus the entropy of the forward before training stands, if there was one."""
    view, t, before = view_of(), response_to([1], group=1), response_to([2], group=2)
    view.train_on(1, filled([before, t]).items)  # a step that a loop of one's own never reports
    for buffer in (filled([t]), filled([t], entropy=[0.0, 0.5, 0.25])):
        view.train_on(3, buffer.items, entropy=None)
        view.show(3, [t], buffer)
    view.show(3, [t], filled([t]))  # the actor was not trained
    without, known, frozen = view.tokens
    assert "entropy" not in without
    assert without["ratio"] == [1.0, 1.0]
    assert known["entropy"] == [0.5, 0.25]
    assert "ratio" not in frozen


def test_forwards_of_other_ranks_are_collected(view_of: Callable[..., View]) -> None:
    t = response_to([1], group=1)
    elsewhere = {tuple(t.token_ids): {"ratio": torch.tensor([1.0, 2.0, 3.0])}}
    view, other = view_of(comm=Ranks(others=[[], elsewhere])), view_of(comm=Ranks(rank=1))
    for each in (view, other):
        each.show(1, [t], filled([t]))
    assert view.tokens[0]["ratio"] == [2.0, 3.0]
    assert (other.samples, other.tokens) == ([], [])


def test_tokens_are_of_a_hundred_steps_and_samples_of_all(view_of: Callable[..., View]) -> None:
    view, t = view_of(total_steps=995), response_to([1], group=1)
    for step in range(1, 996):
        view.show(step, [t], filled([t]))
    assert [row["step"] for row in view.tokens] == [1, *range(10, 995, 10), 995]
    assert len(view.samples) == 995


def test_samples_that_the_buffer_has_dropped_are_not_logged(view_of: Callable[..., View]) -> None:
    view, trajectories = view_of(), [response_to([i], group=i) for i in range(9)]
    view.show(1, trajectories, filled(trajectories, limit=2))
    assert sorted(row["advantage"][0] for row in view.tokens) == [7.0, 8.0]


def test_held_out_samples_have_the_engines_log_probs(view_of: Callable[..., View]) -> None:
    view = view_of()
    view.show_evaluation(5, [response_to([1], group=0)])
    (sample,), (tokens,) = view.samples, view.tokens
    assert sample["evaluation"] is tokens["evaluation"] is True
    assert sample["step"] == tokens["step"] == 5
    assert tokens["log_prob"] == [-0.5, -0.5]
    assert {"kl", "value", "entropy", "advantage", "ratio"} & (tokens.keys() | sample.keys()) == set()
