"""Playing one episode, which ends exactly once, and its sample for training."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile

from openppo.agents.session import EpisodeEnded, Session, SessionSetup
from openppo.agents.turn import Turn
from openppo.media import TokenIds
from openppo.rollout.driver import episode_context
from openppo.types import Ending, Episode, EpisodeInput, Prompt, Sample, Segment

_SECONDS_TO_END = 5.0
"""Time for a cancelled agent to clean up."""


class Agent(ABC):
    """An actor in many episodes at a time.

    ``run`` keeps the state of its episode in local variables.
    """

    @abstractmethod
    async def run(self, task: EpisodeInput, session: Session) -> float | Mapping[str, float] | None:
        """Play an episode; return the reward of the whole, rewards by name, or None."""

    def check(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 (most need nothing)
        """Raise ``ValueError`` for rows that cannot be played, before any model is loaded."""

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Return a context to hold while an episode is played; the episode's time limit begins inside."""
        return nullcontext()

    async def start(self) -> None:  # noqa: B027
        """Get ready, in the event loop of all episodes, before the first."""

    async def stop(self) -> None:  # noqa: B027
        """Release what ``start`` took."""


class ToolError(Exception):
    """A method of a tool failed."""


@dataclass(frozen=True)
class Played:
    """An ended episode: its session, and its sample.

    The sample of a failed episode is a stand-in for logs, without actions and of reward 0.
    """

    session: Session
    sample: Sample

    @property
    def episode(self) -> Episode:
        """The episode of the sample."""
        assert self.sample.episode is not None
        return self.sample.episode


async def play(agent: Agent, task: EpisodeInput, setup: SessionSetup, needs_reward: bool) -> Played:
    """Play ``task`` to one of its ends; with ``needs_reward`` an episode without a reward is an error."""
    session = Session(setup, task)
    async with agent.slot():
        work = asyncio.get_running_loop().create_task(
            _run(agent, task, session), context=episode_context()
        )
        end = time.monotonic() - setup.stood() + setup.options.agent_timeout
        try:
            while not work.done():
                remaining = end + setup.stood() - time.monotonic()
                if remaining <= 0:
                    break
                await asyncio.wait([work], timeout=remaining)
        finally:
            ended_in_time = work.done()
            if not ended_in_time:
                session.close(Ending.TIMEOUT)
                work.cancel()
                await asyncio.wait([work], timeout=_SECONDS_TO_END)

    error = f"no end within {setup.options.agent_timeout:g} s"
    if ended_in_time:
        error = _end(session, work)
    return await _played(session, error, needs_reward)


async def _run(agent: Agent, task: EpisodeInput, session: Session) -> None:
    """Run the agent and record the rewards that it returns."""
    try:
        result = await agent.run(task, session)
    except SystemExit as error:  # it would end the event loop of all episodes
        raise RuntimeError("the agent called sys.exit()") from error

    if isinstance(result, Mapping):
        session.reward_all({str(name): value for name, value in result.items()})
    elif result is not None:
        session.reward_all({"reward": result})


def _end(session: Session, work: asyncio.Task[None]) -> str:
    """Close the session of finished ``work``; return its error, or an empty text."""
    # Only a library that the agent uses can have cancelled it: nobody else has its task.
    if work.cancelled():
        session.close(Ending.CANCELLED)
        return "its own code, or a library that it uses, cancelled it"

    raised = work.exception()
    if raised is None:
        session.close(Ending.COMPLETED)
        return ""
    if isinstance(raised, EpisodeEnded):
        session.close(raised.ending)
        return ""

    if isinstance(raised, ToolError):
        session.fail(Ending.TOOL_ERROR)  # also after a limit, because tools give rewards there
    else:
        session.close(Ending.AGENT_ERROR)
    return f"{type(raised).__name__}: {raised}"


async def _played(session: Session, error: str, needs_reward: bool) -> Played:
    """Settle how the episode ended, and make its sample."""
    assert session.ending is not None
    ending = session.ending
    turns = session.turns
    lacks_reward = needs_reward and not session.rewards and session.counts["rewarded_turns"] == 0

    if ending.is_trained and not any(_has_actions(turn) for turn in turns):
        ending = Ending.AGENT_ERROR
        error = error or "the agent requested no turn, or received none"
    elif ending is Ending.COMPLETED and lacks_reward:
        ending = Ending.AGENT_ERROR
        error = "nothing gave a reward"
    elif ending.is_trained and lacks_reward:
        session.reward(0.0)  # a limit ended it before its agent could give one

    mismatch = None
    check_rendering = session.setup.options.check_rendering
    if ending.is_trained and check_rendering != "off":
        mismatch = await asyncio.to_thread(first_difference, session)
        session.counts["rerender_mismatch"] = int(mismatch is not None)
        if mismatch is not None and check_rendering == "strict":
            ending = Ending.AGENT_ERROR
            error = mismatch

    messages = turns[-1].messages if turns else list(session.task.messages)
    episode = Episode(
        messages,
        ending,
        len(turns),
        error=error or mismatch or "",
        output=session.output,
        tool_rewards=session.tool_rewards,
        counts=_counts(session),
        turn_tokens=[len(turn.completion.token_ids) for turn in turns],
    )
    if not ending.is_trained:
        first = turns[0] if turns else None
        read = None if first is None else TokenIds(first.prompt_ids, first.media)
        return Played(session, Sample.failed(session.task, episode, read))
    sample = Sample(
        prompt=session.task.prompt,
        group=session.task.group,
        segments=segments(session),
        scores=dict(session.rewards),
        episode=episode,
    )
    return Played(session, sample)


def segments(session: Session) -> list[Segment]:
    """Segments of an episode: one for each turn that nothing continues, with the turns before it.

    A turn shared by several segments is trained in the first. A turn's reward lies on its last action.
    """
    covered: set[Turn] = set()
    cut: list[Segment] = []
    for leaf in session.leaves:
        fresh = [turn for turn in leaf.path if turn not in covered and _has_actions(turn)]
        if fresh:
            covered.update(leaf.path)
            cut.append(_segment(session, leaf, fresh))
    return cut


def _has_actions(turn: Turn) -> bool:
    return turn.trained and len(turn.completion.token_ids) > 0


def _segment(session: Session, leaf: Turn, fresh: Sequence[Turn]) -> Segment:
    """All tokens up to the end of ``leaf``, with the actions of the ``fresh`` turns."""
    ids = leaf.token_ids
    mask = [False] * len(ids)
    versions = [-1] * len(ids)
    log_probs = [0.0] * len(ids)
    rewards = [0.0] * len(ids)
    ends = [False] * len(ids)
    for turn in fresh:
        n = len(turn.completion.token_ids)
        start = len(turn.prompt_ids)
        last = start + n - 1
        span = slice(start, start + n)
        mask[span] = [True] * n
        versions[span] = turn.completion.versions
        log_probs[span] = turn.completion.log_probs
        rewards[last] = turn.reward
        ends[last] = True

    has_rewards = any(turn.rewarded for turn in session.turns)
    return Segment(
        token_ids=ids,
        action_mask=mask,
        log_probs=log_probs,
        versions=versions,
        n_prompt=len(leaf.path[0].prompt_ids),
        finish_reason=leaf.finish_reason,
        media=leaf.media,
        token_rewards=rewards if has_rewards else None,
        step_ends=ends if has_rewards else None,
    )


_ALWAYS = ("tool_calls", "tool_errors", "malformed_calls", "bridged_turns", "rerendered_turns")
"""Counts that an episode has even if they are 0."""


def _counts(session: Session) -> dict[str, float]:
    """Return the numbers of a session's events, and those that its agent measured, by name."""
    counts: dict[str, float] = {**dict.fromkeys(_ALWAYS, 0), **session.counts}
    counts["tool_calls"] += sum(len(turn.tool_calls) for turn in session.turns)
    return counts | session.metrics


def first_difference(session: Session) -> str | None:
    """Describe the first place where recorded tokens differ from the rendered conversation; None if all agree."""
    renderer = session.setup.renderer
    for leaf in session.leaves:
        recorded = leaf.token_ids
        try:
            text = renderer.rendered(leaf.messages, leaf.tools, for_generation=False)
            rendered = renderer.encode(text, leaf.media)
        except ValueError as error:  # such as two calls where the template takes one
            return str(error)

        equal = takewhile(lambda pair: pair[0] == pair[1], zip(recorded, rendered, strict=False))
        place = len(list(equal))
        if place < len(recorded):
            before = renderer.decode(recorded[max(0, place - 12) : place])
            ours = renderer.decode(recorded[place : place + 12])
            theirs = renderer.decode(rendered[place : place + 12])
            return f"recorded and rendered tokens differ from token {place} on, after {before!r}: {ours!r}, {theirs!r}"
    return None
