"""The generate and evaluate commands: models at prompts, without training."""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from openppo.config import EvaluateConfig, GenerateConfig, PromptsConfig
from openppo.config.rewards import NO_REWARD
from openppo.datasets import load_mixed_rows, load_prompts, load_tasks, seed_prompts, shard
from openppo.datasets.image_families import check_images
from openppo.datasets.media import RowVision
from openppo.datasets.vision import Vision
from openppo.experience.reward_names import RewardNames
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.model_inputs import ModelInputs
from openppo.models.batching import MicroBatchSize
from openppo.models.pretrained import check_token_ids
from openppo.rewards.build import ScorerSetup
from openppo.rewards.response_text import response_text
from openppo.rewards.scoring import answer_text
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.driver import EngineDriver
from openppo.rollout.players import PlayerParts, Players, ResponsePlayer
from openppo.rollout.policy import FrozenPolicy
from openppo.rollout.sampling import decoder, sampling_params, text_before_stop
from openppo.sources.groups import GroupInput, GroupPlayer, play_together
from openppo.sources.held_out import held_out_group
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.weights import WholeWeights
from openppo.tracking import Metrics, progress_bar
from openppo.tracking.console import write_line
from openppo.tracking.output_files import check_output_file, replacing
from openppo.trainer.context_limits import check_context
from openppo.trainer.engine_check import check_like, check_sampling
from openppo.trainer.evaluation.evaluator import Grading, evaluation_table
from openppo.trainer.evaluation.passing import PassWatch
from openppo.trainer.policy_inputs import policy_vision
from openppo.trainer.row_loading import once_per_host, tokenizing
from openppo.types import Comm, Prompt, Sample, StopCheck


class _Job:
    """Tokenizer, prompts and process group of a command; ``_load_policy`` adds model and engine."""

    def __init__(
        self, options: PromptsConfig, output_path: str | None, players: Players | None = None
    ) -> None:
        self.options = options
        self.output = None if output_path is None else check_output(options, output_path)
        self.strategy = InferenceStrategy(options.bf16, fused_kernels=options.fused_kernels)
        self.comm = self.strategy.comm
        self.policy = FrozenPolicy(options)
        self.tokenizer = self.policy.tokenizer
        if players is not None:
            players.check(self.tokenizer)
        self.prompts = once_per_host(self.comm, options, lambda: self._load_prompts(players))
        self._check_prompts()
        self.params = sampling_params(options)

    def _check_prompts(self) -> None:
        """Refuse prompts that the model cannot read."""
        config = self.policy.config
        model = f"--pretrain {self.options.pretrain}"
        rows = [prompt.token_ids for prompt in self.prompts]
        longest = max(map(len, rows))
        check_context(config, model, longest, new_tokens=self.options.generate_max_len)
        check_token_ids(config, model, self.tokenizer, rows=rows)

    def _load_prompts(self, players: Players | None) -> list[Prompt]:
        """Load the rows of ``--prompt_data`` as prompts, or as tasks for ``players``."""
        options = self.options
        if not options.prompt_data:
            return []
        rows = load_mixed_rows(
            options,
            options.prompt_data,
            flag="--prompt_data",
            split=options.prompt_split,
            seed=options.seed,
        )
        load_rows = load_prompts if players is None or players.needs_prompts else load_tasks
        return load_rows(rows, self.tokenizer, options, tokenizing(self.comm), self._vision())

    def _vision(self) -> RowVision:
        """Make the reader of the model's images."""
        return policy_vision(self.options, self.tokenizer, self.policy.config, options=self.options)

    def close(self) -> None:
        """Wait for all ranks."""
        self.strategy.close()

    def _load_policy(self) -> None:
        """Load the model of ``--pretrain`` on this rank's device, and an engine that samples from it."""
        options = self.options
        policy = self.policy
        device = self.strategy.device
        policy.load(
            self.strategy.prepare_frozen,
            options.micro_batch_size,
            show_progress=self.strategy.is_main,
            new_recorder=choose_recorder(options.cuda_graphs, policy.config, device),
        )
        if any(prompt.media for prompt in self.prompts):
            check_images(policy.config, f"--pretrain {options.pretrain}")

        if options.engine_check == "on":
            kind = ("hf", not options.bf16)
            check_like(
                policy.engine,
                lambda engines: check_sampling(
                    options.pretrain,
                    policy.actor,
                    engines,
                    weights=None,
                    device=device,
                    kind=kind,
                ),
            )

    def _weights(self) -> AbstractContextManager[None]:
        """Inside, the engine may sample; afterwards its memory is free for other work."""
        return self.policy.engine.with_weights(WholeWeights(self.policy.actor.model))

    def _played(self, player: GroupPlayer, eval_seed: int = 0) -> list[Sample]:
        """Play this rank's share of the prompts; return its samples, those of one prompt beside each other."""
        groups: list[GroupInput] = []
        for number, prompt in enumerate(self.prompts):
            group = held_out_group(
                prompt,
                number,
                params=self.params,
                n_samples=self.options.n_samples_per_prompt,
                seed=self.options.seed,
                eval_seed=eval_seed,
            )
            groups.append(group)

        rank_groups = shard(groups, self.comm.rank, self.comm.world_size)
        with self._weights():
            played = play_together(player, rank_groups, self.comm, metrics=Metrics())
        return [sample for group in played for sample in group.members]

    def _row(self, sample: Sample, number: int) -> dict[str, Any]:
        """Make the line of this rank's sample ``number``; its text ends before a stop string."""
        ids = sample.last.response_ids
        text = response_text(sample, self.tokenizer)
        return {
            "source": sample.prompt.source,
            "row": sample.prompt.index,
            "sample": number % self.options.n_samples_per_prompt,
            "prompt": sample.prompt.text,
            "response": text_before_stop(text, ids, self.params, decode=decoder(self.tokenizer)),
            "finish_reason": sample.last.finish_reason.value,
            "n_tokens": len(ids),
            "label": sample.prompt.label,
        }


class GenerateJob(_Job):
    """Writes a line of JSON for each response, in the order of the prompts."""

    output: Path

    def __init__(self, config: GenerateConfig) -> None:
        """Load everything; ``ValueError`` names the flag to change."""
        super().__init__(config, config.output_path)
        self._load_policy()
        driver = EngineDriver(self.policy.engine)
        self.player = GroupPlayer({"": ResponsePlayer(driver)}, driver)

    def fit(self) -> None:
        """Generate and write; ``ValueError`` if the engine refuses a prompt."""
        responses = self._played(self.player)
        refused = [sample.episode for sample in responses if sample.episode is not None]
        if refused:
            raise ValueError(f"--prompt_data: {refused[0].error}")

        rows = []
        shown = progress_bar(responses, "log-probs", enabled=self.strategy.is_main)
        for number, response in enumerate(shown):
            row = self._row(response, number)
            row["mean_log_prob"] = self._mean_log_prob(response)
            rows.append(row)
        write_rows(self.output, rows, self.comm)

    def close(self) -> None:
        """End the player and leave the process group."""
        self.player.close()
        super().close()

    @torch.no_grad()
    def _mean_log_prob(self, sample: Sample) -> float:
        """Mean log-prob of the response's tokens under the model, at temperature 1."""
        # (1, L): the logits of a batch might not fit
        inputs = ModelInputs.of([sample.last], pad_token_id=0).to(self.strategy.device)
        mask = torch.tensor([sample.last.action_mask], device=self.strategy.device)
        log_probs = self.policy.actor(inputs, mask)
        return float(log_probs.sum() / mask.sum())


class EvaluateJob(_Job):
    """Generates responses to held-out prompts, scores them, and writes them if asked to."""

    def __init__(self, config: EvaluateConfig, source: Players | None = None) -> None:
        """Load everything; ``source`` plays episodes. ``ValueError`` names the flag to change."""
        self.agents = config.agents
        super().__init__(config, config.output_path, source)
        if source is not None and not (config.rewards.names() or source.gives_rewards):
            raise ValueError(config.agents.why_no_reward + NO_REWARD)
        setup = ScorerSetup(
            config.rewards,
            self.tokenizer,
            self.strategy,
            prompts=self.prompts,
            actor=config.pretrain,
            size=MicroBatchSize(config.micro_batch_size),
            loading=self.policy.loading,
            value_head_prefix=config.value_head_prefix,
            input_template=config.input_template,
            episodes=source is not None,
        )
        self.scorer = setup.build() if config.rewards.names() else None
        self._load_policy()
        driver = EngineDriver(self.policy.engine)
        player = ResponsePlayer(driver) if source is None else source.make(self._parts(driver))
        self.player = GroupPlayer({"": player}, driver)
        self.grading = Grading.of(self.comm, config.rewards, config)

    def fit(self) -> None:
        """Evaluate, and print the table of metrics."""
        metrics = self.evaluate()
        if self.strategy.is_main:
            lines = evaluation_table(metrics, [prompt.source for prompt in self.prompts])
            write_line("\n".join(lines), sys.stdout)

    def evaluate(self) -> dict[str, float]:
        """Generate, score and write, and return the metrics, the same on all ranks."""
        sampled = self._played(self.player, self.agents.eval_seed)
        responses = begin_scoring(self.scorer, sampled, StopCheck(), prefix="eval_")

        if self.output is not None:
            rows = [self._scored_row(sample, i) for i, sample in enumerate(responses)]
            write_rows(self.output, rows, self.comm)
        check_rewarded(responses, self.comm)
        RewardNames(self.grading.reward_weights, self.comm, self.grading.pass_on).check(responses)
        PassWatch(self.comm).look(self.grading, responses, is_last=True)
        return self.grading.measure(responses)

    def close(self) -> None:
        """End the player and leave the process group."""
        self.player.close()
        super().close()

    def _load_prompts(self, players: Players | None) -> list[Prompt]:
        prompts = super()._load_prompts(players) or seed_prompts(self.agents.eval_n_envs)
        if players is not None:
            players.check_prompts(prompts)
        return prompts

    def _parts(self, driver: EngineDriver) -> PlayerParts:
        """Return the parts of an agent's player; episodes end where the model's context does."""
        options = self.options
        longest = self.agents.episode_max_len or options.prompt_max_len + options.generate_max_len
        return PlayerParts(
            driver,
            self.policy.tokenizer,
            self.policy.eos_token_ids,
            comm=self.comm,
            longest=longest,
            context=self.policy.context,
            has_rewards=self.scorer is not None,
            vision=self._vision_of_agents(),
        )

    def _vision_of_agents(self) -> Vision | None:
        """Make the reader of agents' images; None where the model reads none."""
        return self._vision().for_agents(self.policy.config, f"--pretrain {self.options.pretrain}")

    def _scored_row(self, sample: Sample, number: int) -> dict[str, Any]:
        """Make the line of this rank's sample ``number``, with its rewards."""
        episode = sample.episode
        row = self._row(sample, number)
        row["rewards"] = sample.scores
        row["reward"] = sample.total_reward(self.grading.reward_weights)
        if sample.logged:
            row["extra"] = sample.logged
        if episode is not None:
            row["response"] = answer_text(sample, self.tokenizer)
            row["n_tokens"] = sample.n_actions
            row["ending"] = episode.ending.value
            row["turns"] = episode.n_turns
            row["messages"] = episode.messages
            row["error"] = episode.error
            row["output"] = episode.output
        if self.grading.pass_reward is not None:
            row["passed"] = self.grading.passes(sample)
        return row


def check_output(options: PromptsConfig, path: str) -> Path:
    """Return the file of ``--output_path``; ``ValueError`` if it cannot be written, or must not be overwritten."""
    sources = [name for name in (options.prompt_data or "").split(",") if name]
    inputs = [("--prompt_data", name) for name in sources]
    inputs.append(("--pretrain", options.pretrain))
    return check_output_file(path, "--output_path", is_ours=_is_row, inputs=inputs)


def _is_row(beginning: bytes) -> bool:
    """True for the beginning of a file of ``write_rows``."""
    return beginning.startswith(b'{"source": ') and b', "prompt": ' in beginning


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], comm: Comm) -> None:
    """Write the rows of all ranks as lines of JSON, in rank order; ``path`` is never incomplete."""
    rows_of_ranks = comm.all_gather_object(rows)
    if comm.rank != 0:
        return
    with replacing(path) as new, new.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in chain.from_iterable(rows_of_ranks):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
