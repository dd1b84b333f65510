"""PPO in one process on policies that are tables: real samples, experience maker, buffer and optimizer steps.

A game is played by hand; everything after it is what a run uses. Tokens 0 to A-1 are actions, those above are states.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openppo.agents.episodes import segments
from openppo.agents.session import Session
from openppo.agents.turn import Turn
from openppo.config import TrainPPOConfig
from openppo.experience import ExperienceMaker, ReplayBuffer
from openppo.experience.estimators import ESTIMATORS
from openppo.experience.replay_buffer import mini_batches
from openppo.rollout.scores import scored
from openppo.tracking import Metrics
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.critic_step import CriticStep
from openppo.types import (
    Completion,
    Ending,
    Episode,
    EpisodeInput,
    FinishReason,
    ModelInputs,
    Prompt,
    Sample,
    Score,
    SingleProcess,
)
from tests.samples import one_segment

CPU = torch.device("cpu")
PAD = 0
Choose = Callable[[int], int]
"""``choose(state)``: the policy's action after the token ``state``."""
Rewards = Literal["score", "turns", "both"]
"""What is paid: the whole episode, its last turn, or a quarter for the whole and the others for the turn."""
Form = Literal["episode", "segments", "response"]
"""An agent's episode, as one segment or one for each turn; or a single response that is scored by step."""
SETUP: Any = SimpleNamespace(
    renderer=SimpleNamespace(vision=None), options=SimpleNamespace(allow_image_urls=False)
)
"""What a session needs in which nobody asks for a turn."""


@dataclass(frozen=True)
class Move:
    """One action, and the token that was read before it."""

    state: int
    action: int


class Game(Protocol):
    """A decision at each prompt, and what follows from it."""

    n_tokens: int
    n_actions: int
    right: dict[int, int]
    """The action that pays most, by the token of the prompt."""

    def play(self, prompt: int, choose: Choose) -> tuple[list[Move], float]:
        """Moves of an episode from the token ``prompt``, and what is paid at its end."""


class Policy(nn.Module):
    """Logits of all actions by the token before, called like ``Actor.forward``."""

    def __init__(self, n_tokens: int, n_actions: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n_tokens, n_actions))

    def forward(
        self,
        inputs: ModelInputs,
        action_mask: Tensor,
        return_entropy: bool = False,
    ) -> Any:
        table = self.logits.log_softmax(-1)  # (S, A)
        states = tokens_before(inputs.sequences)
        actions = torch.where(action_mask, inputs.sequences, 0)
        log_probs = torch.where(action_mask, table[states, actions], 0.0)
        if not return_entropy:
            return log_probs

        entropy = -(table.exp() * table).sum(-1)  # (S,)
        return log_probs, torch.where(action_mask, entropy[states], 0.0)

    def chances(self) -> list[list[float]]:
        """Probability of each action by token."""
        return self.logits.detach().double().softmax(-1).tolist()


class Critic(nn.Module):
    """Values by the token before, called like ``ScalarHeadModel``."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(n_tokens))

    def forward(self, inputs: ModelInputs) -> Tensor:
        return self.values[tokens_before(inputs.sequences)]


def tokens_before(sequences: Tensor) -> Tensor:
    """The token before each, (B, L)."""
    return F.pad(sequences[:, :-1], (1, 0))


class AdamModel:
    """A ``TrainableModel`` without DeepSpeed."""

    def __init__(self, module: nn.Module, learning_rate: float) -> None:
        self.module = module
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.Adam(module.parameters(), learning_rate, betas=(0.9, 0.95))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self) -> float:
        gradients = [p.grad.flatten() for p in self.module.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.cat(gradients).norm().item()


@dataclass(frozen=True)
class Paid:
    """What an episode has earned, of the whole and of its last turn."""

    score: float
    turn: float

    @classmethod
    def of(cls, total: float, rewards: Rewards) -> "Paid":
        """Divide a payment."""
        score = {"score": total, "turns": 0.0, "both": total / 4}[rewards]
        return cls(score, total - score)


@dataclass(frozen=True)
class Sampled:
    """Moves with their log-probs, the group that they belong to, and the policy's version."""

    moves: Sequence[Move]
    log_probs: Sequence[float]
    group: int
    version: int


@dataclass(frozen=True)
class Rollouts:
    """Plays a game in groups."""

    game: Game
    rewards: Rewards
    form: Form
    rng: random.Random

    def groups(
        self, chances: list[list[float]], n_groups: int, n_samples: int, version: int
    ) -> Iterator[Sample]:
        """Samples of ``n_groups`` prompts, each with the greedy one beside it."""

        def sampled(state: int) -> int:
            return self.rng.choices(range(self.game.n_actions), chances[state])[0]

        def greedy(state: int) -> int:
            return max(range(self.game.n_actions), key=lambda action: chances[state][action])

        def played(prompt: int, choose: Choose) -> Sample:
            moves, total = self.game.play(prompt, choose)
            log_probs = [math.log(chances[move.state][move.action]) for move in moves]
            return self.sample(
                Sampled(moves, log_probs, group, version=version), Paid.of(total, self.rewards)
            )

        prompts = sorted(self.game.right)
        for group in range(n_groups):
            prompt = prompts[group % len(prompts)]
            best = played(prompt, greedy)
            for _ in range(n_samples):
                yield replace(played(prompt, sampled), greedy=best)

    def sample(self, sampled: Sampled, paid: Paid) -> Sample:
        """One episode or response."""
        if self.form == "response":
            return response(sampled, paid)
        return episode(sampled, paid, continues=self.form == "episode")


def episode(sampled: Sampled, paid: Paid, continues: bool) -> Sample:
    """An agent's episode with a turn for each move, which ``continues`` the tokens of the last or is rendered anew."""
    prompt = Prompt("", [sampled.moves[0].state])
    session = Session(SETUP, EpisodeInput(prompt, seed=0, group=sampled.group))
    read: list[int] = []
    parent = None
    for number, move in enumerate(sampled.moves):
        read = [*read, move.state]
        completion = Completion(
            [move.action], [sampled.log_probs[number]], [sampled.version], FinishReason.STOP
        )
        turn = Turn(number, [{}], [], read, completion, text="", fingerprints=[], parent=parent)
        session.turns.append(turn)
        read = turn.token_ids
        parent = turn if continues else None

    if paid.score != 0:
        session.reward(paid.score)
    if paid.turn != 0:
        session.reward(paid.turn, session.turns[-1])
    return Sample(
        prompt,
        group=sampled.group,
        segments=segments(session),
        scores=dict(session.rewards),
        episode=Episode([], Ending.COMPLETED, len(sampled.moves)),
    )


def response(sampled: Sampled, paid: Paid) -> Sample:
    """A response with a step for each move; the token before each is the policy's own."""
    prompt = [sampled.moves[0].state]
    actions = [move.action for move in sampled.moves]
    sample = one_segment(
        token_ids=prompt + actions,
        action_mask=[False] + [True] * len(actions),
        log_probs=[0.0, *sampled.log_probs],
        versions=[-1] + [sampled.version] * len(actions),
        finish_reason=FinishReason.STOP,
        prompt=Prompt("", prompt),
        group=sampled.group,
    )
    steps = [0.0] * len(actions) + [paid.turn]
    return scored(sample, Score({"reward": paid.score}, steps, sample.last.action_mask))


def train(
    config: TrainPPOConfig, rollouts: Rollouts, n_steps: int, learning_rate: float = 0.2
) -> float:
    """Chance of the right action after ``n_steps`` global steps, at the prompt where it is lowest."""
    game = rollouts.game
    estimator = ESTIMATORS[config.advantage.advantage_estimator]
    comm = SingleProcess()
    policy = Policy(game.n_tokens, game.n_actions)
    actor = AdamModel(policy, learning_rate)
    critic = AdamModel(Critic(game.n_tokens), learning_rate) if estimator.uses_critic else None

    maker = ExperienceMaker(actor, critic, None, config, comm, CPU, PAD)
    buffer = ReplayBuffer(
        comm, normalizes=estimator.normalizes(config.advantage.normalize_advantages)
    )
    actor_step = ActorStep(actor, config, comm, CPU)  # type: ignore[arg-type]
    critic_step = CriticStep(critic, config, comm, CPU) if critic is not None else None  # type: ignore[arg-type]

    n_groups = config.ppo.rollout_batch_size
    n_samples = config.ppo.n_samples_per_prompt
    for step in range(n_steps):
        metrics = Metrics()
        played = list(rollouts.groups(policy.chances(), n_groups, n_samples, version=step))
        buffer.fill(maker.make(played, metrics, step))
        for number, batch in enumerate(mini_batches(buffer, config, step)):
            actor_step.train(batch, None, metrics, on_policy=number == 0)
            if critic_step is not None:
                critic_step.train(batch, metrics)

    return min(policy.chances()[prompt][action] for prompt, action in game.right.items())
