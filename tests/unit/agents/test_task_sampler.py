"""One sampler for several tasks: each prompt is sampled as its task says, also after another has joined."""

from dataclasses import replace

from openppo.config import TrainPPOConfig, from_options
from openppo.rollout.responses import ResponseSampler
from openppo.rollout.sample_request import SampleRequest
from openppo.rollout.samplers import SamplerParts
from openppo.rollout.sampling import sampling_params
from openppo.rollout.seeds import sample_seed
from openppo.rollout.tasks import RunTask, TaskPlayers
from openppo.tracking import Metrics
from openppo.types import Prompt, SingleProcess, StopCheck
from tests.unit.agents.conftest import ScriptedEngine


def task(name: str, longest: int) -> RunTask:
    return RunTask(name, from_options(TrainPPOConfig, pretrain="MODEL", generate_max_len=longest))


def test_a_task_that_joins_leaves_evaluations_of_others_alone(chat_tokenizer):
    ends = [chat_tokenizer.eos_token_id]
    engine = ScriptedEngine(chat_tokenizer, lambda text: "abcdefgh")
    parts = SamplerParts(engine, chat_tokenizer, ends, SingleProcess(), StopCheck(), longest=100)
    sampler = TaskPlayers([task("two", 2), task("four", 4)]).make(parts)
    prompts = [replace(Prompt("x", [5]), task=name) for name in ("four", "two", "four")]
    params = sampling_params(task("", 9).config.generation, 0.5)

    def sampled():
        request = SampleRequest(
            prompts, params, 1, seed=0, first_group=0, metrics=Metrics(), evaluation=True
        )
        answers = []
        for sample in sampler.sample(request):
            [segment] = sample.segments
            answers.append((sample.prompt.task, len(segment.response_ids), sample.group))
        return answers

    alone = sampled()
    assert alone == [("two", 2, 0), ("four", 4, 1), ("four", 4, 2)]
    assert {given.temperature for given, *_ in engine.submitted} == {0.5}, "that of the evaluation"
    sampler.driver.drive(sampler.join(task("six", 6)))
    assert sampled() == alone
    prompts.append(replace(Prompt("x", [5]), task="six"))
    assert sampled()[-1] == ("six", 6, 3)
    sampler.close()


def test_responses_have_seeds_of_their_places_in_the_run(chat_tokenizer):
    engine = ScriptedEngine(chat_tokenizer, lambda text: "ab")
    ends = [chat_tokenizer.eos_token_id]
    sampler = ResponseSampler(
        SamplerParts(engine, chat_tokenizer, ends, SingleProcess(), StopCheck(), longest=100)
    )
    params = sampling_params(task("", 9).config.generation)
    samples = sampler.sample(
        SampleRequest([Prompt("x", [5]), Prompt("y", [6])], params, 3, 7, 20, Metrics())
    )
    sampler.close()
    assert [sample.group for sample in samples] == [20, 20, 20, 21, 21, 21]
    assert [seed for _, seed, _ in engine.submitted] == [
        sample_seed(7, number) for number in range(60, 66)
    ]
