"""Trials of a user's algorithm on small tensors, before data and models are read."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from openppo.config import AdvantageConfig, KLConfig, LossConfig, TrainPPOConfig
from openppo.config.fields import names_file, raise_first
from openppo.datasets import prompt_order
from openppo.experience import own_estimator, own_kl_controller
from openppo.experience.estimators import Estimator
from openppo.experience.own_estimator import estimator_of, estimator_problems
from openppo.experience.own_kl_controller import OwnKLController
from openppo.experience.token_rewards import StepRewards
from openppo.models import own_loss
from openppo.models.own_loss import TENSORS, FunctionLoss, policy_loss_of
from openppo.strategy.comm import check_same, collective
from openppo.tracking.report.catalog import GROUPS
from openppo.types import Comm, Prompt
from openppo.user_code import errors_of, leaving_no_trace

_ACTIONS = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]).bool()
"""Action masks (3, 6): a response, an episode of two turns, a single token."""
_DOING = "in a trial with small tensors"


def try_own_algorithm(config: TrainPPOConfig, comm: Comm, are_tasks: bool) -> None:
    """Load and try what options name as path.py:name; ``ValueError`` on all ranks says what is wrong. Collective.

    The groups of several tasks, ``are_tasks``, have been checked with each task.
    """

    def check() -> None:
        if names_file(config.loss.loss_type):
            try_loss(config.loss)
        if names_file(config.advantage.advantage_estimator):
            try_estimator(config.advantage)
        if config.kl.kl_controller is not None:
            try_kl_controller(config.kl)
        if not are_tasks:
            raise_first(estimator_problems(config))

    collective(comm, check)


def try_prompt_order(config: TrainPPOConfig, prompts: Sequence[Prompt], comm: Comm) -> None:
    """Check the first pass of a user's ``--prompt_order``, of each task by itself. Collective.

    ``ValueError`` on all ranks if it is no order of the ``prompts``, or another one on other ranks.
    """
    choice = config.ppo.prompt_order
    if not names_file(choice):
        return
    for task in dict.fromkeys(prompt.task for prompt in prompts):
        rows = [prompt for prompt in prompts if prompt.task == task]
        make = partial(prompt_order, choice, rows, config.deepspeed.seed)
        order = collective(comm, make)
        check_same(comm, {f"the order of --prompt_order {choice}": list(order(0))})


def try_loss(options: LossConfig) -> None:
    """Check loss, gradient and logged values of a user's policy loss, and that a token's loss depends on its row."""
    loss: FunctionLoss = policy_loss_of(options)
    where = f"{own_loss.FLAG} {options.loss_type}"
    inputs = _loss_inputs()
    copies = {name: tensor.detach().clone() for name, tensor in inputs.items()}

    def call(tensors: dict[str, Tensor]) -> Tensor:
        return loss(**tensors)[0]

    with leaving_no_trace(where), errors_of(where, _DOING):
        whole, logged = loss(**inputs)
        (gradient,) = torch.autograd.grad(whole.sum(), inputs["log_probs"])
        for name, tensor in (("a loss", whole), ("a gradient", gradient)):
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"{where} has {name} that is not finite {_DOING}.")
        for name, copy in copies.items():
            if not torch.equal(inputs[name], copy):
                raise ValueError(
                    f"{where} changes {name} in place, which others read: copy it first."
                )
        _check_names(logged, where)
        _check_rows(call, inputs, whole.detach(), subject=f"{where}: the loss of a row")


def _loss_inputs() -> dict[str, Tensor]:
    """Arguments of a policy loss, (3, 6), as training has them."""
    numbers = torch.randn(len(TENSORS), *_ACTIONS.shape, generator=torch.Generator().manual_seed(0))
    log_probs = -1 - numbers[0].abs()
    inputs = {
        "log_probs": log_probs,
        "old_log_probs": log_probs + 0.2 * numbers[1],
        "advantages": numbers[2],
        "rollout_log_probs": log_probs + 0.2 * numbers[3],
    }
    tensors = {name: torch.where(_ACTIONS, tensor, 0.0) for name, tensor in inputs.items()}
    tensors["log_probs"].requires_grad_()
    return tensors | {"action_mask": _ACTIONS}


def _check_rows(
    call: Callable[[dict[str, Tensor]], Tensor],
    inputs: dict[str, Tensor],
    whole: Tensor,
    subject: str,
) -> None:
    """``ValueError`` if the rows of ``whole``, alone or with more padding, are others."""
    rows = [_row(inputs, place) for place in range(len(whole))]
    alone = torch.cat([call(row).detach() for row in rows])
    if not torch.allclose(alone, whole, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"{subject} depends on other rows, so it would change with the size of micro-batches and the number of "
            "ranks. Compute each row by itself."
        )
    padded = {name: F.pad(tensor, (0, 2)) for name, tensor in inputs.items()}
    if not torch.allclose(call(padded).detach(), F.pad(whole, (0, 2)), rtol=1e-4, atol=1e-6):
        raise ValueError(f"{subject} depends on padding. Count only tokens of action_mask.")


def _row(inputs: dict[str, Tensor], place: int) -> dict[str, Tensor]:
    """The row at ``place`` of each tensor, (1, L)."""
    return {name: tensor[place : place + 1] for name, tensor in inputs.items()}


def _check_names(logged: Mapping[str, Tensor], where: str) -> None:
    """``ValueError`` for values to log under a name that OpenPPO's own metrics have; ``clip_fraction`` is free."""
    charts = chain.from_iterable(GROUPS.values())
    patterns = {pattern for chart in charts for pattern in chart.metrics} - {"clip_fraction"}
    for name in logged:
        if any(fnmatchcase(str(name), pattern) for pattern in patterns):
            raise ValueError(f"{where} logs {name!r}, which is a metric of OpenPPO: rename it.")


def try_estimator(options: AdvantageConfig) -> None:
    """Check results of a user's estimator, and that they depend on the group alone, or without one on the row."""
    where = f"{own_estimator.FLAG} {options.advantage_estimator}"
    estimator = estimator_of(options)
    with leaving_no_trace(where), errors_of(where, _DOING):
        _try_rewards(estimator, where)
        _try_advantages(estimator, options, where)


def _try_rewards(estimator: Estimator, where: str) -> None:
    """Compare the rewards of two groups, the second of equal scores, with those of each group alone."""
    scores = torch.tensor([1.0, -0.5, 0.75, 0.75])
    groups = torch.tensor([3, 3, 7, 7])
    greedy = torch.tensor([0.5, 0.5, 0.0, 0.0]) if estimator.needs_greedy else None

    def call(rows: list[int]) -> Tensor:
        no_steps = torch.zeros(len(rows), 6)
        steps = StepRewards(no_steps, no_steps.bool())
        baseline = None if greedy is None else greedy[rows]
        return estimator.rewards(scores[rows], steps, groups[rows], baseline)[0]

    whole = call([0, 1, 2, 3])
    if not torch.allclose(torch.cat([call([0, 1]), call([2, 3])]), whole, atol=1e-6):
        raise ValueError(
            f"{where}: rewards of a group depend on other groups, which may be on other ranks. Compare only responses "
            "of equal groups."
        )
    if estimator.compares_responses:
        return

    alone: list[Tensor] = []
    with suppress(ValueError):  # not finite, as where a group of one has no spread
        alone = [call([row]) for row in range(len(scores))]
    if not alone or not torch.allclose(torch.cat(alone), whole, atol=1e-6):
        raise ValueError(
            f"{where}: rewards depend on other responses to the prompt. Say so: Estimator(..., "
            "compares_responses=True)."
        )


def _try_advantages(estimator: Estimator, options: AdvantageConfig, where: str) -> None:
    """Compare advantages and returns with those of each row alone and of padded rows."""
    numbers = torch.randn(2, *_ACTIONS.shape, generator=torch.Generator().manual_seed(0))
    rewards, values = torch.where(_ACTIONS, numbers, 0.0)
    inputs = {"rewards": rewards, "action_mask": _ACTIONS}
    if estimator.uses_critic:
        inputs["values"] = values

    for place, name in enumerate(("advantages", "returns")):
        call = partial(_result, estimator, options, place)
        _check_rows(call, inputs, call(inputs), subject=f"{where}: {name} of a row")


def _result(
    estimator: Estimator, options: AdvantageConfig, place: int, tensors: dict[str, Tensor]
) -> Tensor:
    """Advantages of ``tensors`` at ``place`` 0, returns at 1."""
    results = estimator.advantages(
        tensors["rewards"], tensors.get("values"), tensors["action_mask"], options, None
    )
    return results[place]


def try_kl_controller(options: KLConfig) -> None:
    """Check coefficient and updates of a user's controller, and that its state restores it."""
    where = f"{own_kl_controller.FLAG} {options.kl_controller}"
    with leaving_no_trace(where), errors_of(where, "in a trial with a KL of 0.5"):
        controller = OwnKLController(options)
        _ = controller.value
        controller.update(0.5, 64)

        state = controller.state_dict()
        copy = json.loads(json.dumps(state, default=repr))
        if copy != state:
            raise ValueError(
                f"{where}: its state is no JSON: keep numbers, texts, lists and dicts with text keys."
            )
        restored = OwnKLController(options)
        restored.load_state_dict(copy)
        for each in (controller, restored):
            each.update(0.25, 64)
        if restored.value != controller.value:
            raise ValueError(
                f"{where}: its state does not restore it, so a resumed run would differ: keep it in attributes, or "
                "give it state_dict() and load_state_dict(state)."
            )
