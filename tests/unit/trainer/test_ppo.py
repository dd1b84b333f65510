"""The loop of PPO and its source, of parts made by hand: who samples what, what is reported, what a failure leaves."""

import contextlib
import dataclasses
import gzip
import json
import logging
import math

import pytest
import torch
from safetensors.torch import load_file

from openppo.config import RunConfig
from openppo.experience.group_filters import useful_groups
from openppo.rollout.failures import NothingTrainedError
from openppo.sources.dynamic_sampling import deal_groups
from openppo.sources.synchronous import PromptSource
from openppo.tracking.phase import current
from openppo.trainer.callbacks import Callback
from openppo.trainer.evaluation.evaluator import Grading
from openppo.trainer.skipped_steps import SkippedSteps
from openppo.types import Completion, FinishReason, Prompt, Score, SingleProcess
from tests.samples import one_segment, with_last
from tests.unit.trainer.conftest import OneOf, Scorer, StopIn, Strategy, prompts, trainer_of


def ppo(n_batches, evaluates=False, **options):
    """A trainer of so many batches of two prompts, of which the one is answered with 1, which it earns, one with 2."""
    given, held_out = (
        prompts(*map(str, range(2 * n_batches))),
        prompts("held out") if evaluates else [],
    )
    answers = [Completion([token], [-1.0], [0], FinishReason.STOP) for token in (1, 2)]
    trainer = trainer_of(lambda i, *_: answers[i % 2], given, held_out, **options)
    return trainer, trainer.components.checkpointer


def test_the_memory_that_sizes_the_engine_is_kept_where_runs_are_deterministic(monkeypatch):
    measured = iter([700, 300])
    monkeypatch.setattr("openppo.sources.rank_sampler.free_memory", lambda device: next(measured))
    trainer, record = ppo(2, deterministic=True)
    trainer.fit()
    assert trainer.source.sampler.engine.free == 700, "of the first rollout"
    again, _ = ppo(2, deterministic=True)
    again.source.load_state_dict(record.saved[-1][1]["source"])
    again.step(prompts("a", "b"))
    assert again.source.sampler.engine.free == 700, "though less is free now"
    plain, _ = ppo(2)
    plain.fit()
    assert plain.source.sampler.engine.free is None
    assert "free_memory" not in plain.source.state_dict()


@pytest.mark.parametrize(
    ("n_batches", "options", "logged"),
    [
        (7, {"logging_steps": 3, "eval_steps": 2}, {2: True, 3: False, 4: True, 6: True, 7: True}),
        (5, {"logging_steps": 3, "eval_steps": 2, "evaluates": False}, {3: False, 5: False}),
        (7, {"max_steps": 3}, {1: False, 2: False, 3: True}),
    ],
)
def test_evaluations_logging_steps_and_the_end_are_logged(n_batches, options, logged):
    trainer, record = ppo(n_batches, **{"evaluates": True, **options})
    trainer.fit()
    assert {step: "eval_reward" in row for step, row in record.logged} == logged
    assert [step for step, *_ in record.saved] == [trainer.total_steps], (
        "the end of max_steps too gets a checkpoint"
    )


def test_passes_samples_and_tokens_of_the_whole_run_are_counted():
    trainer, record = ppo(3, num_episodes=2)
    trainer.fit()
    counts = [
        [row[name] for name in ("episode", "consumed_samples", "consumed_tokens")]
        for _, row in record.logged
    ]
    assert counts == [[(n + 1) / 3, 2 * (n + 1), 2 * (n + 1) * 2] for n in range(6)], (
        "a prompt of one token each"
    )
    assert record.saved[-1][1]["state"]["consumed_samples"] == 12
    trainer.state.consumed_tokens = 100
    assert trainer.step(prompts("a", "b", "c"))["consumed_tokens"] == 106
    dynamic, record = ppo(4, dynamic_sampling=True, n_samples_per_prompt=2, train_batch_size=4)
    dynamic.scorer = None
    dynamic.fit()
    episodes = [row["episode"] for _, row in record.logged]
    assert episodes == sorted(episodes) and episodes[-1] == 1.0


def test_errors_are_those_of_all_responses_of_a_step_and_no_others():
    """Prompts on which all responses fail earn the same and are dropped; that they failed is known all the same."""

    def fails_on_bad(sample):
        failed = sample.prompt.text == "bad"
        return Score({"a": 0.0 if failed else sample.last.token_ids[-1]}, failed=failed)

    plain, _ = ppo(3, score=fails_on_bad)
    dynamic, _ = ppo(
        2, score=fails_on_bad, dynamic_sampling=True, n_samples_per_prompt=2, train_batch_size=4
    )
    batches = [prompts("bad", "good"), prompts("good", "good")]
    assert [plain.step(batch)["reward_errors"] for batch in batches] == [1, 0]
    metrics = dynamic.step(prompts("bad", "bad"))
    assert [metrics[name] for name in ("sampled_batches", "useful_groups", "reward_errors")] == [
        2,
        2,
        4,
    ]


@pytest.mark.parametrize(
    "options", [{}, {"dynamic_sampling": True, "n_samples_per_prompt": 2}], ids=["all", "dynamic"]
)
def test_a_step_whose_samples_all_fail_ends_the_run_after_a_checkpoint(options):
    def fails_after_a_step(sample):
        return Score(
            {"a": float(sample.last.token_ids[-1])},
            failed=trainer.global_step > 0,
            error=f"KeyError('x') for prompt {sample.prompt.text!r}",
        )

    trainer, record = ppo(3, score=fails_after_a_step, train_batch_size=2, **options)
    with pytest.raises(
        NothingTrainedError, match=r"raised on all \d+ samples.*KeyError\('x'\) for prompt '\d'"
    ):
        trainer.fit()
    assert [step for step, *_ in record.saved] == [1]


def test_an_evaluation_whose_samples_all_fail_ends_the_run():
    def fails_held_out(sample):
        return Score({"a": 1.0}, failed=sample.prompt.text == "held out", error="KeyError('x')")

    trainer, record = ppo(3, evaluates=True, score=fails_held_out, eval_steps=2)
    with pytest.raises(NothingTrainedError, match=r"raised on all 1 samples.*KeyError\('x'\)"):
        trainer.fit()
    assert [step for step, *_ in record.saved] == [2]


def note_places(monkeypatch, part, call, seen):
    """Note step and phase of the process at each ``call`` of ``part``."""
    given = getattr(part, call)
    monkeypatch.setattr(
        part, call, lambda *args: seen.append((current.step, current.phase)) or given(*args)
    )


def test_a_step_and_its_halves_give_the_same_bits_metrics_traces_and_places(tmp_path, monkeypatch):
    def run(make_step, save_path):
        options = {"n_samples_per_prompt": 2, "entropy_coef": 0.1, "train_batch_size": 4}
        trainer, _ = ppo(2, profile_steps="2", save_path=str(save_path), **options)
        seen = []
        note_places(monkeypatch, trainer.components.engine, "step", seen)
        note_places(monkeypatch, trainer.components.actor, "step", seen)
        current.step = 0
        current.take_seconds()  # left by other tests of this process
        metrics = [make_step(trainer, prompts("good", "better")) for _ in range(2)]
        assert (
            metrics[1]["time/step_s"]
            >= metrics[1]["time/generation_s"] + metrics[1]["time/training_s"]
        )
        assert list(save_path.rglob("step_00000001*")) == []
        traces = (save_path / "logs" / "profile").glob("step_00000002_rank_0*.gz")
        events = [
            event
            for file in traces
            for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        ]
        spans = {event["name"] for event in events} & {
            "step",
            "generation",
            "scoring",
            "experience",
            "training",
        }
        timeless = [
            {n: v for n, v in row.items() if not n.startswith(("time/", "speed/"))}
            for row in metrics
        ]
        return timeless, list(metrics[0]), trainer.components.actor.gradient, spans, seen

    whole = run(lambda trainer, batch: trainer.step(batch), tmp_path / "whole")
    assert whole == run(
        lambda trainer, batch: trainer.train_on(trainer.rollout(batch)), tmp_path / "halves"
    )
    assert whole[3] == {"step", "generation", "scoring", "experience", "training"}
    assert whole[4] == [(1, "generation"), (1, "training"), (2, "generation"), (2, "training")]


def test_a_run_that_fails_closes_its_trackers_and_raises_what_ended_it():
    class Fault(Callback):
        def on_step_end(self, trainer, metrics):
            if trainer.global_step == 2:
                raise ZeroDivisionError("planted")

    trainer, record = ppo(5, callbacks=[Fault()])
    with pytest.raises(ZeroDivisionError, match="planted"):
        trainer.fit()
    assert ([step for step, _ in record.logged], record.closed) == ([1], 1)


@pytest.mark.parametrize(("at", "steps_done"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_a_signal_drops_the_step_under_way_and_saves_the_state_of_the_last(at, steps_done):
    """Two places of a step: before sampling, and when its scores are awaited."""
    trainer, record = ppo(5)
    stop = StopIn(at)
    trainer.components = dataclasses.replace(trainer.components, stop=stop)
    object.__setattr__(trainer.maker.hooks, "stop", stop)
    before = torch.get_rng_state()
    trainer.fit()
    [(step, state, was_closed)] = record.saved
    assert (step, state["state"]["global_step"], was_closed) == (steps_done, steps_done, False)
    assert state["source"] == {"consumed_batches": steps_done, "consumed_prompts": 2 * steps_done}
    assert state["state"]["unreported"] is None
    assert record.closed == 1
    if steps_done == 0:
        assert torch.equal(record.random_state["torch"], before), "scores may draw random numbers"


def test_a_resumed_run_normalizes_rewards_as_before():
    before, after = (ppo(1, normalize_reward="running")[0].maker for _ in range(2))
    before.moments.update(torch.tensor([0.25, 1.0, 0.5]), before.comm)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.moments.state_dict() == before.moments.state_dict()


def test_reading_a_sample_waits_for_its_score():
    trainer, _ = ppo(2)
    rollout, first, second = (trainer.rollout(prompts("a", "b")) for _ in range(3))
    before = rollout.unscored
    assert [sample.scores for sample in before] == [{}, {}]
    assert [sample.scores for sample in rollout] == [{"a": 1.0}, {"a": 2.0}]
    assert [sample.scores for sample in before] == [{}, {}], "samples stay as they are"
    assert [sample.scores["a"] for sample in [*first, *second]] == [1.0, 2.0, 1.0, 2.0]
    assert trainer.train_on(rollout[1:])["reward"] == 2.0, "what is left out is not trained on"


def test_a_stop_after_the_report_is_asked_of_all_ranks(monkeypatch):
    (trainer, _), asked = ppo(2), []
    monkeypatch.setattr(
        Strategy, "any_rank", lambda self, value: bool(asked.append(value)) or value
    )
    monkeypatch.setattr(
        trainer.source, "publish", lambda version: setattr(trainer, "should_stop", True)
    )
    trainer.fit()
    assert (trainer.global_step, asked[:3]) == (1, [False, False, True])


def test_a_loop_of_ones_own_ends_with_max_steps():
    trainer, _ = ppo(7, max_steps=3)
    assert [trainer.step(batch)["reward"] for batch in trainer.prompt_batches()] == [1.5] * 3
    assert trainer.source.state_dict()["consumed_batches"] == trainer.global_step == 3


def test_a_list_of_the_batches_moves_neither_state_nor_episodes():
    (looked, record), (plain, expected) = (ppo(3, num_episodes=2) for _ in range(2))
    state = looked.source.state_dict()
    batches = list(looked.prompt_batches())
    assert len(batches) == looked.total_steps == 6
    assert looked.source.state_dict() == state
    next(looked.prompt_batches())
    assert looked.source.state_dict() == state, "nor does a look at the first"
    for trainer in (looked, plain):
        trainer.fit()
    assert [row["episode"] for _, row in record.logged] == [
        row["episode"] for _, row in expected.logged
    ]
    assert [each[:2] for each in record.saved] == [each[:2] for each in expected.saved]


@pytest.mark.parametrize(
    ("batches_of", "prompts_of"),
    [
        (iter, lambda batch: batch),
        (iter, lambda batch: list(batch[:1])),
        (list, lambda batch: batch),
    ],
    ids=["loop", "part of each", "list"],
)
def test_batches_of_ones_own_loop_count_when_trained_on(batches_of, prompts_of):
    trainer, record = ppo(3, num_episodes=2, max_steps=4)
    counts = []
    for batch in batches_of(trainer.prompt_batches()):
        trainer.report(trainer.step(prompts_of(batch)))
        counts.append(trainer.source.state_dict()["consumed_batches"])
    assert counts == [1, 2, 3, 4]
    assert [row["episode"] for _, row in record.logged] == [n / 3 for n in counts]


def test_a_batch_that_a_loop_skips_does_not_come_again():
    trainer, _ = ppo(4)
    for number, batch in enumerate(trainer.prompt_batches()):
        if number != 1:
            trainer.step(batch)
        if number == 2:
            break
    resumed, _ = ppo(4)
    last = list(resumed.prompt_batches())[3]
    resumed.source.load_state_dict(trainer.source.state_dict())
    assert list(resumed.prompt_batches()) == [last]


def test_a_list_of_the_batches_of_a_game_without_end_ends():
    trainer, _ = ppo(2, max_steps=5)
    trainer.source.is_endless = True
    assert len(list(trainer.prompt_batches())) == 5


def test_a_run_whose_evaluations_pass_nothing_ends_with_a_warning(caplog):
    trainer, _ = ppo(2, evaluates=True, pass_reward=1e6)
    trainer.components = dataclasses.replace(trainer.components, grading=Grading(trainer.comm, 1e6))
    trainer.components.data.tasks[0].held_out.append(PROMPTS[3])
    trainer.fit()
    warnings = [
        message
        for message in caplog.messages
        if message.startswith("no held-out response has passed")
    ]
    assert len(warnings) == 1


def test_a_source_that_ends_early_ends_with_evaluation_checkpoint_and_model(monkeypatch):
    (trainer, record), models = ppo(7, evaluates=True, logging_steps=5), []
    monkeypatch.setattr(
        PromptSource, "__iter__", lambda self: map(self.rollout, [prompts("a")] * 2)
    )
    monkeypatch.setattr(trainer, "save", lambda: models.append(trainer.global_step))
    trainer.fit()
    assert [(step, "eval_reward" in row) for step, row in record.logged] == [(2, True)]
    assert ([step for step, *_ in record.saved], models) == ([2], [2])


def skipped_steps(folder):
    return SkippedSteps(RunConfig(save_path=str(folder), max_skipped_steps=3), SingleProcess())


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_counted_and_its_batch_kept_if_it_can_be(
    tmp_path, norm, caplog
):
    skipped, batch = skipped_steps(tmp_path), [{"sequences": torch.tensor([[1, 2, 3]])}]
    with caplog.at_level(logging.WARNING, "openppo"):
        assert skipped.accept(1.0, "actor", "global step 1", samples=batch)
        assert not skipped.accept(norm, "actor", "global step 2", samples=batch)
    (file,) = (tmp_path / "skipped").iterdir()
    assert file.name == "global_step_2_actor_rank0.safetensors"
    assert load_file(file)["samples/0/sequences"].tolist() == [[1, 2, 3]]
    assert "the gradient of the actor was not finite in global step 2" in caplog.text
    assert skipped.total == 1
    assert not skipped_steps(file).accept(norm, "actor", "step 1"), "no folder, and yet no end"
    assert "cannot be written" in caplog.text


def test_only_steps_in_a_row_of_one_role_end_the_run(tmp_path):
    skipped, again = skipped_steps(tmp_path), skipped_steps(tmp_path)
    for step in range(10):  # the actor always fails every second time, the critic never
        skipped.accept(math.nan if step % 2 else 1.0, "actor", f"step {step}")
        skipped.accept(1.0, "critic", f"step {step}")
    assert skipped.total == 5
    again.load_state_dict(skipped.state_dict())  # one in a row so far
    again.accept(math.nan, "actor", "step 10")
    with pytest.raises(FloatingPointError, match="3 optimizer steps in a row were skipped"):
        again.accept(math.nan, "actor", "step 11")


PROMPTS = [Prompt(text=str(i), token_ids=[10 + i]) for i in range(5)]


def echo(_, prompt, seed, params):
    """The greedy response is the prompt and 0; a sampled one the prompt and a number made of its seed."""
    end = 0 if params.temperature == 0 else 1 + seed % 1000
    return Completion(
        [*prompt, end], [-1.0] * (len(prompt) + 1), [0] * (len(prompt) + 1), FinishReason.STOP
    )


def source_of(comm=None, estimator="gae", first_group=0, **options):
    options |= {"advantage_estimator": estimator, "n_samples_per_prompt": 2}
    trainer = trainer_of(
        echo,
        PROMPTS,
        PROMPTS[:3],
        score=lambda sample: Score({"last": float(sample.last.token_ids[-1])}),
        comm=comm,
        **options,
    )
    trainer.state.global_step, trainer.source.consumed_prompts = 7, first_group
    return trainer.source


def test_groups_stay_together_and_are_the_same_for_any_number_of_ranks():
    source = source_of(first_group=100)
    alone = source.rollout(PROMPTS).unscored
    groups = [sample.group for sample in alone]
    assert groups == [100, 100, 101, 101, 102, 102, 103, 103, 104, 104]
    assert len({tuple(sample.last.response_ids) for sample in alone}) == 10
    assert source.sampler.engine.version == 7
    for world in (2, 3, 4):
        sources = [source_of(OneOf(rank, world), first_group=100) for rank in range(world)]
        of_ranks = [source.rollout(PROMPTS).unscored for source in sources]
        assert [sample for rank in of_ranks for sample in rank] == alone
        assert sum(len({sample.group for sample in rank}) for rank in of_ranks) == 5


def test_the_greedy_response_is_sampled_once_per_prompt_and_scored_too():
    samples = list(source_of(estimator="remax").rollout(PROMPTS[:2]))
    greedy = [sample.greedy for sample in samples]
    assert [each.last.response_ids for each in greedy] == [[10, 0], [10, 0], [11, 0], [11, 0]]
    assert greedy[0] is greedy[1]
    assert [each.scores["last"] for each in greedy] == [0.0] * 4
    assert all(sample.scores["last"] == sample.last.token_ids[-1] > 0 for sample in samples)
    assert source_of().rollout(PROMPTS[:1]).unscored[0].greedy is None


def test_evaluation_holds_the_weights_only_while_it_samples():
    source, seen = source_of(eval_n_samples_per_prompt=2), []

    @contextlib.contextmanager
    def with_weights(weights):
        seen.append("open")
        yield
        seen.append("closed")

    scorer = source.task.scorer
    score = scorer.score
    source.sampler.engine.with_weights = with_weights
    scorer.score = lambda rows: seen.append("scored") or score(rows)
    responses = source.evaluate()
    assert seen == ["open", "closed", "scored"]
    assert [sample.group for sample in responses] == [0, 0, 1, 1, 2, 2]
    assert all(sample.scores for sample in responses)
    assert source.state_dict() == {"consumed_batches": 0, "consumed_prompts": 0}


def test_evaluation_by_another_function_replaces_all_rewards():
    source = source_of()
    scorer = Scorer(lambda sample: Score({"other": float(sample.prompt.token_ids[0])}))
    source.held_out = dataclasses.replace(source.held_out, scorer=scorer, replaces_rewards=True)
    players = source.sampler.player.players
    player = players[""]

    class AsAnAgent:
        async def start(self):
            pass

        async def play(self, task, params):
            sample = await player.play(task, params)
            token_rewards = [1.0] * len(sample.last.token_ids)
            return sample.with_scores({"own": 1.0}, token_rewards=token_rewards)

    players[""] = AsAnAgent()
    assert [(sample.scores, sample.last.token_rewards) for sample in source.evaluate()] == [
        ({"other": 10.0 + i}, None) for i in range(3)
    ]
    for sample in source.rollout(PROMPTS):
        assert sample.scores.keys() == {"own", "last"}, "training keeps its own"


def scored(group, *rewards):
    return [
        one_segment(
            [1, 2],
            [False, True],
            [0.0, -1.0],
            versions=[-1, 0],
            finish_reason=FinishReason.STOP,
            prompt=PROMPTS[0],
            group=group,
            scores={"a": reward},
        )
        for reward in rewards
    ]


def in_steps(sample, *token_rewards):
    """``sample`` with two actions that have such rewards."""
    return with_last(
        sample,
        token_ids=[1, 2, 2],
        action_mask=[False, True, True],
        log_probs=[0.0, -1.0, -1.0],
        versions=[-1, 0, 0],
        token_rewards=[0.0, *token_rewards],
    )


def test_groups_with_one_reward_are_of_no_use_and_of_too_many_the_first_are_kept():
    mixed = scored(4, 0.0, 1.0)
    same = scored(2, 1.0, 1.0)
    other = scored(9, 0.5, 0.5)
    other[1] = with_last(other[1], token_rewards=[0.0, 0.25])
    assert useful_groups([*mixed, *same, *other], False, {}) == [*mixed, *other]
    assert useful_groups([], False, {}) == []
    assert useful_groups(mixed, False, {"a": 0.0}) == []
    same = [in_steps(sample, 0.5, 0.0) for sample in same]
    early, late = scored(4, 1.0, 1.0)
    # of use where steps are compared, though sums are equal
    unequal = [in_steps(early, 0.5, 0.0), in_steps(late, 0.0, 0.5)]
    assert useful_groups([*same, *unequal], True, {}) == unequal
    assert useful_groups([*same, *unequal], False, {}) == []
    third, first, second = scored(7, 0.0, 1.0), scored(3, 0.0, 1.0), scored(5, 0.0, 1.0)
    assert deal_groups([*third, *first, *second], limit=2, comm=SingleProcess()) == [
        *first,
        *second,
    ]
