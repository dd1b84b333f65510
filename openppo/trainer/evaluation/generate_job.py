"""What openppo.cli.generate runs."""

from __future__ import annotations

import torch

from openppo.config import GenerateConfig
from openppo.strategy.inference import InferenceStrategy
from openppo.tracking import progress_bar
from openppo.trainer.evaluation.answering import load_policy, load_questions, response_row, sampling_params
from openppo.trainer.evaluation.evaluator import answer
from openppo.trainer.evaluation.output import check_output, write_rows
from openppo.types import Trajectory


class GenerateJob:
    """Writes a line of JSON for each response, in the order of the prompts."""

    def __init__(self, config: GenerateConfig) -> None:
        """Loads everything; ``ValueError`` names the flag of what cannot work."""
        self.options = config.prompts
        self.output = check_output(config.output.output_path)
        self.strategy = InferenceStrategy(self.options.bf16)
        self.tokenizer, self.prompts = load_questions(self.options, self.strategy.comm)
        self.actor, self.engine = load_policy(self.options, self.tokenizer, self.strategy)

    def fit(self) -> None:
        """Generate and write."""
        options, comm = self.options, self.strategy.comm
        n_samples = options.n_samples_per_prompt
        responses = answer(self.engine, comm, self.prompts, sampling_params(options), n_samples, options.seed)
        rows = [
            response_row(response, i % n_samples, self.tokenizer) | {"mean_log_prob": self._mean_log_prob(response)}
            for i, response in enumerate(progress_bar(responses, "log-probs", enabled=self.strategy.is_main))
        ]
        write_rows(self.output, rows, comm)

    def close(self) -> None:
        """Leave the process group."""
        self.strategy.close()

    @torch.no_grad()
    def _mean_log_prob(self, response: Trajectory) -> float:
        """Of the response's tokens under the model itself: at temperature 1, however they were sampled."""
        ids = torch.tensor([response.token_ids], device=self.strategy.device)
        mask = torch.tensor([response.action_mask], device=self.strategy.device)
        log_probs = self.actor(ids, torch.ones_like(mask), mask)  # (1, L); in a batch the logits might not fit
        return float(log_probs.sum() / mask.sum())
