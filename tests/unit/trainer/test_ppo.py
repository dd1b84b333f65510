"""The loop of PPO with parts made by hand: what it reports, when, and what is left of it when it fails."""

import contextlib
import gzip
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.experience.maker import Hooks
from openppo.rollout.rollout import Rollout
from openppo.tracking import PhaseTimer, Trackers, step_tracer
from openppo.tracking.phase import begin_step, current
from openppo.trainer import PPOTrainer
from openppo.trainer.callbacks import Callback
from openppo.trainer.components import PPOComponents
from openppo.trainer.evaluation import Grading
from openppo.trainer.source import PromptSource
from openppo.types import (
    Completion,
    FinishReason,
    Interrupted,
    Prompt,
    SamplingParams,
    Score,
    SingleProcess,
    Trajectory,
)

CPU = torch.device("cpu")


class Recorder:
    """A tracker that keeps what is logged."""

    name = "--use_recorder"
    errors = (OSError,)

    def __init__(self) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert not self.closed
        self.logged.append((step, dict(metrics)))

    def log_samples(self, step: int, samples: list[dict[str, Any]]) -> None: ...

    log_tokens = log_histograms = log_samples

    def close(self) -> None:
        self.closed += 1


class Strategy(SimpleNamespace):
    """One rank that logs no samples and saves nothing."""

    comm, device, is_main = SingleProcess(), CPU, False

    def any_rank(self, value: bool) -> bool:
        return value

    def uncompiled(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def for_generation(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def save_pretrained(self, *_: Any) -> None: ...


class TwoLetters:
    """Answers each prompt with 1 or 2, in turns."""

    version = 0

    def with_weights(self, weights: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int]
    ) -> list[Completion]:
        return [Completion([1 + i % 2], [-1.0], FinishReason.STOP) for i in range(len(prompts))]


class FailingScorer:
    """A response earns its last token; the reward function fails on all prompts of a text in ``fails_on``."""

    collective = True

    def __init__(self) -> None:
        self.fails_on: set[str] = set()

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        failed = [t.prompt.text in self.fails_on for t in trajectories]
        earned = [0.0 if f else t.token_ids[-1] for t, f in zip(trajectories, failed, strict=True)]
        return [Score({"a": reward}, failed=f) for reward, f in zip(earned, failed, strict=True)]


class Policy(nn.Module):
    """The same log-prob for everything; trained without an optimizer, as a ``TrainableModel`` is called."""

    learning_rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.module = SimpleNamespace(model=None)
        self.level = nn.Parameter(torch.tensor(-1.0))

    def forward(self, ids: Tensor, mask: Tensor, actions: Tensor, return_entropy: bool = False, **_: Any) -> Any:
        log_probs = self.level * actions
        return (log_probs, actions.float()) if return_entropy else log_probs

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self) -> float:
        return 1.0


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt(text, [3]) for text in texts]


def trainer_of(
    n_batches: int,
    evaluates: bool = False,
    callbacks: Sequence[Callback] = (),
    estimated: Mapping[str, int] | None = None,
    **options: Any,
) -> PPOTrainer:
    """A trainer of ``n_batches`` batches of two prompts, "0", "1" and so on."""
    config = from_options(
        TrainPPOConfig,
        **{
            "pretrain": "m",
            "prompt_data": "d",
            "reward_fn": "f.py",
            "advantage_estimator": "reinforce",
            "init_kl_coef": 0.0,
            "rollout_batch_size": 2,
            "train_batch_size": 2,
            "self_check": False,
            **options,
        },
    )
    policy: Any = Policy()
    hooks = Hooks(PhaseTimer(step_tracer(config.run.save_path, config.tracking, 0), estimated))
    parts: Any = PPOComponents(
        strategy=Strategy(),  # type: ignore[arg-type]
        tokenizer=SimpleNamespace(decode=lambda ids, **_: ""),  # type: ignore[arg-type]
        actor=policy,
        critic=None,
        engine=TwoLetters(),  # type: ignore[arg-type]
        scorer=FailingScorer(),
        maker=ExperienceMaker(policy, None, None, config, SingleProcess(), CPU, 0, hooks),
        prompts=prompts(*(str(i) for i in range(2 * n_batches))),
        held_out=prompts("held out") if evaluates else [],
        documents=[],
        grading=Grading(SingleProcess()),
        trackers=Trackers([Recorder()]),  # type: ignore[list-item]
    )
    return PPOTrainer(config, parts, PromptSource(config, parts), callbacks)


def recorder_of(trainer: PPOTrainer) -> Recorder:
    (recorder,) = trainer.components.trackers._trackers
    assert isinstance(recorder, Recorder)
    return recorder


def test_every_evaluation_is_logged_whatever_logging_steps() -> None:
    trainer = trainer_of(7, evaluates=True, logging_steps=3, eval_steps=2)
    recorder = recorder_of(trainer)
    trainer.fit()
    assert [(step, "eval_reward" in row) for step, row in recorder.logged] == [
        *((2, True), (3, False), (4, True), (6, True)),
        (7, True),  # the end
    ]


def test_without_held_out_data_only_logging_steps_and_the_end_are_logged() -> None:
    trainer = trainer_of(5, logging_steps=3, eval_steps=2)
    recorder = recorder_of(trainer)
    trainer.fit()
    assert [step for step, _ in recorder.logged] == [3, 5]


def test_errors_of_the_reward_function_are_counted_in_a_loop_of_ones_own() -> None:
    trainer = trainer_of(3)
    trainer.components.scorer.fails_on = {"bad"}  # type: ignore[attr-defined]
    batches = [prompts("bad", "good"), prompts("good", "good"), prompts("bad", "bad")]
    assert [trainer.train_on(trainer.rollout(batch))["reward_errors"] for batch in batches] == [1, 0, 2]


def test_errors_of_all_rollouts_of_a_step_are_counted_with_dynamic_sampling() -> None:
    """Prompts on which all responses fail earn the same and are dropped; that they failed is known all the same."""
    trainer = trainer_of(2, dynamic_sampling=True, n_samples_per_prompt=2, train_batch_size=4)
    trainer.components.scorer.fails_on = {"bad"}  # type: ignore[attr-defined]
    metrics = trainer.step(prompts("bad", "bad"))
    assert (metrics["sampled_batches"], metrics["useful_groups"]) == (2, 2)
    assert metrics["reward_errors"] == 4


def test_errors_of_a_step_are_those_of_its_own_responses() -> None:
    trainer = trainer_of(3)
    trainer.components.scorer.fails_on = {"bad"}  # type: ignore[attr-defined]
    batches = [prompts("good", "good"), prompts("good", "bad"), prompts("good", "good")]
    assert [trainer.step(batch)["reward_errors"] for batch in batches] == [0, 1, 0]


def whole(trainer: PPOTrainer, batch: list[Prompt]) -> dict[str, float]:
    return trainer.step(batch)


def in_halves(trainer: PPOTrainer, batch: list[Prompt]) -> dict[str, float]:
    return trainer.train_on(trainer.rollout(batch))


def spans_of(trace: Path) -> set[str]:
    """Names of the phases in a trace of the profiler."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    phases = {"step", "generation", "scoring", "experience", "training"}
    return {event["name"] for event in events} & phases


def test_a_step_and_its_halves_give_the_same_metrics_and_traces(tmp_path: Path) -> None:
    names, spans = [], []
    for make_step in (whole, in_halves):
        save_path = tmp_path / make_step.__name__
        trainer = trainer_of(2, profile_steps="2", save_path=str(save_path))
        metrics = [make_step(trainer, prompts("good", "good")) for _ in range(2)]
        assert metrics[1]["time/step_s"] >= metrics[1]["time/generation_s"] + metrics[1]["time/training_s"]
        names.append([sorted(of_step) for of_step in metrics])
        spans.append(set().union(*map(spans_of, (save_path / "logs" / "profile").glob("step_00000002_rank_0*.gz"))))
        assert list(save_path.rglob("step_00000001*")) == []
    assert names[0] == names[1]
    assert "time/step_s" in names[0][0]
    assert spans[0] == spans[1] == {"step", "generation", "scoring", "experience", "training"}


@pytest.mark.parametrize("make_step", [whole, in_halves])
def test_a_fault_is_in_the_step_that_has_begun(make_step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seen = trainer_of(2), []
    for part, call in ((trainer.components.engine, "generate"), (trainer.components.actor, "step")):
        given = getattr(part, call)

        def spy(*arguments: Any, given: Any = given) -> Any:
            seen.append((current.step, current.phase))
            return given(*arguments)

        monkeypatch.setattr(part, call, spy)
    begin_step(0)
    for _ in range(2):
        make_step(trainer, prompts("good", "good"))
    assert seen == [(1, "generation"), (1, "training"), (2, "generation"), (2, "training")]


def test_memory_of_a_step_stands_beside_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        synchronize=lambda: None,
        max_memory_allocated=lambda: 3 << 30,
        reset_peak_memory_stats=lambda: None,
    )
    monkeypatch.setattr("openppo.tracking.phase.torch", SimpleNamespace(cuda=cuda))
    estimated = {"generation": 1 << 30, "training": 2 << 30, "step": 2 << 30}
    metrics = trainer_of(1, estimated=estimated).step(prompts("good", "good"))
    memory = {name.removeprefix("memory/"): value for name, value in metrics.items() if name.startswith("memory/")}
    peaks = {f"{name}_peak_gib": 3.0 for name in ("generation", "scoring", "experience", "training", "step")}
    assert memory == peaks | {"generation_estimated_gib": 1, "training_estimated_gib": 2, "step_estimated_gib": 2}


class Fault(Callback):
    """Ends a run in its second step with ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, trainer: PPOTrainer, metrics: Mapping[str, float]) -> None:
        if trainer.global_step == 2:
            raise self.error


def test_a_run_that_fails_closes_its_trackers_and_raises_what_ended_it() -> None:
    trainer = trainer_of(5, callbacks=[Fault(ZeroDivisionError("planted"))])
    recorder = recorder_of(trainer)
    with pytest.raises(ZeroDivisionError, match="planted"):
        trainer.fit()
    assert ([step for step, _ in recorder.logged], recorder.closed) == ([1], 1)


class Saver(SimpleNamespace):
    """A checkpointer that keeps what it is given."""

    def __init__(self, recorder: Recorder, saves_episodes: bool = False) -> None:
        self.saves_episodes = saves_episodes
        self.saved: list[tuple[int, dict[str, Any], bool]] = []
        self.recorder = recorder

    def save(self, step: int, state: dict[str, Any], write_model: Any, random_state: Any) -> Path:
        self.random_state = random_state
        self.saved.append((step, json.loads(json.dumps(state)), bool(self.recorder.closed)))
        return Path("here")

    def due(self, step: int, episode_ended: bool) -> bool:
        return self.saves_episodes and episode_ended

    def save_if_best(self, *_: Any) -> None: ...


class StopIn:
    """A stop check that raises at its ``at``-th call."""

    def __init__(self, at: int) -> None:
        self.at, self.n_calls = at, 0

    def requested(self) -> bool:
        return False

    def __call__(self) -> None:
        self.n_calls += 1
        if self.n_calls == self.at:
            raise Interrupted("SIGTERM")


@pytest.mark.parametrize(("at", "steps_done"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_a_signal_drops_the_step_under_way_and_saves_the_state_of_the_last(at: int, steps_done: int) -> None:
    """Two places of a step: before sampling, and when its scores are awaited."""
    trainer = trainer_of(5)
    stop, recorder = StopIn(at), recorder_of(trainer)
    trainer.components.stop = stop
    object.__setattr__(trainer.maker.hooks, "stop", stop)
    saver: Any = Saver(recorder)
    trainer.components.checkpointer = saver
    before = torch.get_rng_state() if not steps_done else None
    trainer.components.scorer.score = spoiled(trainer.components.scorer.score)  # type: ignore[union-attr]
    trainer.fit()
    [(step, state, was_closed)] = saver.saved
    assert (step, state["state"]["global_step"], was_closed) == (steps_done, steps_done, False)
    assert state["source"] == {"consumed_batches": steps_done, "consumed_prompts": 2 * steps_done}
    assert recorder.closed == 1
    if before is not None:
        assert torch.equal(saver.random_state["torch"], before), "scores may draw random numbers"


def spoiled(score: Any) -> Any:
    """A scorer that draws random numbers."""

    def draw(trajectories: Any) -> Any:
        torch.rand(1)
        return score(trajectories)

    return draw


def test_a_signal_in_an_evaluation_keeps_the_metrics_of_its_step_for_the_report() -> None:
    trainer = trainer_of(2, evaluates=True, eval_steps=1)
    trainer.components.stop = StopIn(2)  # the first is before sampling
    saver: Any = Saver(recorder_of(trainer))
    trainer.components.checkpointer = saver
    trainer.fit()
    [(step, state, _)] = saver.saved
    assert step == 1
    assert state["state"]["unreported"]["reward"] == pytest.approx(1.5)
    again = trainer_of(2, evaluates=True, eval_steps=1)
    again.components.checkpointer = saver
    saver.load = lambda: state
    again.load_checkpoint()
    recorder = recorder_of(again)
    again.fit()
    assert [(number, "eval_reward" in row) for number, row in recorder.logged] == [(1, True), (2, True)]
    assert recorder.logged[0][1]["reward"] == pytest.approx(1.5)


def test_a_resumed_run_normalizes_steps_as_before() -> None:
    options = {"normalize_reward": True, "reward_normalizer": "running"}
    before, after = trainer_of(1, **options), trainer_of(1, **options)
    before.maker.step_moments.update(torch.tensor([0.25, 1.0, 0.5]), SingleProcess())
    after.maker.load_state_dict(json.loads(json.dumps(before.maker.state_dict())))
    assert after.maker.step_moments.state_dict() == before.maker.step_moments.state_dict()


def test_max_steps_ends_a_run_and_is_its_last_step() -> None:
    trainer = trainer_of(7, evaluates=True, max_steps=3)
    recorder = recorder_of(trainer)
    assert trainer.total_steps == 3
    trainer.fit()
    assert [(step, "eval_reward" in row) for step, row in recorder.logged] == [(1, False), (2, False), (3, True)]


def test_max_steps_ends_a_run_with_a_checkpoint() -> None:
    trainer = trainer_of(7, max_steps=3)
    saver: Any = Saver(recorder_of(trainer), saves_episodes=True)
    trainer.components.checkpointer = saver
    trainer.fit()
    assert [step for step, *_ in saver.saved] == [3]


def test_halves_of_a_step_equal_it_bit_for_bit() -> None:
    def run(make_step: Any) -> tuple[list[dict[str, float]], Tensor]:
        trainer = trainer_of(3, n_samples_per_prompt=2, entropy_coef=0.1, train_batch_size=4)
        metrics = [make_step(trainer, prompts("good", "better")) for _ in range(3)]
        timeless = [{n: v for n, v in row.items() if not n.startswith(("time/", "speed/"))} for row in metrics]
        return timeless, trainer.components.actor.level.grad  # type: ignore[attr-defined]

    (whole_metrics, whole_gradient), (metrics, gradient) = run(whole), run(in_halves)
    assert metrics == whole_metrics
    assert torch.equal(gradient, whole_gradient)


def test_reading_a_trajectory_waits_for_its_score() -> None:
    rollout = trainer_of(2).rollout(prompts("a", "b"))
    assert isinstance(rollout, Rollout)
    assert [t.scores for t in rollout.unscored] == [{}, {}]
    assert [t.scores for t in rollout] == [{"a": 1.0}, {"a": 2.0}]
    parts = [trainer_of(2).rollout(prompts("a", "b")) for _ in range(2)]
    assert [t.scores["a"] for t in parts[0] + parts[1]] == [1.0, 2.0, 1.0, 2.0]


def test_what_is_left_out_of_a_rollout_is_not_trained_on() -> None:
    rollout = trainer_of(2).rollout(prompts("a", "b"))
    assert isinstance(rollout, Rollout)
    del rollout[0]
    assert rollout.unscored == [rollout[0]]
    assert trainer_of(2).train_on(rollout)["reward"] == 2.0


def test_a_stop_after_the_report_is_asked_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, asked = trainer_of(2), []
    monkeypatch.setattr(Strategy, "any_rank", lambda self, value: bool(asked.append(value)) or value)
    monkeypatch.setattr(trainer.source, "publish", lambda version: setattr(trainer, "should_stop", True))
    trainer.fit()
    assert (trainer.global_step, asked[:3]) == (1, [False, False, True])


def test_a_loop_of_ones_own_ends_with_max_steps() -> None:
    trainer = trainer_of(7, max_steps=3)
    for batch in trainer.prompt_batches():
        trainer.step(batch)
    assert trainer.global_step == 3
    assert trainer.source.state_dict()["consumed_batches"] == 3


def test_a_source_that_ends_early_gets_its_last_evaluation_log_and_checkpoint() -> None:
    trainer = trainer_of(7, evaluates=True, logging_steps=5)
    recorder, prompt_source = recorder_of(trainer), trainer.source

    class TwoSteps(SimpleNamespace):
        steps = 7
        publish, state_dict, evaluate = prompt_source.publish, prompt_source.state_dict, prompt_source.evaluate

        def __iter__(self) -> Any:
            return itertools.islice(prompt_source, 2)

    source: Any = TwoSteps()
    trainer.source = source
    saver: Any = Saver(recorder, saves_episodes=True)
    trainer.components.checkpointer = saver
    trainer.fit()
    [(step, row)] = recorder.logged
    assert (step, "eval_reward" in row, "reward" in row) == (2, True, True)
    assert [step for step, *_ in saver.saved] == [2]
