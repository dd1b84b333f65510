"""A user's loss, estimator and controller: what cannot train is found before, in a trial, and says what to do."""

import pytest
import torch

from openppo.build.checks.own_algorithm import (
    try_estimator,
    try_kl_controller,
    try_own_algorithm,
    try_prompt_order,
)
from openppo.build.checks.own_algorithm import try_loss as try_policy_loss
from openppo.config import AdvantageConfig, KLConfig, LossConfig, TrainPPOConfig, from_options
from openppo.experience.own_estimator import estimator_of, estimator_problems, loss_aggregation
from openppo.experience.own_kl_controller import make_kl_controller
from openppo.models.own_loss import policy_loss_of
from openppo.types import Prompt, SingleProcess
from tests.unit.trainer.conftest import OneOf

LOSSES = """
import torch

def plain(log_probs, old_log_probs, advantages, eps_clip_high, dual_clip=None):
    return -(log_probs - old_log_probs).exp().clamp(max=1 + eps_clip_high) * advantages

def takes_all(**values):
    return -values["log_probs"] * values["advantages"], {"surprise": -values["log_probs"]}

def sequence(log_probs, old_log_probs, advantages, action_mask):
    n = action_mask.sum(-1, keepdim=True)
    change = torch.where(action_mask, log_probs - old_log_probs, 0.0).sum(-1, keepdim=True) / n
    return -change.exp() * advantages

def no_log_probs(advantages):
    return advantages

def unknown(log_probs, rewards):
    return log_probs

def mean(log_probs):
    return log_probs.mean()

def numbers(log_probs):
    return log_probs.tolist()

def whole(log_probs):
    return log_probs.long()

def detached(log_probs, advantages):
    return log_probs.detach() * advantages

def infinite(log_probs, advantages):
    return log_probs / (advantages - advantages)

def steep(log_probs):
    return (log_probs - log_probs.detach()).abs().sqrt()

def batch(log_probs, advantages):
    return -log_probs * (advantages - advantages.mean())

def padded(log_probs, advantages):
    return -log_probs * advantages.mean(-1, keepdim=True)

def in_place(log_probs, advantages):
    return -log_probs * advantages.mul_(2)

def taken(log_probs):
    return log_probs, {"kl": log_probs}

def scalars(log_probs):
    return log_probs, {"mine": log_probs.mean()}

def a_list(log_probs):
    return log_probs, [log_probs]

def broken(log_probs):
    return log_probs @ log_probs
"""
ESTIMATORS = """
import torch
from openppo.experience import Estimator, centred, get_cumulative_returns

def others(totals, groups, greedy):
    same = (groups[:, None] == groups).to(totals.dtype)
    return (same @ totals - totals) / (same.sum(-1) - 1)

def spread(scores, steps, groups, greedy):
    same = (groups[:, None] == groups).to(scores.dtype)
    mean = same @ scores / same.sum(-1)
    return scores / (same @ (scores - mean[groups.argsort()]).square() * 0), None

def to_go(rewards, values, action_mask, config, lambd_critic):
    returns = get_cumulative_returns(rewards, action_mask, config.gamma)
    return returns - values, returns

def masked(*inputs):
    advantages, returns = to_go(*inputs)
    return torch.where(inputs[2], advantages, 0.0), returns

def of_batch(rewards, values, action_mask, config, lambd_critic):
    return action_mask * (rewards - rewards.mean()), action_mask * rewards

good = Estimator(centred(others), compares_responses=True, loss_agg="constant")
critic = Estimator(advantages=masked, uses_critic=True)
greedy = Estimator(centred(lambda totals, groups, greedy: greedy), needs_greedy=True)
undeclared = Estimator(centred(others))
groups = Estimator(centred(lambda totals, groups, greedy: totals.mean()), compares_responses=True)
zero = Estimator(spread, compares_responses=True)
alone = Estimator(lambda *inputs: inputs[0])
short = Estimator(lambda *inputs: (inputs[0][:1], None))
double = Estimator(lambda *inputs: (inputs[0].double(), None))
unmasked = Estimator(advantages=lambda *inputs: (1 + inputs[0], inputs[0]))
no_values = Estimator(advantages=to_go)
batch = Estimator(advantages=of_batch)
"""
CONTROLLERS = """
class Growing:
    def __init__(self, init_kl_coef, kl_target=None):
        self.value, self.n = init_kl_coef, 0

    def update(self, current, n_steps):
        self.n += n_steps
        self.value += current * self.n

class Closed(Growing):
    def state_dict(self):
        return {"both": [self.value, self.n]}

    def load_state_dict(self, state):
        self.value, self.n = state["both"]

def made(init_kl_coef):
    return Growing(2 * init_kl_coef)

class Forgetful(Growing):
    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

class Tuples(Growing):
    def update(self, current, n_steps):
        self.last = (current, n_steps)

class Negative(Growing):
    def update(self, current, n_steps):
        self.value = -1.0

class Text(Growing):
    def update(self, current, n_steps):
        self.value = "high"

class Nothing:
    pass

class Wants:
    def __init__(self, target):
        pass
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in (("loss", LOSSES), ("estimator", ESTIMATORS), ("controller", CONTROLLERS)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def loss_options(folder, name, **options):
    return LossConfig(policy_loss_type=f"{folder}/loss.py:{name}", **options)


def advantage_options(folder, name):
    return AdvantageConfig(advantage_estimator=f"{folder}/estimator.py:{name}")


@pytest.mark.parametrize("name", ["plain", "takes_all", "sequence"])
def test_a_loss_of_rows_and_their_actions_passes(folder, name):
    try_policy_loss(loss_options(folder, name))


def test_a_loss_gets_the_options_that_its_parameters_name(folder):
    tensors = {
        "log_probs": torch.tensor([[2.0, 2.0]]).log().requires_grad_(),
        "old_log_probs": torch.zeros(1, 2),
        "advantages": torch.ones(1, 2),
        "action_mask": torch.tensor([[True, False]]),
        "rollout_log_probs": torch.zeros(1, 2),
    }
    for options, expected in (({}, -1.2), ({"eps_clip_high": 0.25}, -1.25)):
        loss, logged = policy_loss_of(loss_options(folder, "plain", **options))(**tensors)
        assert loss.tolist() == [[pytest.approx(expected), 0.0]]
        assert logged == {}
    with pytest.raises(
        ValueError, match="--eps_clip 0.5: --policy_loss_type .*plain has no parameter eps_clip"
    ):
        policy_loss_of(loss_options(folder, "plain", eps_clip=0.5))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_log_probs", "without a parameter log_probs its loss has no gradient"),
        ("unknown", "parameter 'rewards' has no value; known are log_probs, old_log_probs"),
        ("mean", r"a tensor of shape \(\) as the loss: .*\(3, 6\) here.*--loss_agg"),
        ("numbers", "returned a list as the loss"),
        ("whole", "returned a loss of torch.int64: give floats"),
        ("detached", "a loss without gradient: use log_probs without detach"),
        ("infinite", "has a loss that is not finite"),
        ("steep", "has a gradient that is not finite"),
        ("batch", "the loss of a row depends on other rows"),
        ("padded", "the loss of a row depends on padding"),
        ("in_place", "changes advantages in place"),
        ("taken", "logs 'kl', which is a metric of OpenPPO"),
        ("scalars", "as 'mine': give one number for each token"),
        ("a_list", "a loss and a list: give a dict"),
        ("broken", r"raised RuntimeError.*\(line \d+ of loss.py\) in a trial"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(folder, name, says):
    with pytest.raises(ValueError, match=f"--policy_loss_type {folder}/loss.py:{name}.*{says}"):
        try_policy_loss(loss_options(folder, name))


@pytest.mark.parametrize("name", ["good", "critic", "greedy"])
def test_an_estimator_of_groups_passes(folder, name):
    try_estimator(advantage_options(folder, name))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("undeclared", "depend on other responses .*compares_responses=True"),
        ("groups", "rewards of a group depend on other groups"),
        ("zero", "rewards returned as scores numbers that are not finite"),
        ("alone", "rewards returned a Tensor: give new scores"),
        ("short", r"as scores a tensor of shape \(1,\).*\(4,\) of torch.float32 is needed"),
        ("double", "as scores a tensor .*float64: .*float32 is needed"),
        ("unmasked", "returned advantages that are not 0 outside of action_mask"),
        ("no_values", r"raised TypeError.*NoneType.*in a trial"),
        ("batch", "advantages of a row depends on other rows"),
        ("to_go", "has no Estimator 'to_go', but a function of that name. It has: good, critic"),
        ("nothing", "has no Estimator 'nothing'. It has"),
    ],
)
def test_an_estimator_that_cannot_train_is_refused(folder, name, says):
    with pytest.raises(
        ValueError, match=f"--advantage_estimator {folder}/estimator.py:{name}.*{says}"
    ):
        try_estimator(advantage_options(folder, name))


def test_an_estimator_is_read_anew_when_its_file_is_edited(folder):
    options = advantage_options(folder, "good")
    assert estimator_of(options) is estimator_of(options)
    (folder / "estimator.py").write_text(ESTIMATORS.replace('"constant"', '"sequence_mean"'))
    assert estimator_of(options).loss_agg == "sequence_mean"


def config_of(folder, **options):
    options = {"pretrain": "m", "n_samples_per_prompt": 2} | options
    for name, file in (("advantage_estimator", "estimator"), ("policy_loss_type", "loss")):
        if name in options:
            options[name] = f"{folder}/{file}.py:{options[name]}"
    return from_options(TrainPPOConfig, **options)


def test_an_estimator_decides_aggregation_and_the_size_of_groups(folder):
    config = config_of(folder, advantage_estimator="good", policy_loss_type="plain")
    assert loss_aggregation(config) == "constant"
    assert list(estimator_problems(config)) == []
    single = config_of(folder, advantage_estimator="good", n_samples_per_prompt=1)
    with pytest.raises(
        ValueError, match="estimator.py:good compares .*--n_samples_per_prompt of at least 2"
    ):
        try_own_algorithm(single, SingleProcess(), are_tasks=False)
    try_own_algorithm(single, SingleProcess(), are_tasks=True)


def kl_options(folder, name, **options):
    return KLConfig(kl_controller=f"{folder}/controller.py:{name}", **options)


@pytest.mark.parametrize("name", ["Growing", "Closed", "made"])
def test_a_controller_resumes_from_its_state(folder, name):
    options = kl_options(folder, name, init_kl_coef=0.5)
    try_kl_controller(options)
    controller, resumed = make_kl_controller(options), make_kl_controller(options)
    controller.update(0.25, 4)
    controller.update(float("nan"), 4)
    assert controller.value == (2.0 if name == "made" else 1.5)
    resumed.load_state_dict(controller.state_dict())
    resumed.update(0.125, 4)
    assert resumed.value == controller.value + 0.125 * 8


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Forgetful", "its state does not restore it"),
        ("Tuples", "its state is no JSON"),
        ("Negative", "its value is -1.0. A coefficient is a finite float"),
        ("Text", "its value is 'high'"),
        ("Nothing", "a Nothing has no value"),
        ("Wants", "parameter 'target' has no value; known are init_kl_coef, kl_target, kl_horizon"),
    ],
)
def test_a_controller_that_cannot_hold_the_kl_is_refused(folder, name, says):
    with pytest.raises(ValueError, match=f"--kl_controller {folder}/controller.py:{name}.*{says}"):
        try_kl_controller(kl_options(folder, name))


def test_an_option_that_a_controller_does_not_read_is_an_error(folder):
    with pytest.raises(ValueError, match="kl_horizon 5: .*Growing has no parameter kl_horizon"):
        try_kl_controller(kl_options(folder, "Growing", kl_horizon=5))


class OtherOrder(OneOf):
    """A rank beside one that has read another order."""

    def all_gather_object(self, value):
        return [value, None if value is None else "other"]


def test_ranks_with_other_orders_are_an_error(tmp_path):
    (tmp_path / "order.py").write_text("def back(prompts):\n    return [1, 0]\n")
    config = from_options(TrainPPOConfig, pretrain="m", prompt_order=f"{tmp_path}/order.py:back")
    prompts = [Prompt("a", [0]), Prompt("b", [0])]
    try_prompt_order(config, prompts, SingleProcess())
    with pytest.raises(
        ValueError, match="the order of --prompt_order .* holds something else on rank 1"
    ):
        try_prompt_order(config, prompts, OtherOrder(0, 2))
