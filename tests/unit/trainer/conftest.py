"""A training engine without DeepSpeed that keeps each step's gradient, tiny models in float64, and ranks by hand."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.types import Experience, SingleProcess

SIZES = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "initializer_range": 0.3}


class RecordingEngine:
    """Behaves like a ``TrainableModel`` that never changes the weights; ``gradient`` is that of the last step."""

    learning_rate = 0.25

    def __init__(self, module):
        self.module = module
        self.boundaries = []
        self.gradient = []

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, last):
        assert loss.dim() == 0
        self.boundaries.append(last)
        loss.backward()

    def step(self):
        assert self.boundaries == [False] * (len(self.boundaries) - 1) + [True], "no other pass is the last"
        self.boundaries = []
        parameters = list(self.module.parameters())
        self.gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.module.zero_grad(set_to_none=True)
        return torch.cat([gradient.flatten() for gradient in self.gradient]).norm().item()


class OneOf(SingleProcess):
    """One rank of several, for code that only asks which one it is."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size


@pytest.fixture
def engine_of():
    """Wraps a module in an engine."""
    return RecordingEngine


@pytest.fixture
def rank_of():
    """Rank so-and-so of so many."""
    return OneOf


@pytest.fixture
def causal():
    """A tiny causal model in float64, the same for every test."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double()


@pytest.fixture
def scalar():
    """A tiny model with a scalar head in float64, the same for every test."""
    torch.manual_seed(2)
    return LlamaForSequenceClassification(LlamaConfig(num_labels=1, pad_token_id=None, **SIZES)).double()


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
        sequences=torch.randint(0, 20, (1, length), generator=generator),
        attention_mask=torch.ones(1, length, dtype=torch.bool),
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
