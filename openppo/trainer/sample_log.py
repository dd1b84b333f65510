"""What is shown of a step to people: a few samples and their tokens, the self-check, distributions."""

import json
import zlib
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from openppo.config import TrainPPOConfig
from openppo.datasets.message_parts import media_url
from openppo.datasets.templates import text_of
from openppo.experience.measure import experience_histograms
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.media import Media, distinct_ids
from openppo.models.log_probs import policy_ratio
from openppo.models.pretrained import eos_token_ids
from openppo.rollout.episodes import by_episode, episode_numbers, episode_reward, whole_rewards
from openppo.rollout.rollout import Rollout
from openppo.tracking import json_form
from openppo.trainer.components import PPOComponents
from openppo.trainer.self_check import check_samples, token_columns, token_texts
from openppo.types import Experience, FinishReason, Prompt, Trajectory

N_SAMPLES = 4  # are logged of a step or of an evaluation
N_TOKEN_STEPS = 100  # steps of a run, about, whose samples are logged token by token
MAX_TOKENS = 2000  # of a longer response are kept, half of them from either end

Row = dict[str, Any]


class StepDiagnostics:
    """Shows steps and evaluations: a few samples of rank 0, histograms. All ranks call every method together.

    Only histograms are computed for it: ``observe`` keeps what training computes anyway.
    """

    def __init__(self, config: TrainPPOConfig, components: PPOComponents, total_steps: int) -> None:
        self.config = config
        self.components = components
        self.total_steps = total_steps
        self.comm, self.tokenizer = components.strategy.comm, components.tokenizer
        self.weights = config.rewards.weights()
        self.trained_on: Sequence[Trajectory] | None = None  # in the last step, until it is shown
        self._checks_next = config.tracking.self_check and self.comm.rank == 0
        self.observed: dict[
            tuple[int, ...], dict[str, Tensor]
        ] = {}  # of the last epoch, (L,) by token ids

    def observe(self, micro: Experience, log_probs: Tensor, entropy: Tensor | None) -> None:
        """Keep ratio and entropy (B, L) of a training forward, if the step under way is logged token by token."""
        if self._shows_tokens(self.components.state.global_step + 1):
            ratio = policy_ratio(
                log_probs.detach(), micro.old_or_rollout_log_probs, micro.action_mask
            ).cpu()
            numbers = {"ratio": ratio} | (
                {} if entropy is None else {"entropy": entropy.detach().cpu()}
            )
            media, masks = micro.media or [()] * len(micro), micro.attention_mask.cpu()
            for row, (ids, mask) in enumerate(zip(micro.sequences.cpu(), masks, strict=True)):
                known = _known(ids[mask].tolist(), media[row])
                self.observed[known] = {name: rows[row][mask] for name, rows in numbers.items()}

    def show_step(self, step: int, buffer: ReplayBuffer, metrics: Mapping[str, float]) -> None:
        """Log what ``step`` has trained on, ``trained_on`` and its experience in ``buffer``; drop both."""
        if self.trained_on is None:  # of an earlier session, which has logged it
            return
        kept = list(self.trained_on)[
            len(self.trained_on) - len(buffer) :
        ]  # without those dropped by --buffer_limit
        # What a limit of its episode cut off was ended neither by the policy nor by --generate_max_len.
        plain = [
            i for i, t in enumerate(kept) if t.truncated == (t.finish_reason is FinishReason.LENGTH)
        ]
        if self._checks_next and plain:
            self._checks_next, rewards = False, self.config.rewards
            eos = eos_token_ids(self.components.actor.module.model, self.tokenizer)
            # a function may reward single tokens, and so may steps and turns
            one_score = (
                rewards.reward_fn is None
                and rewards.remote_rm_url is None
                and rewards.prm_pretrain is None
            )
            one_score = one_score and all(
                trajectory.episode is None for trajectory in self.trained_on
            )
            penalty = metrics.get("kl_coef", 0.0)
            items, labels = [buffer.items[i] for i in plain], [kept[i].prompt.label for i in plain]
            check_samples(
                step,
                items,
                self.tokenizer,
                eos_token_ids=eos,
                kl=self.config.kl,
                kl_coef=penalty,
                labels=labels,
                one_score=one_score,
            )
        chosen = choose(kept) if self.comm.rank == 0 else []
        earned = whole_rewards(kept, self.weights)
        samples = [
            sample_row(kept[i], self.tokenizer, earned[i], experience=buffer.items[i])
            for i in chosen
        ]
        failed = self.trained_on.failed if isinstance(self.trained_on, Rollout) else []
        tokens: list[Row] = []
        if self._shows_tokens(step):
            observed = self._of_all_ranks([kept[i] for i in chosen])
            tokens = [
                token_row(kept[i], self.tokenizer, buffer.items[i], observed=observed[n])
                for n, i in enumerate(chosen)
            ]
            tokens += self._failed_tokens(failed)
        self._log(step, [*samples, *self._failed_rows(failed)], tokens)
        self._dump(step, "train", self.trained_on, weights=self.weights)
        if self.config.tracking.shows_histograms and step % self.config.run.logging_steps == 0:
            of_episodes = [episode_reward(parts, self.weights) for parts in by_episode(kept)]
            histograms = experience_histograms(buffer.items, of_episodes, self.comm)
            self.components.trackers.log_histograms(step, histograms)
        buffer.clear()
        self.trained_on, self.observed = None, {}

    def show_failed(self, step: int, failed: Sequence[Trajectory]) -> None:
        """Log episodes of a ``step`` that is not trained, for which their failures end the run."""
        self._log(step, self._failed_rows(failed), self._failed_tokens(failed))

    def show_evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log samples of an evaluation: what the engine, which sampled them, reported."""
        chosen = choose(trajectories) if self.comm.rank == 0 else []
        weights = self.components.grading.reward_weights
        earned = whole_rewards(trajectories, weights)
        samples = [sample_row(trajectories[i], self.tokenizer, earned[i]) for i in chosen]
        tokens = [token_row(trajectories[i], self.tokenizer) for i in chosen]
        self._log(step, samples, tokens, evaluation=True)
        self._dump(step, "eval", trajectories, weights=weights)

    def _failed_rows(self, failed: Sequence[Trajectory]) -> list[Row]:
        """Lines of samples.jsonl on rank 0, which follow those of episodes that are trained on."""
        return (
            [sample_row(each, self.tokenizer, reward=0.0) for each in failed]
            if self.comm.rank == 0
            else []
        )

    def _failed_tokens(self, failed: Sequence[Trajectory]) -> list[Row]:
        """Their lines of tokens.jsonl: what the model read."""
        return [token_row(each, self.tokenizer) for each in failed] if self.comm.rank == 0 else []

    def _shows_tokens(self, step: int) -> bool:
        return step % -(-self.total_steps // N_TOKEN_STEPS) == 0 or step in (1, self.total_steps)

    def _of_all_ranks(self, chosen: Sequence[Trajectory]) -> list[dict[str, Tensor]]:
        """What training forwards computed of rank 0's ``chosen`` samples, on the ranks that trained on them."""
        own = [_known(t.token_ids, t.prompt.media) for t in chosen]
        wanted = self.comm.all_gather_object(own)[0]
        mine = {ids: self.observed[ids] for ids in wanted if ids in self.observed}
        found = {
            ids: row
            for numbers in self.comm.all_gather_object(mine)
            for ids, row in numbers.items()
        }
        return [found.get(ids, {}) for ids in own]

    def _dump(
        self,
        step: int,
        split: str,
        trajectories: Sequence[Trajectory],
        weights: Mapping[str, float],
    ) -> None:
        """Hand all of this rank's ``trajectories`` to what writes ``--dump_rollouts``, if it is given."""
        if (dump := self.config.dump).dump_rollouts is not None:
            earned = whole_rewards(trajectories, weights)
            rows = [
                {"sample": i}
                | rollout_row(trajectory, self.tokenizer, earned[i], tokens=dump.dump_tokens)
                for i, trajectory in enumerate(trajectories)
            ]
            self.components.trackers.log_rollouts(step, split, rows)

    def _log(
        self, step: int, samples: Sequence[Row], tokens: Sequence[Row], evaluation: bool = False
    ) -> None:
        start, trackers = {"evaluation": True} if evaluation else {}, self.components.trackers
        trackers.log_samples(step, [start | {"sample": i} | row for i, row in enumerate(samples)])
        trackers.log_tokens(step, [start | {"sample": i} | row for i, row in enumerate(tokens)])


def choose(trajectories: Sequence[Trajectory]) -> list[int]:
    """Indices of at most ``N_SAMPLES``: one sample, or two of a group, of the prompts with the smallest checksums.

    So the same prompts return in each pass over the data. Of an episode in several parts the last.
    """
    groups: dict[int, list[int]] = {}
    last_parts = {number: i for i, number in enumerate(episode_numbers(trajectories))}
    for i in sorted(last_parts.values()):
        groups.setdefault(trajectories[i].group, []).append(i)
    prompts = {g: trajectories[i].prompt for g, (i, *_) in groups.items()}
    checksums = {
        g: zlib.crc32(repr(_known(p.token_ids, p.media)).encode()) for g, p in prompts.items()
    }
    return [i for group in sorted(groups, key=checksums.__getitem__) for i in groups[group][:2]][
        :N_SAMPLES
    ]


def _known(token_ids: list[int], media: Media) -> tuple[int, ...]:
    """What tells samples apart: their ids, and images."""
    return tuple(distinct_ids(token_ids, media) if media else token_ids)


def sample_row(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    reward: float,
    experience: Experience | None = None,
) -> Row:
    """A line of samples.jsonl; of the ``experience`` (1, L) that was trained on, if any, the KL.

    ``reward`` is that of the whole episode, of which the trajectory may be a part.
    """
    row = {
        "prompt": trajectory.prompt.text,
        "response": tokenizer.decode(trajectory.response_ids),
        "label": json_form(trajectory.prompt.label),  # Parquet has dates and bytes
        "finish_reason": trajectory.finish_reason.value,
        "reward": reward,
        "rewards": trajectory.scores,
        "response_length": sum(trajectory.action_mask),
    }
    row |= {"extra": trajectory.logged} if trajectory.logged else {}
    if (episode := trajectory.episode) is not None:
        row |= {
            "ending": episode.ending.value,
            "turns": episode.n_turns,
            "messages": json_form(episode.messages),
        }
        row |= {"error": episode.error, "output": episode.output}
        asked = takewhile(lambda message: message["role"] != "assistant", episode.messages)
        row["prompt"] = trajectory.prompt.text or "\n".join(
            text_of(message.get("content")) for message in asked
        )
    read = rendered(trajectory.prompt, tokenizer)
    is_shown = read != row["prompt"] if episode is None else episode.n_turns > 0
    if is_shown:
        row["rendered_prompt"] = read
    kl = None if experience is None else token_columns(experience).get("kl")
    return row if kl is None else row | {"kl": float(kl.sum())}


def rendered(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> str:
    """All that a model reads of a prompt, with special tokens and tools; of an image's equal tokens the first."""
    images = {item.token_id for item in prompt.media}
    parts = []
    for is_image, run in groupby(prompt.token_ids, images.__contains__):
        ids = list(run)
        text = str(
            tokenizer.decode(ids[:1] if is_image else ids, clean_up_tokenization_spaces=False)
        )
        parts.append(f"{text} x {len(ids)}" if is_image else text)
    return "".join(parts)


def rollout_row(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase, reward: float, tokens: bool
) -> Row:
    """A line of ``--dump_rollouts``: the same columns of the same types in any run, so that all files make one table.

    What may be anything in a row of data is text: labels, and as JSON rewards, extras and messages.
    """
    prompt, episode = trajectory.prompt, trajectory.episode
    row = sample_row(trajectory, tokenizer, reward)
    label = row["label"]
    row["label"] = (
        ""
        if label is None
        else label
        if isinstance(label, str)
        else json.dumps(label, ensure_ascii=False)
    )
    row |= {"reward": float(row["reward"]), "rewards": json.dumps(json_form(row["rewards"]))}
    row["extra"] = json.dumps(trajectory.logged, ensure_ascii=False)
    row |= {"ending": "", "turns": 1, "error": "", "output": ""} if episode is None else {}
    row["rendered_prompt"] = row.get("rendered_prompt", "")
    row["messages"] = json.dumps(None if episode is None else row["messages"], ensure_ascii=False)
    row |= {
        "source": prompt.source,
        "task": prompt.task,
        "row": prompt.index,
        "group": trajectory.group,
    }
    if tokens:
        row |= {name: vars(trajectory)[name] for name in ("token_ids", "action_mask", "log_probs")}
    return row


def token_row(
    trajectory: Trajectory,
    tokenizer: PreTrainedTokenizerBase,
    experience: Experience | None = None,
    observed: Mapping[str, Tensor] | None = None,
) -> Row:
    """A line of tokens.jsonl: lists over the response's tokens, null where a token is not trained on.

    Small pictures are by what stands for them in messages. Numbers are of the ``experience`` (1, L), else the engine's,
    and of training forwards that were ``observed``, (L,).
    """
    first, n = len(trajectory.prompt.token_ids), len(trajectory.token_ids)
    mask, columns = (
        trajectory.action_mask,
        {"log_prob": torch.tensor(trajectory.log_probs, dtype=torch.float64)},
    )
    if experience is not None:
        mask = experience.action_mask[0].tolist()
        columns = {name: column[0] for name, column in token_columns(experience).items()}
    columns |= observed or {}
    half = MAX_TOKENS // 2
    kept = (
        list(range(first, n))
        if n - first <= MAX_TOKENS
        else [*range(first, first + half), *range(n - half, n)]
    )
    texts = token_texts(trajectory.token_ids, tokenizer, first)
    row: Row = {"first": first, "n_tokens": n - first, "texts": [texts[t - first] for t in kept]}
    row |= _prompt_columns(trajectory.token_ids[:first], tokenizer)
    row |= {"ids": [trajectory.token_ids[t] for t in kept], "trained": [int(mask[t]) for t in kept]}
    if media := trajectory.prompt.media:
        row["images"] = {media_url(item.key): item.thumbnail for item in media}
    if trajectory.episode is not None:
        row["turns"] = [[start - first, stop - first] for start, stop in trajectory.spans]
    for name, column in columns.items():  # with the six digits that float32 is sure of
        values = column.tolist()
        row[name] = [float(f"{values[t]:.6g}") if mask[t] else None for t in kept]
    return row


def _prompt_columns(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Row:
    """Tokens of a prompt, of one above ``MAX_TOKENS`` the first and the last."""
    if len(ids) <= MAX_TOKENS:
        return {"prompt_ids": ids, "prompt_texts": token_texts(ids, tokenizer)}
    half = MAX_TOKENS // 2
    first, last = token_texts(ids[:half], tokenizer), token_texts(ids, tokenizer, len(ids) - half)
    return {"prompt_ids": ids[:half] + ids[-half:], "prompt_texts": first + last}
