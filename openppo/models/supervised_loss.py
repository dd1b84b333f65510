"""Losses of SFT, reward models and process reward models. Needs torch only."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openppo.models.log_probs import log_probs_from_logits, masked_mean

IGNORE_INDEX = -100


class GPTLMLoss(nn.Module):
    """Next-token cross entropy: logits at t against the label at t + 1; labels of ``IGNORE_INDEX`` do not count.

    The softmax is over the whole vocabulary: texts may have ids that a policy never samples.

    >>> logits = torch.zeros(1, 3, 8)  # uniform over 8 tokens
    >>> GPTLMLoss()(logits, torch.tensor([[GPTLMLoss.IGNORE_INDEX, 5, 2]]))  # log 8
    tensor(2.0794)
    """

    IGNORE_INDEX = IGNORE_INDEX

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean loss over the labels that count, a scalar; 0 if there is none.

        ``logits`` (B, L, V), ``labels`` int64 (B, L).
        """
        next_labels = labels[:, 1:]
        counted = next_labels != self.IGNORE_INDEX
        next_labels = next_labels.masked_fill(~counted, 0)
        log_probs = log_probs_from_logits(logits[:, :-1], next_labels)  # float32, (B, L - 1)
        return -masked_mean(log_probs, counted)


class PairWiseLoss(nn.Module):
    """Bradley-Terry loss -log sigmoid(r_chosen - r_rejected - margin), averaged over pairs (arXiv 2203.02155).

    >>> PairWiseLoss()(torch.tensor([1.0]), torch.tensor([1.0]))  # log 2: no preference
    tensor(0.6931)
    """

    def forward(
        self, chosen_reward: Tensor, reject_reward: Tensor, margin: Tensor | None = None
    ) -> Tensor:
        """Mean loss, a scalar; rewards and the optional ``margin`` are (B,)."""
        difference = chosen_reward - reject_reward
        if margin is not None:
            difference = difference - margin
        return -F.logsigmoid(difference).mean()


class LogExpLoss(nn.Module):
    """log(1 + exp(r_rejected - r_chosen + margin)), averaged over pairs (arXiv 2204.05862); equal to PairWiseLoss.

    >>> LogExpLoss()(torch.tensor([2.0]), torch.tensor([0.0]))  # log(1 + exp(-2))
    tensor(0.1269)
    """

    def forward(
        self, chosen_reward: Tensor, reject_reward: Tensor, margin: Tensor | None = None
    ) -> Tensor:
        """Mean loss, a scalar; rewards and the optional ``margin`` are (B,)."""
        difference = reject_reward - chosen_reward
        if margin is not None:
            difference = difference + margin
        return F.softplus(difference).mean()


class PRMLoss(nn.Module):
    """Cross entropy of a process reward model at the placeholder tokens that end each step.

    ``labels`` are given at the placeholder positions. Integer labels are token ids; with ``reward_token_ids``
    only those tokens' logits compete. Float labels are the probability of the first of exactly two
    ``reward_token_ids`` (soft labels, arXiv 2312.08935). Labels of ``IGNORE_INDEX`` do not count.

    >>> inputs, labels = torch.tensor([[5, 9, 6, 9]]), torch.tensor([[-100, 2, -100, 3]])
    >>> logits = torch.zeros(1, 4, 10)
    >>> PRMLoss(placeholder_token_id=9, reward_token_ids=[2, 3])(inputs, logits, labels)  # log 2
    tensor(0.6931)
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
        """Mean loss over placeholders, a scalar.

        ``inputs`` int64 (B, L), ``logits`` (B, L, V), ``labels`` int64 or float (B, L). With ``return_acc`` also the
        share of placeholders at which the likeliest (reward) token is the labelled one.
        """
        is_step = (inputs == self.placeholder_token_id) & (labels != self.IGNORE_INDEX)  # (B, L)
        step_logits = logits[is_step]  # (N, V)
        step_labels = labels[is_step]  # (N,)
        n_steps = max(len(step_labels), 1)
        if self.reward_token_ids is not None:
            step_logits = step_logits[:, self.reward_token_ids]  # (N, number of reward tokens)

        targets = self._targets(step_labels)
        loss = F.cross_entropy(step_logits.float(), targets, reduction="sum") / n_steps
        if not return_acc:
            return loss

        likeliest_targets = targets.argmax(-1) if targets.dim() == 2 else targets
        correct = (step_logits.argmax(-1) == likeliest_targets).float()
        return loss, correct.sum() / n_steps

    def _targets(self, labels: Tensor) -> Tensor:
        """Probabilities (N, 2) of soft labels, or the indexes (N,) of token ids among ``reward_token_ids``."""
        if labels.is_floating_point():
            if self.reward_token_ids is None or len(self.reward_token_ids) != 2:
                raise ValueError(
                    f"float labels need exactly two reward_token_ids, got {self.reward_token_ids}"
                )
            return torch.stack([labels, 1 - labels], dim=-1).float()

        if self.reward_token_ids is None:
            return labels

        reward_token_ids = torch.tensor(self.reward_token_ids, device=labels.device)
        matches = labels[:, None] == reward_token_ids  # (N, number of reward tokens)
        unknown = labels[~matches.any(-1)].tolist()
        if unknown:
            raise ValueError(
                f"labels {sorted(set(unknown))} at placeholder positions are not among "
                f"reward_token_ids {self.reward_token_ids}"
            )
        return matches.int().argmax(-1)
