"""Losses of SFT, reward models and process reward models. Needs torch only."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openppo.models.log_probs import log_probs_from_logits, masked_mean

IGNORE_INDEX = -100


class GPTLMLoss(nn.Module):
    """Next-token cross entropy: logits at t against the label at t + 1; labels of ``IGNORE_INDEX`` do not count.

    Over the whole vocabulary: texts may have ids that a policy never samples.
    """

    IGNORE_INDEX = IGNORE_INDEX

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """``logits`` (B, L, V), ``labels`` int64 (B, L); scalar mean over counted labels, 0 if there is none."""
        counted = labels[:, 1:] != self.IGNORE_INDEX
        log_probs = log_probs_from_logits(
            logits[:, :-1], labels[:, 1:].masked_fill(~counted, 0)
        )  # float32, (B, L - 1)
        return -masked_mean(log_probs, counted)


class PairWiseLoss(nn.Module):
    """Bradley-Terry loss -log sigmoid(r_chosen - r_rejected - margin), averaged over pairs (arXiv 2203.02155)."""

    def forward(
        self, chosen_reward: Tensor, reject_reward: Tensor, margin: Tensor | None = None
    ) -> Tensor:
        """Rewards and optional ``margin`` of shape (B,); scalar."""
        difference = chosen_reward - reject_reward
        return -F.logsigmoid(difference if margin is None else difference - margin).mean()


class LogExpLoss(nn.Module):
    """log(1 + exp(r_rejected - r_chosen + margin)), averaged over pairs (arXiv 2204.05862): as PairWiseLoss."""

    def forward(
        self, chosen_reward: Tensor, reject_reward: Tensor, margin: Tensor | None = None
    ) -> Tensor:
        """Rewards and optional ``margin`` of shape (B,); scalar."""
        difference = reject_reward - chosen_reward
        return F.softplus(difference if margin is None else difference + margin).mean()


class PRMLoss(nn.Module):
    """Cross entropy of a process reward model at the placeholder tokens that end each step.

    ``labels`` are given at the placeholder positions. Integer labels are token ids; with ``reward_token_ids``
    only those tokens' logits compete. Float labels are the probability of the first of exactly two
    ``reward_token_ids`` (soft labels, arXiv 2312.08935). Labels of ``IGNORE_INDEX`` do not count.
    """

    IGNORE_INDEX = IGNORE_INDEX

    def __init__(
        self, placeholder_token_id: int, reward_token_ids: list[int] | None = None
    ) -> None:
        super().__init__()
        self.placeholder_token_id = placeholder_token_id
        self.reward_token_ids = reward_token_ids

    def forward(
        self, inputs: Tensor, logits: Tensor, labels: Tensor, *, return_acc: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``inputs`` int64 (B, L), ``logits`` (B, L, V), ``labels`` int64 or float (B, L).

        Returns the scalar mean over placeholders, and with ``return_acc`` also the share of placeholders at
        which the likeliest (reward) token is the labelled one.
        """
        chosen = (inputs == self.placeholder_token_id) & (labels != self.IGNORE_INDEX)
        step_logits, step_labels = logits[chosen], labels[chosen]  # (N, V), (N,)
        if self.reward_token_ids is not None:
            step_logits = step_logits[:, self.reward_token_ids]  # (N, number of reward tokens)
        targets = self._targets(step_labels)
        loss = F.cross_entropy(step_logits.float(), targets, reduction="sum") / max(
            len(step_labels), 1
        )
        if not return_acc:
            return loss
        wanted = targets.argmax(-1) if targets.dim() == 2 else targets
        correct = (step_logits.argmax(-1) == wanted).float()
        return loss, correct.sum() / max(len(step_labels), 1)

    def _targets(self, labels: Tensor) -> Tensor:
        """Probabilities (N, 2) of soft labels, else the places (N,) of labels among the tokens that compete."""
        if labels.is_floating_point():
            if self.reward_token_ids is None or len(self.reward_token_ids) != 2:
                raise ValueError(
                    f"float labels need exactly two reward_token_ids, got {self.reward_token_ids}"
                )
            return torch.stack([labels, 1 - labels], dim=-1).float()
        if self.reward_token_ids is None:
            return labels
        matches = labels[:, None] == torch.tensor(self.reward_token_ids, device=labels.device)
        if strange := sorted(set(labels[~matches.any(-1)].tolist())):
            raise ValueError(
                f"labels {strange} at placeholder positions are not among reward_token_ids {self.reward_token_ids}"
            )
        return matches.int().argmax(-1)
