"""What openppo.cli.evaluate runs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from openppo.config import EvaluateConfig
from openppo.models.padding import MicroBatchSize
from openppo.rewards.build import ScorerSetup, build_scorer
from openppo.strategy.inference import InferenceStrategy
from openppo.trainer.batches import pack_where_exact
from openppo.trainer.evaluation.answering import load_policy, load_questions, response_row, sampling_params
from openppo.trainer.evaluation.evaluator import Evaluation, Evaluator, short_names
from openppo.trainer.evaluation.output import check_output, write_rows
from openppo.trainer.startup import check_same, on_all_ranks
from openppo.types import Trajectory


class EvaluateJob:
    """Answers held-out prompts, scores the answers, and writes them if asked to."""

    def __init__(self, config: EvaluateConfig) -> None:
        """Loads everything; ``ValueError`` names the flag of what cannot work."""
        options, judgement = config.prompts, config.judgement
        self.output = None if judgement.output_path is None else check_output(judgement.output_path)
        self.strategy = InferenceStrategy(options.bf16)
        self.tokenizer, prompts = load_questions(options, self.strategy.comm)
        setup = ScorerSetup(
            self.strategy.comm,
            self.strategy.device,
            self.strategy.prepare_frozen,
            prompts,
            options.pretrain,
            MicroBatchSize(options.micro_batch_size),
            options.bf16,
            options.flash_attn,
            judgement.value_head_prefix,
            input_template=options.input_template,
            trust_remote_code=options.trust_remote_code,
            collective=partial(on_all_ranks, self.strategy.comm),
            check_same=partial(check_same, self.strategy.comm),
            pack_where_exact=pack_where_exact if options.flash_attn else None,
        )
        scorer = build_scorer(config.rewards, self.tokenizer, setup)
        _, engine = load_policy(options, self.tokenizer, self.strategy)
        self.evaluator = Evaluator(
            engine,
            scorer,
            self.strategy.comm,
            prompts,
            sampling_params(options),
            options.n_samples_per_prompt,
            config.rewards.pass_threshold(judgement.pass_reward),
            config.rewards.weights(),
            options.seed,
        )

    @property
    def sources(self) -> list[str]:
        """The short name of each prompt's source."""
        names = short_names(prompt.source for prompt in self.evaluator.prompts)
        return [names[prompt.source] for prompt in self.evaluator.prompts]

    def evaluate(self) -> Evaluation:
        """Generate, score, and write; collective."""
        evaluation = self.evaluator.evaluate(nullcontext())
        if self.output is not None:
            n_samples = self.evaluator.n_samples
            rows = [self._row(response, i % n_samples) for i, response in enumerate(evaluation.trajectories)]
            write_rows(self.output, rows, self.strategy.comm)
        return evaluation

    def close(self) -> None:
        """Leave the process group."""
        self.strategy.close()

    def _row(self, response: Trajectory, sample: int) -> dict[str, Any]:
        reward = response.total_reward(self.evaluator.reward_weights)
        row = response_row(response, sample, self.tokenizer) | {"rewards": response.scores, "reward": reward}
        return row if self.evaluator.pass_reward is None else row | {"passed": self.evaluator.passes(reward)}
