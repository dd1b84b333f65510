"""The loop of PPO with parts made by hand: what it reports, when, and what is left of it when it fails."""

import contextlib
import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.experience.maker import Hooks
from openppo.tracking import PhaseTimer, Trackers, step_tracer
from openppo.tracking.phase import current
from openppo.trainer import PPOTrainer
from openppo.trainer.callbacks import Callback
from openppo.trainer.components import PPOComponents
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.source import PromptSource
from openppo.types import Completion, FinishReason, Interrupted, NeverStops, Prompt, Score, SingleProcess

CPU = torch.device("cpu")


class Record(SimpleNamespace):
    """A tracker and a checkpointer that keeps what is logged and saved; a checkpoint is due when an episode ends."""

    name, errors = "--use_record", (OSError,)
    log_samples = log_tokens = log_histograms = save_if_best = lambda *_: None

    def __init__(self):
        super().__init__(logged=[], saved=[], closed=0)

    def log(self, step, metrics):
        assert not self.closed
        self.logged.append((step, dict(metrics)))

    def close(self):
        self.closed += 1

    def save(self, step, state, write_model, random_state):
        self.random_state = random_state
        self.saved.append((step, json.loads(json.dumps(state)), bool(self.closed)))
        return Path("here")

    def due(self, step, episode_ended):
        return episode_ended


def nothing_held(*_):
    return contextlib.nullcontext()


class Strategy(SimpleNamespace):
    """One rank that logs no samples and saves nothing."""

    comm, device, is_main = SingleProcess(), CPU, False
    uncompiled = for_generation = save_pretrained = nothing_held

    def any_rank(self, value):
        return value


class TwoLetters:
    """Answers each prompt with 1 or 2, in turns."""

    version, with_weights = 0, nothing_held

    def generate(self, prompts, params, seeds):
        return [Completion([1 + i % 2], [-1.0], FinishReason.STOP) for i in range(len(prompts))]


class FailingScorer:
    """A response earns its last token; the reward function fails on all prompts of a text in ``fails_on``."""

    collective, fails_on = True, frozenset()

    def score(self, trajectories):
        torch.rand(1)  # as a reward function may
        failed = [t.prompt.text in self.fails_on for t in trajectories]
        return [Score({"a": t.token_ids[-1] * (not f)}, failed=f) for t, f in zip(trajectories, failed, strict=True)]


class Policy(nn.Module):
    """The same log-prob for everything; trained without an optimizer, as a ``TrainableModel`` is called."""

    learning_rate = 0.5

    def __init__(self):
        super().__init__()
        self.module = SimpleNamespace(model=None)
        self.level = nn.Parameter(torch.tensor(-1.0))

    def forward(self, ids, mask, actions, return_entropy=False, **_):
        log_probs = self.level * actions
        return (log_probs, actions.float()) if return_entropy else log_probs

    def backward(self, loss, last):
        loss.backward()

    def step(self):
        return 1.0


def prompts(*texts):
    return [Prompt(text, [3]) for text in texts]


def trainer_of(n_batches, evaluates=False, callbacks=(), **options):
    """A trainer of ``n_batches`` batches of two prompts, "0", "1" and so on."""
    given = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "init_kl_coef": 0.0, "self_check": False}
    sizes = {"advantage_estimator": "reinforce", "rollout_batch_size": 2, "train_batch_size": 2}
    config = from_options(TrainPPOConfig, **{**given, **sizes, **options})
    policy = Policy()
    hooks = Hooks(PhaseTimer(step_tracer(config.run.save_path, config.tracking, 0)))
    record = Record()
    parts = PPOComponents(
        strategy=Strategy(),
        tokenizer=SimpleNamespace(decode=lambda ids, **_: ""),
        actor=policy,
        critic_step=None,
        engine=TwoLetters(),
        scorer=FailingScorer(),
        maker=ExperienceMaker(policy, None, None, config, SingleProcess(), CPU, 0, hooks),
        prompts=prompts(*(str(i) for i in range(2 * n_batches))),
        held_out=prompts("held out") if evaluates else [],
        documents=[],
        grading=Grading(SingleProcess()),
        trackers=Trackers([record]),
        checkpointer=record,
    )
    return PPOTrainer(config, parts, PromptSource(config, parts), callbacks)


@pytest.mark.parametrize(
    ("n_batches", "options", "logged"),
    [
        (7, {"logging_steps": 3, "eval_steps": 2}, {2: True, 3: False, 4: True, 6: True, 7: True}),
        (5, {"logging_steps": 3, "eval_steps": 2, "evaluates": False}, {3: False, 5: False}),
        (7, {"max_steps": 3}, {1: False, 2: False, 3: True}),
    ],
)
def test_evaluations_logging_steps_and_the_end_are_logged(n_batches, options, logged):
    trainer = trainer_of(n_batches, **{"evaluates": True, **options})
    trainer.fit()
    record = trainer.components.checkpointer
    assert {step: "eval_reward" in row for step, row in record.logged} == logged
    assert [step for step, *_ in record.saved] == [trainer.total_steps], "the end of max_steps too gets a checkpoint"


def test_errors_are_those_of_all_responses_of_a_step_and_no_others():
    """Prompts on which all responses fail earn the same and are dropped; that they failed is known all the same."""
    plain, dynamic = trainer_of(3), trainer_of(2, dynamic_sampling=True, n_samples_per_prompt=2, train_batch_size=4)
    plain.components.scorer.fails_on = dynamic.components.scorer.fails_on = {"bad"}
    batches = [prompts("bad", "good"), prompts("good", "good"), prompts("bad", "bad")]
    assert [plain.step(batch)["reward_errors"] for batch in batches] == [1, 0, 2]
    metrics = dynamic.step(prompts("bad", "bad"))
    assert [metrics[name] for name in ("sampled_batches", "useful_groups", "reward_errors")] == [2, 2, 4]


def spans_of(trace):
    """Names of the phases in a trace of the profiler."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events} & {"step", "generation", "scoring", "experience", "training"}


def spy(monkeypatch, part, call, seen):
    """Note step and phase of the process at each ``call`` of ``part``."""
    given = getattr(part, call)
    monkeypatch.setattr(part, call, lambda *args: seen.append((current.step, current.phase)) or given(*args))


def test_a_step_and_its_halves_give_the_same_bits_metrics_traces_and_places(tmp_path, monkeypatch):
    def run(make_step, save_path):
        options = {"n_samples_per_prompt": 2, "entropy_coef": 0.1, "train_batch_size": 4}
        trainer = trainer_of(2, profile_steps="2", save_path=str(save_path), **options)
        seen = []
        spy(monkeypatch, trainer.components.engine, "generate", seen)
        spy(monkeypatch, trainer.components.actor, "step", seen)
        current.step = 0
        metrics = [make_step(trainer, prompts("good", "better")) for _ in range(2)]
        assert metrics[1]["time/step_s"] >= metrics[1]["time/generation_s"] + metrics[1]["time/training_s"]
        assert list(save_path.rglob("step_00000001*")) == []
        spans = set().union(*map(spans_of, (save_path / "logs" / "profile").glob("step_00000002_rank_0*.gz")))
        timeless = [{n: v for n, v in row.items() if not n.startswith(("time/", "speed/"))} for row in metrics]
        gradient = trainer.components.actor.level.grad
        return timeless, list(metrics[0]), gradient.item(), spans, seen

    whole = run(lambda trainer, batch: trainer.step(batch), tmp_path / "whole")
    assert whole == run(lambda trainer, batch: trainer.train_on(trainer.rollout(batch)), tmp_path / "halves")
    assert whole[3] == {"step", "generation", "scoring", "experience", "training"}
    assert whole[4] == [(1, "generation"), (1, "training"), (2, "generation"), (2, "training")]


def test_a_run_that_fails_closes_its_trackers_and_raises_what_ended_it():
    class Fault(Callback):
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 2:
                raise ZeroDivisionError("planted")

    trainer = trainer_of(5, callbacks=[Fault()])
    with pytest.raises(ZeroDivisionError, match="planted"):
        trainer.fit()
    record = trainer.components.checkpointer
    assert ([step for step, _ in record.logged], record.closed) == ([1], 1)


class StopIn(NeverStops):
    """Raises at the call of that number."""

    def __init__(self, at):
        self.left = at

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            raise Interrupted("SIGTERM")


@pytest.mark.parametrize(("at", "steps_done"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_a_signal_drops_the_step_under_way_and_saves_the_state_of_the_last(at, steps_done):
    """Two places of a step: before sampling, and when its scores are awaited."""
    trainer = trainer_of(5)
    stop, record = StopIn(at), trainer.components.checkpointer
    trainer.components.stop = stop
    object.__setattr__(trainer.maker.hooks, "stop", stop)
    before = torch.get_rng_state() if not steps_done else None
    trainer.fit()
    [(step, state, was_closed)] = record.saved
    assert (step, state["state"]["global_step"], was_closed) == (steps_done, steps_done, False)
    assert state["source"] == {"consumed_batches": steps_done, "consumed_prompts": 2 * steps_done}
    assert record.closed == 1
    if before is not None:
        assert torch.equal(record.random_state["torch"], before), "scores may draw random numbers"


def test_a_signal_in_an_evaluation_keeps_the_metrics_of_its_step_for_the_report():
    trainer = trainer_of(2, evaluates=True, eval_steps=1)
    trainer.components.stop = StopIn(2)  # the first is before sampling
    trainer.fit()
    [(step, state, _)] = trainer.components.checkpointer.saved
    assert step == 1
    assert state["state"]["unreported"]["reward"] == pytest.approx(1.5)
    again = trainer_of(2, evaluates=True, eval_steps=1)
    record = again.components.checkpointer
    record.load = lambda: state
    again.load_checkpoint()
    again.fit()
    assert [(number, "eval_reward" in row) for number, row in record.logged] == [(1, True), (2, True)]
    assert record.logged[0][1]["reward"] == pytest.approx(1.5)


def test_a_resumed_run_normalizes_steps_as_before():
    before, after = (trainer_of(1, normalize_reward=True, reward_normalizer="running").maker for _ in range(2))
    before.step_moments.update(torch.tensor([0.25, 1.0, 0.5]), SingleProcess())
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.step_moments.state_dict() == before.step_moments.state_dict()


def test_reading_a_trajectory_waits_for_its_score():
    rollout = trainer_of(2).rollout(prompts("a", "b"))
    assert [t.scores for t in rollout.unscored] == [{}, {}]
    assert [t.scores for t in rollout] == [{"a": 1.0}, {"a": 2.0}]
    parts = [trainer_of(2).rollout(prompts("a", "b")) for _ in range(2)]
    assert [t.scores["a"] for t in parts[0] + parts[1]] == [1.0, 2.0, 1.0, 2.0]
    del rollout[0]
    assert trainer_of(2).train_on(rollout)["reward"] == 2.0, "what is left out is not trained on"


def test_a_stop_after_the_report_is_asked_of_all_ranks(monkeypatch):
    trainer, asked = trainer_of(2), []
    monkeypatch.setattr(Strategy, "any_rank", lambda self, value: bool(asked.append(value)) or value)
    monkeypatch.setattr(trainer.source, "publish", lambda version: setattr(trainer, "should_stop", True))
    trainer.fit()
    assert (trainer.global_step, asked[:3]) == (1, [False, False, True])


def test_a_loop_of_ones_own_ends_with_max_steps():
    trainer = trainer_of(7, max_steps=3)
    assert [trainer.step(batch)["reward"] for batch in trainer.prompt_batches()] == [1.5] * 3
    assert trainer.source.state_dict()["consumed_batches"] == trainer.global_step == 3


def test_a_source_that_ends_early_ends_with_evaluation_checkpoint_and_model(monkeypatch):
    trainer, models = trainer_of(7, evaluates=True, logging_steps=5), []
    record = trainer.components.checkpointer
    monkeypatch.setattr(PromptSource, "__iter__", lambda self: map(self.rollout, [prompts("a")] * 2))
    monkeypatch.setattr(trainer, "save", lambda: models.append(trainer.global_step))
    trainer.fit()
    assert [(step, "eval_reward" in row) for step, row in record.logged] == [(2, True)]
    assert ([step for step, *_ in record.saved], models) == ([2], [2])
