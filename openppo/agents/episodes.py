"""Playing one episode: it ends exactly once, and its turns become the trajectories that are trained on."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile

from openppo.agents.session import EpisodeEnded, Session, SessionSetup, Task, Turn
from openppo.rollout.driver import episode_context
from openppo.types import Ending, Episode, FinishReason, Prompt, Trajectory

_SECONDS_TO_END = 5.0
"""For an agent that was cancelled to clean up."""


class Agent(ABC):
    """What acts in episodes, many at a time: ``run`` keeps what belongs to one in local variables."""

    @abstractmethod
    async def run(self, task: Task, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode; the reward of the whole, or rewards by name, or None."""

    def check(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 (most need nothing)
        """``ValueError`` for rows that cannot be played, before any model is loaded."""

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Held while an episode is played; its time limit begins inside."""
        return nullcontext()

    async def start(self) -> None:  # noqa: B027
        """Get ready, in the event loop of all episodes, before the first."""

    async def stop(self) -> None:  # noqa: B027
        """Release what ``start`` took."""


class ToolError(Exception):
    """A method of a tool failed."""


@dataclass(frozen=True)
class Played:
    """An episode that has ended, and its trajectories, none for one without turns."""

    episode: Episode
    session: Session
    trajectories: list[Trajectory]


async def play(agent: Agent, task: Task, setup: SessionSetup, needs_reward: bool) -> Played:
    """Play ``task`` to one of its ends. With ``needs_reward`` an episode that nothing rewards is an error."""
    session = Session(setup, task)
    async with agent.slot():
        work = asyncio.get_running_loop().create_task(
            _run(agent, task, session), context=episode_context()
        )
        end = time.monotonic() - setup.stood() + setup.options.agent_timeout
        try:
            while not work.done() and (left := end + setup.stood() - time.monotonic()) > 0:
                await asyncio.wait([work], timeout=left)
        finally:
            ended_in_time = work.done()
            if not ended_in_time:
                session.close(Ending.TIMEOUT)
                work.cancel()
                await asyncio.wait([work], timeout=_SECONDS_TO_END)
    error = ""
    if not ended_in_time:
        error = f"no end within {setup.options.agent_timeout:g} s"
    elif (
        work.cancelled()
    ):  # by a library that it uses: tasks of their own have nobody else to cancel them
        session.close(Ending.CANCELLED)
        error = "its own code, or a library that it uses, cancelled it"
    elif (raised := work.exception()) is None:
        session.close(Ending.COMPLETED)
    elif isinstance(raised, EpisodeEnded):
        session.close(raised.ending)
    else:
        session.close(Ending.AGENT_ERROR)
        if isinstance(raised, ToolError):
            session.ending = Ending.TOOL_ERROR  # also after a limit, which tools rewarded
        error = f"{type(raised).__name__}: {raised}"
    return await _played(session, error, needs_reward)


async def _run(agent: Agent, task: Task, session: Session) -> None:
    """Run the agent and keep the rewards that it returns."""
    try:
        result = await agent.run(task, session)
    except SystemExit as error:  # it would end the event loop of all episodes
        raise RuntimeError("the agent called sys.exit()") from error
    named = result if isinstance(result, Mapping) else {} if result is None else {"reward": result}
    session.reward_all({str(name): value for name, value in named.items()})


async def _played(session: Session, error: str, needs_reward: bool) -> Played:
    assert session.ending is not None
    ending, turns = session.ending, session.turns
    rewarded = bool(session.rewards) or session.counts["rewarded_turns"] > 0
    if ending.is_trained and not any(turn.trained for turn in turns):
        ending, error = Ending.AGENT_ERROR, error or "the agent requested no turn, or received none"
    elif ending is Ending.COMPLETED and needs_reward and not rewarded:
        ending, error = Ending.AGENT_ERROR, "nothing gave a reward"
    elif ending.is_trained and needs_reward and not rewarded:
        session.reward(0.0)  # a limit ended it before its agent could give one
    mismatch = None
    if ending.is_trained and session.setup.options.check_rendering != "off":
        mismatch = await asyncio.to_thread(first_difference, session)
        session.counts["rerender_mismatch"] = int(mismatch is not None)
        if mismatch is not None and session.setup.options.check_rendering == "strict":
            ending, error = Ending.AGENT_ERROR, mismatch
    messages = turns[-1].messages if turns else list(session.task.messages)
    episode = Episode(
        messages,
        ending,
        len(turns),
        error=error or mismatch or "",
        output=session.output,
        tool_rewards=session.tool_rewards,
    )
    return Played(episode, session, segments(session, episode))


def segments(session: Session, episode: Episode) -> list[Trajectory]:
    """Trajectories of an episode: one for each turn that nothing continues, with the turns that lead to it.

    The prompt of each has all its images. A turn of several of them is trained on in the first. Each has its share of
    the episode's action tokens, and all have the episode's rewards; a turn's reward lies on its last action.
    """
    taken: set[Turn] = set()
    made = []
    for leaf in session.leaves:
        fresh = [
            turn
            for turn in leaf.path
            if turn not in taken and turn.trained and turn.completion.token_ids
        ]
        if fresh:
            taken.update(leaf.path)
            made.append(_trajectory(session, episode, leaf, fresh=fresh))
    total = sum(sum(trajectory.action_mask) for trajectory in made)
    for trajectory in made:
        trajectory.share = sum(trajectory.action_mask) / total
    return made


def _trajectory(
    session: Session, episode: Episode, leaf: Turn, fresh: Sequence[Turn]
) -> Trajectory:
    ids = leaf.token_ids
    mask, versions = [False] * len(ids), [-1] * len(ids)
    log_probs = [0.0] * len(ids)
    rewards = [0.0] * len(ids)
    ends = [False] * len(ids)
    for turn in fresh:
        start, n = len(turn.prompt_ids), len(turn.completion.token_ids)
        span = slice(start, start + n)
        mask[span] = [True] * n
        versions[span] = turn.completion.versions
        log_probs[span] = turn.completion.log_probs
        rewards[start + n - 1], ends[start + n - 1] = turn.reward, True
    has_rewards = any(turn.rewarded for turn in session.turns)
    return Trajectory(
        token_ids=ids,
        action_mask=mask,
        log_probs=log_probs,
        versions=versions,
        finish_reason=leaf.finish_reason,
        prompt=replace(session.task.prompt, token_ids=leaf.path[0].prompt_ids, media=leaf.media),
        group=session.task.group,
        scores=dict(session.rewards),
        token_rewards=rewards if has_rewards else None,
        step_ends=ends if has_rewards else None,
        episode=episode,
    )


def failed(played: Played) -> Trajectory:
    """A trajectory without actions, of reward 0, that stands for an episode that failed."""
    task, turns = played.session.task, played.session.turns
    prompt = (
        replace(task.prompt, token_ids=turns[0].prompt_ids, media=turns[0].media)
        if turns
        else task.prompt
    )
    ids = list(prompt.token_ids) or [0]
    return Trajectory(
        token_ids=ids,
        action_mask=[False] * len(ids),
        log_probs=[0.0] * len(ids),
        versions=[-1] * len(ids),
        finish_reason=FinishReason.ABORT,
        prompt=prompt,
        group=task.group,
        scores={"reward": 0.0},
        episode=played.episode,
    )


def first_difference(session: Session) -> str | None:
    """Where the recorded tokens of a conversation differ from its rendering as a whole; None where none does."""
    renderer = session.setup.renderer
    for leaf in session.leaves:
        try:
            whole = renderer.rendered(leaf.messages, leaf.tools, for_generation=False)
            recorded, rendered = leaf.token_ids, renderer.encode(whole, leaf.media)
        except ValueError as error:  # such as two calls where it takes one: the policy's doing
            return str(error)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(recorded, rendered, strict=False))
        if (place := len(list(same))) < len(recorded):
            ours, theirs = (
                renderer.decode(ids[place : place + 12]) for ids in (recorded, rendered)
            )
            before = renderer.decode(recorded[max(0, place - 12) : place])
            return f"recorded and rendered tokens differ from token {place} on, after {before!r}: {ours!r}, {theirs!r}"
    return None
