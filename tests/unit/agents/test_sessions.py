"""Episodes over recorded token ids."""

from typing import Any

import pytest

from openppo.tracking import Metrics
from openppo.types import Ending, Prompt, SamplingParams, SingleProcess


def play(sampler: Any, n_prompts: int = 1, n_samples: int = 1, **more: Any) -> tuple[list[Any], dict[str, float]]:
    metrics = Metrics()
    prompts = [Prompt(f"task {i}", [5, 6], row={"number": i}) for i in range(n_prompts)]
    params = SamplingParams(more.pop("max_new_tokens", 64))
    sampled = sampler.sample(prompts, params, n_samples, 1, 0, metrics, **more)
    return sampled, metrics.reduced(SingleProcess())


async def three_turns(task: Any, session: Any) -> float:
    messages = list(task.messages)
    for i in range(3):
        turn = await session.chat(messages)
        messages += [turn.message, {"role": "user", "content": f"more {i}"}]
    return 1.0


def test_each_turn_continues_recorded_ids(make_sampler, chat_tokenizer):
    sampler = make_sampler(three_turns, lambda prompt: "<think>hm</think>yes")
    [trajectory], metrics = play(sampler)
    journal = sampler.parts.engine.journal
    assert [trajectory.token_ids[start:stop] for start, stop in trajectory.spans] == [ids for _, ids in journal]
    assert trajectory.token_ids == journal[-1][0] + journal[-1][1]
    assert metrics["agent/bridged_turns"] == 2 and metrics["agent/rerendered_turns"] == 0
    conversation = trajectory.episode.messages
    rendered = chat_tokenizer.apply_chat_template(conversation, tokenize=False)
    assert rendered.count("<think>") == 0 and chat_tokenizer.decode(trajectory.token_ids).count("<think>") == 3


def test_history_as_the_template_has_it_makes_segments(make_sampler):
    sampler = make_sampler(three_turns, lambda prompt: "<think>hm</think>yes", history="template")
    trajectories, metrics = play(sampler)
    assert len(trajectories) == 3 and metrics["agent/rerendered_turns"] == 2
    assert sum(trajectory.weight for trajectory in trajectories) == pytest.approx(1)


@pytest.mark.parametrize(
    ("ending", "options", "agent_does"),
    [
        (Ending.MAX_TURNS, {"max_turns": 2}, three_turns),
        (Ending.EPISODE_LENGTH, {"episode_max_len": 60}, three_turns),
        (Ending.AGENT_ERROR, {}, "raise"),
        (Ending.TIMEOUT, {"agent_timeout": 0.05}, "hang"),
    ],
)
def test_an_episode_ends_once(make_sampler, ending, options, agent_does):
    import asyncio

    async def act(task: Any, session: Any) -> float:
        await session.chat(list(task.messages))
        if agent_does == "raise":
            raise RuntimeError("broken")
        await asyncio.sleep(60)
        return 1.0

    agent = act if isinstance(agent_does, str) else agent_does
    sampled, metrics = play(make_sampler(agent, lambda prompt: "yes", **options), n_prompts=2)
    assert metrics[f"agent/{ending.value}"] == 1
    assert sum(value for name, value in metrics.items() if name.removeprefix("agent/") in list(Ending)) == 1
    assert bool(sampled) == ending.is_trained or ending in (Ending.MAX_TURNS, Ending.EPISODE_LENGTH)
