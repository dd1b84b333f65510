"""Two global steps of PPO on two ranks equal a naive loop: plain torch, one sample at a time, formulas from the papers.

The loop takes over the sampled tokens; everything after that it computes by itself.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.distributed.runs import outcome, vector

N_PROMPTS, N_STEPS, EPOCHS = 13, 2, 2
LEARNING_RATE, TEMPERATURE, KL_COEF, GAMMA, LAMBDA, EPS, PTX_COEF, MAX_NORM = (
    5e-3,
    0.8,
    0.1,
    0.97,
    0.9,
    0.2,
    0.3,
    0.5,
)
LONGEST_SAMPLE = 9 + 12  # prompt and response; longer documents are cut
OPTIONS = f"""
    --zero_stage 2 --rollout_batch_size 14 --train_batch_size 14 --micro_train_batch_size 3 --micro_rollout_batch_size 4
    --max_epochs {EPOCHS} --lr_warmup_ratio 0 --lr_scheduler constant --generate_max_len 12 --temperature {TEMPERATURE}
    --actor_learning_rate {LEARNING_RATE} --critic_learning_rate {LEARNING_RATE} --max_norm {MAX_NORM}
    --init_kl_coef {KL_COEF} --gamma {GAMMA} --lambd {LAMBDA} --eps_clip {EPS} --value_clip {EPS} --ptx_coef {PTX_COEF}
    --reward_clip_range -0.2 0.2 --prompt_data {{tiny}}/prompts.jsonl --pretrain_data {{tiny}}/documents.jsonl
    --pretrain {{tiny}}/actor --reward_pretrain {{tiny}}/reward
"""


@dataclass
class Sample:
    """One response; each list has one entry per response token."""

    ids: Tensor
    n_prompt: int
    old_log_probs: Tensor
    old_values: Tensor
    advantages: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)


def log_probs_of(model: nn.Module, ids: Tensor, start: int, temperature: float) -> Tensor:
    """Of the tokens from ``start`` on."""
    logits = model(input_ids=ids[None]).logits[0] / temperature
    return torch.log_softmax(logits, -1)[start - 1 : -1].gather(-1, ids[start:, None])[:, 0]


def values_of(model: Any, ids: Tensor, start: int) -> Tensor:
    """Of the states in which the tokens from ``start`` on were chosen."""
    return model.score(model.model(input_ids=ids[None]).last_hidden_state)[0, start - 1 : -1, 0]


class NaiveLoop:
    """PPO as the papers write it down."""

    def __init__(self, tiny: Path) -> None:
        load = AutoModelForSequenceClassification.from_pretrained
        self.actor = AutoModelForCausalLM.from_pretrained(tiny / "actor")
        self.reference = AutoModelForCausalLM.from_pretrained(tiny / "actor")
        self.critic, self.reward = load(tiny / "reward"), load(tiny / "reward")
        adam = {"lr": LEARNING_RATE, "betas": (0.9, 0.95), "weight_decay": 0.0}
        self.actor_adam = torch.optim.AdamW(self.actor.parameters(), **adam)
        self.critic_adam = torch.optim.AdamW(self.critic.parameters(), **adam)
        tokenizer = AutoTokenizer.from_pretrained(tiny / "actor")
        texts = [
            json.loads(line)["input"]
            for line in (tiny / "documents.jsonl").read_text().splitlines()
        ]
        ids = [tokenizer.convert_tokens_to_ids([*text, tokenizer.eos_token]) for text in texts]
        self.documents = [torch.tensor(document[:LONGEST_SAMPLE]) for document in ids]

    @torch.no_grad()
    def experience(self, prompt: list[int], response: list[int]) -> tuple[Sample, float]:
        """The sample with advantages, not normalized, and its score."""
        ids, start, n = torch.tensor(prompt + response), len(prompt), len(response)
        log_probs = log_probs_of(self.actor, ids, start, TEMPERATURE)
        kl = log_probs - log_probs_of(self.reference, ids, start, TEMPERATURE)
        values = values_of(self.critic, ids, start)
        score = self.reward.score(self.reward.model(input_ids=ids[None]).last_hidden_state)[
            0, -1, 0
        ].item()
        rewards = [-KL_COEF * kl[t].item() for t in range(n)]
        rewards[-1] += min(max(score, -0.2), 0.2)
        sample, advantage = Sample(ids, start, log_probs, values), 0.0
        for t in reversed(range(n)):
            after = values[t + 1].item() if t + 1 < n else 0.0
            delta = rewards[t] + GAMMA * after - values[t].item()
            advantage = delta + GAMMA * LAMBDA * advantage
            sample.advantages.insert(0, advantage)
            sample.returns.insert(0, advantage + values[t].item())
        return sample, score

    def step(self, responses: list[dict[str, Any]]) -> dict[str, float]:
        """One global step on sampled tokens."""
        made = [self.experience(row["prompt"], row["response"]) for row in responses]
        samples = [sample for sample, _ in made]
        everything = torch.tensor(
            [a for sample in samples for a in sample.advantages], dtype=torch.float64
        )
        mean, std = everything.mean().item(), (everything.var(correction=0) + 1e-8).sqrt().item()
        for sample in samples:
            sample.advantages = [(advantage - mean) / std for advantage in sample.advantages]
        norms = [self.update(samples, len(everything)) for _ in range(EPOCHS)]
        return {
            "reward": sum(score for _, score in made) / len(made),
            "advantages": mean,
            "actor_grad_norm": sum(actor for actor, _ in norms) / EPOCHS,
            "critic_grad_norm": sum(critic for _, critic in norms) / EPOCHS,
        }

    def update(self, samples: list[Sample], n_tokens: int) -> tuple[float, float]:
        """One optimizer step of actor and critic; the norms of their gradients."""
        policy_loss = value_loss = torch.zeros(())
        for sample in samples:
            log_probs = log_probs_of(self.actor, sample.ids, sample.n_prompt, TEMPERATURE)
            values = values_of(self.critic, sample.ids, sample.n_prompt)
            for t, advantage in enumerate(sample.advantages):
                ratio = (log_probs[t] - sample.old_log_probs[t]).exp()
                policy_loss = policy_loss - torch.min(
                    ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage
                )
                old = sample.old_values[t]
                clipped = old + (values[t] - old).clamp(-EPS, EPS)
                errors = (values[t] - sample.returns[t]) ** 2, (clipped - sample.returns[t]) ** 2
                value_loss = value_loss + 0.5 * torch.max(*errors)
        ptx_loss = -sum(
            log_probs_of(self.actor, document, 1, 1.0).sum() for document in self.documents
        )
        n_targets = sum(len(document) - 1 for document in self.documents)
        actor_loss = policy_loss / n_tokens + PTX_COEF * ptx_loss / n_targets
        actor_norm = self.descend(actor_loss, self.actor, self.actor_adam)
        return actor_norm, self.descend(value_loss / n_tokens, self.critic, self.critic_adam)

    @staticmethod
    def descend(loss: Tensor, model: nn.Module, adam: torch.optim.Optimizer) -> float:
        """Backward, clip, update; the norm before clipping."""
        adam.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
        adam.step()
        return norm


def test_two_global_steps_equal_a_naive_loop(tiny, tmp_path, run_cases):
    run_cases(2, tmp_path, {"ppo": {"arguments": OPTIONS, "n_rows": N_PROMPTS, "n_steps": N_STEPS}})
    result = outcome(tmp_path / "ppo")

    loop = NaiveLoop(tiny)
    for samples, metrics in zip(result["samples"], result["metrics"], strict=True):
        assert metrics["clip_fraction"] > 0.05  # else half of the formulas would stay untested
        for name, value in loop.step(samples).items():
            assert metrics[name] == pytest.approx(value, rel=1e-4), name
    assert result["metrics"][1]["kl_k3"] > 0.01
    for folder, model, start in (
        ("model", loop.actor, "actor"),
        ("model_critic", loop.critic, "reward"),
    ):
        trained, before = vector(tmp_path / "ppo" / folder), vector(tiny / start)
        weights = dict(model.named_parameters())
        naive = torch.cat([weights[name].detach().double().flatten() for name in sorted(weights)])
        assert (trained - naive).norm() <= 1e-3 * (naive - before).norm(), folder
