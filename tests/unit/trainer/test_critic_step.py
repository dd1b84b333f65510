"""The critic's gradient is that of one token mean over the whole step, however the step is cut into pieces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openppo.config import TrainPPOConfig, flat_dict, from_options
from openppo.experience import ReplayBuffer
from openppo.experience.replay_buffer import MiniBatch, idle_experience, join_rows
from openppo.models import ScalarHeadModel
from openppo.tracking import Metrics
from openppo.trainer.critic_step import CriticStep
from openppo.types import Experience, SingleProcess

EngineOf = Callable[[nn.Module], Any]
Comm = Callable[[int, int], Any]
CLIP = 0.2
CONFIG = from_options(TrainPPOConfig, pretrain="m", prompt_data="d", reward_fn="f.py", lambd=0.9)


def mini_batch(rows: list[Experience], micro: int) -> MiniBatch:
    buffer = ReplayBuffer()
    buffer.extend(rows)
    [batch] = buffer.mini_batches(len(rows), micro, epochs=1, seed=0)
    return batch


def trained(
    engine: Any, batch: MiniBatch, clip: float | None = CLIP, comm: Any = None
) -> tuple[list[Tensor], dict[str, float]]:
    """Gradient and metrics of one step."""
    metrics = Metrics()
    config = from_options(TrainPPOConfig, **(flat_dict(CONFIG) | {"value_clip": clip}))
    step = CriticStep(engine, config, comm or SingleProcess(), torch.device("cpu"))
    step.train(batch, metrics)
    return engine.gradient, metrics.reduced(SingleProcess())


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert any(bool((gradient != 0).any()) for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def naive_token_losses(model: nn.Module, rows: list[Experience], clip: float | None) -> list[Tensor]:
    """The squared error of each action token's value, row by row without padding, from the plain transformer."""
    losses = []
    for row in rows:
        outputs = model.score(model.base_model(input_ids=row.sequences).last_hidden_state)[0, :, 0]
        for t in range(1, row.sequences.shape[1]):
            if row.action_mask[0, t]:
                value, old, target = outputs[t - 1], row.values[0, t], row.returns[0, t]
                error = (value - target) ** 2
                if clip is not None:
                    clipped = torch.minimum(torch.maximum(value, old - clip), old + clip)
                    error = torch.maximum(error, (clipped - target) ** 2)
                losses.append(error / 2)
    return losses


@pytest.mark.parametrize("clip", [CLIP, None])
def test_the_value_gradient_is_that_of_the_mean_over_all_action_tokens(
    clip: float | None, scalar: nn.Module, engine_of: EngineOf, rows: list[Experience]
) -> None:
    losses = naive_token_losses(scalar, rows, clip)
    loss = sum(losses) / len(losses)
    loss.backward()
    expected = [p.grad.clone() for p in scalar.parameters()]
    scalar.zero_grad(set_to_none=True)
    gradient, metrics = trained(engine_of(ScalarHeadModel(scalar, "critic")), mini_batch(rows, 3), clip)
    assert_same(gradient, expected)
    assert metrics["value_loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert metrics["critic_learning_rate"] == 0.25
    assert metrics["critic_grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in expected]).norm().item())


def test_gradient_is_the_same_for_any_micro_batch_size(
    scalar: nn.Module, engine_of: EngineOf, rows: list[Experience]
) -> None:
    engine = engine_of(ScalarHeadModel(scalar, "critic"))
    whole, whole_metrics = trained(engine, mini_batch(rows, 100))
    for micro in (1, 3, 8):
        gradient, metrics = trained(engine, mini_batch(rows, micro))
        assert_same(gradient, whole)
        assert metrics == pytest.approx(whole_metrics, abs=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_mean_gradient_of_all_ranks_is_the_gradient_of_one(
    world_size: int, scalar: nn.Module, engine_of: EngineOf, rank_of: Comm, rows: list[Experience]
) -> None:
    engine = engine_of(ScalarHeadModel(scalar, "critic"))
    whole, _ = trained(engine, mini_batch(rows, 2))
    n_tokens = sum(int(row.action_mask.sum()) for row in rows)
    of_ranks = []
    for rank in range(world_size):
        mine = rows[rank::world_size]
        batch = MiniBatch([join_rows(mine[:2]), join_rows(mine[2:]), idle_experience()], n_tokens, 9)
        of_ranks.append(trained(engine, batch, comm=rank_of(rank, world_size))[0])
    assert_same([sum(parts) / world_size for parts in zip(*of_ranks, strict=True)], whole)


def test_extra_padding_columns_do_not_change_the_gradient(
    scalar: nn.Module, engine_of: EngineOf, rows: list[Experience]
) -> None:
    engine = engine_of(ScalarHeadModel(scalar, "critic"))
    batch = mini_batch(rows, 4)

    def wide(name: str, tensor: Tensor) -> Tensor:
        filler = {"sequences": 13, "attention_mask": False, "action_mask": False}.get(name, 7.5)
        return tensor if tensor.dim() == 1 else F.pad(tensor, (0, 6), value=filler)

    micro_batches = [
        Experience(**{name: wide(name, tensor) for name, tensor in micro.tensors().items()})
        for micro in batch.micro_batches
    ]
    narrow, _ = trained(engine, batch)
    assert_same(trained(engine, MiniBatch(micro_batches, batch.n_tokens, batch.n_sequences))[0], narrow)


def test_only_the_last_backward_pass_is_marked_as_last(
    scalar: nn.Module, engine_of: EngineOf, rows: list[Experience]
) -> None:
    engine = engine_of(ScalarHeadModel(scalar, "critic"))
    trained(engine, mini_batch(rows, 3))
    assert engine.boundaries == [False, False, False, True]
