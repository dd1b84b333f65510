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
from openppo.datasets import load_mixed_rows, load_prompts, load_tasks, seed_prompts
from openppo.datasets.media import RowVision
from openppo.datasets.vision import Vision
from openppo.experience.reward_names import RewardNames
from openppo.experience.scoring import begin_scoring, check_rewarded
from openppo.media import check_images
from openppo.models.batching import MicroBatchSize
from openppo.models.pretrained import check_token_ids
from openppo.rewards.build import ScorerSetup
from openppo.rewards.response_text import response_text
from openppo.rewards.scoring import answer_text
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.policy import FrozenPolicy
from openppo.rollout.rollout import (
    EngineSampler,
    Sampler,
    SampleRequest,
    SamplerMaker,
    SamplerParts,
    by_episode,
    episode_reward,
    sample_trajectories,
)
from openppo.rollout.sampling import decoder, sampling_params, text_before_stop
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
from openppo.types import Comm, Prompt, StopCheck, Trajectory


class _Job:
    """Tokenizer, prompts and process group of a command; ``_load_policy`` adds model and engine."""

    def __init__(
        self, options: PromptsConfig, output_path: str | None, maker: SamplerMaker | None = None
    ) -> None:
        self.options, model = options, f"--pretrain {options.pretrain}"
        self.output = None if output_path is None else check_output(options, output_path)
        self.strategy = InferenceStrategy(options.bf16, fused_kernels=options.fused_kernels)
        self.comm, self.policy = self.strategy.comm, FrozenPolicy(options)
        self.tokenizer = tokenizer = self.policy.tokenizer
        if maker is not None:
            maker.check(tokenizer)
        self.prompts = once_per_host(self.comm, options, lambda: self._load_prompts(maker))
        ids = [prompt.token_ids for prompt in self.prompts]
        check_context(
            self.policy.config, model, max(map(len, ids)), new_tokens=options.generate_max_len
        )
        check_token_ids(self.policy.config, model, tokenizer, rows=ids)
        self.sampling = (
            self.prompts,
            sampling_params(options),
            options.n_samples_per_prompt,
            options.seed,
        )

    def _load_prompts(self, maker: SamplerMaker | None) -> list[Prompt]:
        """Rows of ``--prompt_data`` as prompts, or as tasks of what ``maker`` plays."""
        options = self.options
        flag = "--prompt_data"
        split = self.options.prompt_split
        if not options.prompt_data:
            return []
        rows = load_mixed_rows(
            options, options.prompt_data, flag=flag, split=split, seed=options.seed
        )
        load_rows = load_prompts if maker is None or maker.needs_prompts else load_tasks
        return load_rows(rows, self.tokenizer, options, tokenizing(self.comm), self._vision())

    def _vision(self) -> RowVision:
        """What reads images for the model."""
        return policy_vision(self.options, self.tokenizer, self.policy.config, options=self.options)

    def close(self) -> None:
        """Wait for all ranks."""
        self.strategy.close()

    def _load_policy(self) -> None:
        """Load the model of ``--pretrain`` on this rank's device, and an engine that samples from it."""
        options, policy = self.options, self.policy
        recorder = choose_recorder(options.cuda_graphs, policy.config, self.strategy.device)
        more = {"show_progress": self.strategy.is_main, "new_recorder": recorder}
        policy.load(self.strategy.prepare_frozen, options.micro_batch_size, **more)
        if any(prompt.media for prompt in self.prompts):
            check_images(policy.config, f"--pretrain {options.pretrain}")
        if options.engine_check == "on":
            given = None, self.strategy.device, ("hf", not options.bf16)
            check_like(
                policy.engine, lambda e: check_sampling(options.pretrain, policy.actor, e, *given)
            )

    def _weights(self) -> AbstractContextManager[None]:
        """Inside, the engine may sample; afterwards its memory is for other work."""
        return self.policy.engine.with_weights(WholeWeights(self.policy.actor.model))

    def _row(self, response: Trajectory, number: int) -> dict[str, Any]:
        """What is written of the response of that number on this rank; its text ends before a stop string."""
        _, params, n_samples, _ = self.sampling
        ids = response.response_ids
        text = response_text(response, self.tokenizer)
        return {
            "source": response.prompt.source,
            "row": response.prompt.index,
            "sample": number % n_samples,
            "prompt": response.prompt.text,
            "response": text_before_stop(text, ids, params, decode=decoder(self.tokenizer)),
            "finish_reason": response.finish_reason.value,
            "n_tokens": len(ids),
            "label": response.prompt.label,
        }


class GenerateJob(_Job):
    """Writes a line of JSON for each response, in the order of the prompts."""

    output: Path

    def __init__(self, config: GenerateConfig) -> None:
        """Load everything; ``ValueError`` names the flag to change."""
        super().__init__(config, config.output_path)
        self._load_policy()

    def fit(self) -> None:
        """Generate and write."""
        with self._weights():
            responses = sample_trajectories(self.policy.engine, *self.sampling, comm=self.comm)
        shown = progress_bar(responses, "log-probs", enabled=self.strategy.is_main)
        rows = [
            self._row(t, i) | {"mean_log_prob": self._mean_log_prob(t)} for i, t in enumerate(shown)
        ]
        write_rows(self.output, rows, self.comm)

    @torch.no_grad()
    def _mean_log_prob(self, response: Trajectory) -> float:
        """Of the response's tokens under the model itself: at temperature 1, however they were sampled."""
        ids = torch.tensor([response.token_ids], device=self.strategy.device)
        mask = torch.tensor([response.action_mask], device=self.strategy.device)
        media = [response.prompt.media]  # below (1, L): in a batch the logits might not fit
        log_probs = self.policy.actor(ids, torch.ones_like(mask), mask, media=media)
        return float(log_probs.sum() / mask.sum())


class EvaluateJob(_Job):
    """Generates responses to held-out prompts, scores them, and writes them if asked to."""

    def __init__(self, config: EvaluateConfig, source: SamplerMaker | None = None) -> None:
        """Load everything, ``source`` to play episodes; ``ValueError`` names the flag to change."""
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
        self.sampler: Sampler = EngineSampler(self.policy.engine, self.comm)
        if source is not None:
            self.sampler = source.make(self._parts())
        self.grading = Grading.of(self.comm, config.rewards, config)

    def fit(self) -> None:
        """Evaluate, and print the table of metrics."""
        metrics = self.evaluate()
        if self.strategy.is_main:
            lines = evaluation_table(metrics, [prompt.source for prompt in self.prompts])
            write_line("\n".join(lines), sys.stdout)

    def evaluate(self) -> dict[str, float]:
        """Generate, score, and write; the metrics, the same on all ranks."""
        with self._weights():
            sampled = self.sampler.sample(
                SampleRequest(*self.sampling, 0, Metrics(), evaluation=True)
            )
        responses = begin_scoring(self.scorer, sampled, StopCheck(), prefix="eval_")
        if self.output is not None:
            episodes = by_episode(list(responses))
            write_rows(
                self.output,
                [self._episode_row(parts, i) for i, parts in enumerate(episodes)],
                self.comm,
            )
        check_rewarded(responses, self.comm)
        RewardNames(self.grading.reward_weights, self.comm, self.grading.pass_on).check(responses)
        PassWatch(self.comm).look(self.grading, responses, is_last=True)
        return self.grading.measure(responses)

    def close(self) -> None:
        """End the sampler and leave the process group."""
        self.sampler.close()
        super().close()

    def _load_prompts(self, maker: SamplerMaker | None) -> list[Prompt]:
        prompts = super()._load_prompts(maker) or seed_prompts(self.agents.eval_n_envs)
        if maker is not None:
            maker.check_prompts(prompts)
        return prompts

    def _parts(self) -> SamplerParts:
        """What an agent's sampler works with: its episodes end where the model's context does."""
        longest = (
            self.agents.episode_max_len
            or self.options.prompt_max_len + self.options.generate_max_len
        )
        policy, has_rewards = self.policy, self.scorer is not None
        sampling = policy.engine, policy.tokenizer, policy.eos_token_ids, self.comm, StopCheck()
        vision = self._vision_of_agents()
        return SamplerParts(
            *sampling, longest, policy.context, has_rewards=has_rewards, vision=vision
        )

    def _vision_of_agents(self) -> Vision | None:
        """What reads their images; None where nothing can."""
        return self._vision().for_agents(self.policy.config, f"--pretrain {self.options.pretrain}")

    def _episode_row(self, parts: Sequence[Trajectory], number: int) -> dict[str, Any]:
        """What is written of a response, or of an episode of that number on this rank."""
        response, reward = parts[-1], episode_reward(parts, self.grading.reward_weights)
        row = self._row(response, number) | {"rewards": response.scores, "reward": reward}
        row |= {"extra": response.logged} if response.logged else {}
        if (episode := response.episode) is not None:
            row |= {
                "response": answer_text(response, self.tokenizer),
                "n_tokens": sum(sum(t.action_mask) for t in parts),
            }
            row |= {
                "ending": episode.ending.value,
                "turns": episode.n_turns,
                "messages": episode.messages,
            }
            row |= {"error": episode.error, "output": episode.output}
        return (
            row
            if self.grading.pass_reward is None
            else row | {"passed": self.grading.passes(parts)}
        )


def check_output(options: PromptsConfig, path: str) -> Path:
    """The file of ``--output_path``; ``ValueError`` if nothing can be written there, or something would be lost."""
    sources = [name for name in (options.prompt_data or "").split(",") if name]
    inputs = [("--prompt_data", name) for name in sources] + [("--pretrain", options.pretrain)]
    return check_output_file(path, "--output_path", is_ours=_is_row, inputs=inputs)


def _is_row(beginning: bytes) -> bool:
    """Test for the beginning of a file that ``write_rows`` has written."""
    return beginning.startswith(b'{"source": ') and b', "prompt": ' in beginning


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], comm: Comm) -> None:
    """Write the rows of all ranks, in rank order, as lines of JSON; a file of the name ``path`` is always whole."""
    rows_of_ranks = comm.all_gather_object(rows)
    if comm.rank != 0:
        return
    with replacing(path) as new, new.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in chain.from_iterable(rows_of_ranks):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
