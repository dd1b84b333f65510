"""Stand-ins for the parts of a trainer: models in float64 without DeepSpeed, an engine, a scorer, ranks, a record."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.experience.hooks import Hooks
from openppo.experience.replay_buffer import ReplayBuffer
from openppo.rollout.driver import EngineDriver
from openppo.rollout.players import ResponsePlayer
from openppo.sources.groups import GroupPlayer
from openppo.sources.held_out import HeldOut
from openppo.sources.rank_sampler import RankSampler
from openppo.sources.synchronous import PromptSource
from openppo.sources.task import Task
from openppo.tracking import PhaseTimer, StepProfiler, Trackers
from openppo.trainer import PPOTrainer
from openppo.trainer.components import PPOComponents
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.run_data import RunData
from openppo.types import (
    Experience,
    Interrupted,
    ModelInputs,
    Prompt,
    Score,
    SingleProcess,
    StopCheck,
)
from tests.playing import InstantEngine

CPU = torch.device("cpu")
PPO = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py"}
SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "initializer_range": 0.3}


class PlainModel:
    """A ``TrainableModel`` that descends along the gradient at its ``rate``; ``gradient`` is that of the last step."""

    learning_rate = 0.25

    def __init__(self, module, rate=0.0):
        self.module, self.train, self.rate = module, module.train, rate
        self.n_forwards, self.boundaries, self.gradient = 0, [], []

    def __call__(self, *args, **kwargs):
        self.n_forwards += 1
        return self.module(*args, **kwargs)

    def backward(self, loss, last):
        assert loss.dim() == 0
        self.boundaries.append(last)
        loss.backward()

    @torch.no_grad()
    def step(self):
        assert self.boundaries == [False] * (len(self.boundaries) - 1) + [True], (
            "no other pass is the last"
        )
        self.boundaries, parameters = [], list(self.module.parameters())
        self.gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if self.rate > 0:
            for parameter, gradient in zip(parameters, self.gradient, strict=True):
                parameter -= self.rate * gradient
        self.module.zero_grad(set_to_none=True)
        return torch.cat([gradient.flatten() for gradient in self.gradient]).norm().item()


class OneOf(SingleProcess):
    """One rank of several, for code that only asks which one it is."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


@pytest.fixture
def causal():
    """A tiny causal model in float64, the same for every test."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


@pytest.fixture
def scalar():
    """A tiny model with a scalar head in float64, the same for every test."""
    torch.manual_seed(2)
    return LlamaForSequenceClassification(
        LlamaConfig(num_labels=1, pad_token_id=None, **SIZES)
    ).double()


def experience_row(number):
    """A sample of its own length: a prompt of two, actions with holes, numbers wild enough for every kind of clip."""
    length = 4 + number % 5
    generator = torch.Generator().manual_seed(number)
    mask = torch.tensor([[t >= 2 and (t + number) % 4 != 0 for t in range(length)]])
    mask &= number != 5  # one sample without any action

    def normal(scale):
        numbers = torch.randn(1, length, generator=generator, dtype=torch.float64) * scale
        return torch.where(mask, numbers, 0.0)

    return Experience(
        ModelInputs(
            torch.randint(0, 20, (1, length), generator=generator),
            torch.ones(1, length, dtype=torch.bool),
        ),
        action_mask=mask,
        rollout_log_probs=normal(1.0),
        scores=torch.tensor([float(number)]),
        truncated=torch.tensor([False]),
        log_probs=torch.where(mask, normal(0.8) - 3.0, 0.0),
        values=normal(0.5),
        advantages=normal(1.0),
        returns=normal(1.0),
    )


@pytest.fixture
def rows():
    """Ten samples."""
    return [experience_row(number) for number in range(10)]


def nothing_held(*_):
    return nullcontext()


class Engine(InstantEngine):
    """Answers row ``i`` with ``answer(i, prompt, seed, params)``, a completion."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def answers(self, prompts, params, seeds):
        return [
            self.answer(i, prompt.token_ids, seed, params)
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]


class Scorer:
    """Scores each sample with ``score_of(sample)``."""

    collective = True

    def __init__(self, score_of=lambda sample: Score({"a": float(sample.last.token_ids[-1])})):
        self.score_of = score_of

    def score(self, samples):
        torch.rand(1)  # as a reward function may
        return list(map(self.score_of, samples))


class Record(SimpleNamespace):
    """A tracker and a checkpointer that keeps what is logged and saved; a checkpoint is due when a pass ends."""

    name, errors = "--use_record", (OSError,)
    log_samples = log_tokens = log_histograms = save_if_best = lambda *_: None

    def __init__(self):
        super().__init__(logged=[], saved=[], closed=0, random_state=None)

    def log(self, step, metrics):
        assert not self.closed
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.closed += 1

    def save(self, step, state, write_model, random_state=None):
        self.random_state = random_state
        self.saved.append((step, json.loads(json.dumps(state)), bool(self.closed)))
        return Path("here")

    def due(self, step, pass_ended):
        return pass_ended


class Strategy(SimpleNamespace):
    """One rank that saves no model."""

    comm, device, is_main = SingleProcess(), CPU, False
    uncompiled = save_pretrained = training = nothing_held

    def any_rank(self, value):
        return value


class StopIn(StopCheck):
    """Raises at the call of that number."""

    def __init__(self, at):
        self.left = at

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            raise Interrupted("SIGTERM")


class Policy(nn.Module):
    """The same log-prob for everything."""

    model = None

    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(torch.tensor(-1.0))

    def forward(self, inputs, actions, return_entropy=False):
        log_probs = self.level * actions
        return (log_probs, actions.float()) if return_entropy else log_probs


def prompts(*texts):
    return [Prompt(text, [3]) for text in texts]


def trainer_of(answer, given, held_out=(), score=None, comm=None, callbacks=(), **options):
    """A trainer of the prompts ``given`` with ``Engine(answer)`` and ``Scorer(score)``, on the rank of ``comm``."""
    fixed = {
        "init_kl_coef": 0.0,
        "self_check": False,
        "rollout_batch_size": 2,
        "train_batch_size": 2,
    }
    config = from_options(
        TrainPPOConfig, **{**PPO, **fixed, "advantage_estimator": "reinforce", **options}
    )
    policy, record, comm = PlainModel(Policy()), Record(), comm or SingleProcess()
    hooks = Hooks(PhaseTimer(StepProfiler(config.run.save_path, config.tracking, 0).phase))
    task = Task(
        "",
        config,
        prompts=given,
        held_out=list(held_out),
        scorer=Scorer(score) if score else Scorer(),
    )
    maker = ExperienceMaker(policy, None, None, config, comm, CPU, 0, hooks)
    parts = PPOComponents(
        strategy=Strategy(comm=comm),
        tokenizer=SimpleNamespace(decode=lambda ids, **_: ""),
        actor=policy,
        critic_step=None,
        engine=Engine(answer),
        maker=maker,
        replay_buffer=ReplayBuffer(
            comm, normalizes=maker.estimator.normalizes(config.advantage.normalize_advantages)
        ),
        data=RunData([task], [], {}, longest=0),
        grading=Grading(comm),
        trackers=Trackers([record]),
        checkpointer=record,
    )
    driver = EngineDriver(parts.engine, parts.stop)
    sampler = RankSampler(
        parts.engine,
        policy,
        GroupPlayer({"": ResponsePlayer(driver)}, driver),
        comm=comm,
        device=CPU,
        version=lambda: parts.state.global_step,
        fits_once=config.deepspeed.deterministic,
    )
    held_out = HeldOut(
        config,
        [task],
        sampler,
        parts.stop,
        weights_to_save=parts.weights_to_save,
        scorer=task.scorer,
    )
    source = PromptSource(config, task, sampler, held_out, hooks, parts.tokenizer)
    return PPOTrainer(config, parts, source, callbacks)
