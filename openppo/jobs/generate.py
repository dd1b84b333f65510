"""The generate command: responses to prompts, with their log-probs."""

from pathlib import Path

import torch

from openppo.config import GenerateConfig
from openppo.jobs.prompts import PromptsJob, write_rows
from openppo.model_inputs import ModelInputs
from openppo.rollout.driver import EngineDriver
from openppo.rollout.players import ResponsePlayer
from openppo.sources.groups import GroupPlayer
from openppo.tracking import progress_bar
from openppo.types import Sample


class GenerateJob(PromptsJob):
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
