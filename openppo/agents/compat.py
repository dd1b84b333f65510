"""verl's Agent/Env interface: agents fill a queue of prompts, and the user's own loop generates and trains.

Names as in verl's issue 1172 and pull request 808. Prompts are token ids that continue those of earlier turns.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from queue import Empty, Queue
from typing import Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from openppo import logger
from openppo.agents.build import AgentPlayer
from openppo.agents.episodes import play
from openppo.agents.renderer import Renderer
from openppo.agents.session import SessionSetup
from openppo.config import PPODataConfig
from openppo.datasets import load_mixed_rows, load_tasks
from openppo.media import Tokens
from openppo.rollout.driver import agent_loop, end_tasks
from openppo.rollout.seeds import sample_seed
from openppo.types import (
    Completion,
    Ending,
    Episode,
    EpisodeInput,
    Prompt,
    Sample,
    SamplingParams,
    Segment,
)

NotifyScore = Callable[[str, float | None, int], Any]
"""Called at an episode's end with its id, score (None if it failed) and number of turns."""
BeginGroup = Callable[[int, Sequence[str]], Future[None]]
"""Called with a row's group and the ids of its episodes, which begin when the future is done."""


@dataclass(eq=False)
class PromptRequest:
    """A turn that an agent waits for. ``request_id`` names the episode: all its turns have the same.

    ``received``: the agent has got the answer.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    seed: int
    group: int
    answer: Future[Completion] = field(default_factory=Future)
    received: bool = False

    async def receive(self) -> Completion:
        """Wait for the answer, and return it as received."""
        completion = await asyncio.wrap_future(self.answer)
        self.received = True
        return completion


class BufferDataset(IterableDataset[Any]):
    """Endless items of a queue, for a DataLoader with ``collate_fn=list``; waits for each."""

    def __init__(self, buffer: "Queue[Any] | None" = None) -> None:
        self.buffer: Queue[Any] = buffer or Queue()

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.buffer.get()

    def take(self, most: int, timeout: float | None = None) -> list[Any]:
        """Return the queued items, at most ``most``; waits for the first, up to ``timeout`` seconds."""
        items: list[Any] = []
        with suppress(Empty):
            items.append(self.buffer.get(timeout=timeout))
            while len(items) < most:
                items.append(self.buffer.get_nowait())
        return items


class MultiRoundBufferDataset(BufferDataset):
    """Episodes that have ended, each as a sample whose segments are its turns, with its ``score``."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds: dict[str, list[tuple[PromptRequest, Segment]]] = defaultdict(list)

    def put_batch(
        self, requests: Sequence[PromptRequest], completions: Sequence[Completion]
    ) -> None:
        """Answer ``requests``; those that were cancelled meanwhile are left out."""
        for request, completion in zip(requests, completions, strict=True):
            if request.answer.set_running_or_notify_cancel():
                turn = Segment.of_response(request.prompt, completion)
                self._rounds[request.request_id].append((request, turn))
                request.answer.set_result(completion)

    def notify_score(
        self, request_id: str, score: float | None, total_round_count: int | None = None
    ) -> None:
        """Put an episode into the buffer; without a score it is dropped."""
        sample = self.scored(request_id, score, total_round_count)
        if sample is not None:
            self.buffer.put(sample)

    def scored(
        self, request_id: str, score: float | None, total_round_count: int | None
    ) -> Sample | None:
        """Remove and return an ended episode with its score; None without a score or a turn."""
        rounds = self._rounds.pop(request_id, [])
        received = [
            (request, turn) for request, turn in rounds if request.received and turn.n_actions > 0
        ]
        received = received[:total_round_count]
        if score is None or not received:
            return None

        first, _ = received[0]
        return Sample(
            prompt=first.prompt,
            group=first.group,
            segments=[turn for _, turn in received],
            scores={"score": score},
            episode=Episode([], Ending.COMPLETED, n_turns=len(received)),
        )


class TaskPool:
    """Plays an agent on rows. Its requests wait in ``prompt_queue`` until ``put_batch`` answers them.

    ``longest`` bounds the tokens of an episode.
    """

    def __init__(
        self,
        source: AgentPlayer,
        tokenizer: PreTrainedTokenizerBase,
        longest: int = 4096,
        notify_score_fn: NotifyScore = lambda *_: None,
        begin_group_fn: BeginGroup | None = None,
    ) -> None:
        source.check(tokenizer)
        self.source = source
        self.tokenizer = tokenizer
        self.longest = longest
        self.notify = notify_score_fn
        self.begin_group = begin_group_fn
        self.renderer = Renderer(tokenizer, source.parser, [tokenizer.eos_token_id])
        self.prompt_queue: Queue[PromptRequest] = Queue()

        self._groups = count()
        self._episodes = count()
        self._loop = agent_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, name="task pool", daemon=True)
        self.thread.start()
        self._finish(source.agent.start())

    def enqueue_task(
        self, file: str, n_samples: int = 1, data: PPODataConfig | None = None
    ) -> None:
        """Play each row of a file ``n_samples`` times; returns when all have ended, or upon ``close``."""
        data = data or PPODataConfig(apply_chat_template=True)
        rows = load_mixed_rows(data, file, flag="enqueue_task", split=data.prompt_split, seed=0)
        prompts = load_tasks(rows, self.tokenizer, data)
        self.source.check_prompts(prompts)
        with suppress(CancelledError):
            self._finish(self._play_all(prompts, n_samples))

    def close(self) -> None:
        """End the agent and the thread."""
        self._finish(self.source.agent.stop())
        self._finish(end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join()
        self._loop.close()

    def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _play_all(self, prompts: Sequence[Prompt], n_samples: int) -> None:
        episodes: list[asyncio.Task[None]] = []
        for prompt, group in zip(prompts, self._groups, strict=False):
            numbers = list(islice(self._episodes, n_samples))
            if self.begin_group is not None:
                begun = self.begin_group(group, [str(number) for number in numbers])
                await asyncio.wrap_future(begun)

            for number in numbers:
                episodes.append(asyncio.create_task(self._play(prompt, group, number)))
        await asyncio.gather(*episodes)

    async def _play(self, prompt: Prompt, group: int, number: int) -> None:
        async def generate(
            tokens: Tokens, params: SamplingParams, seed: int, continue_from: int | None
        ) -> Completion:
            turn_prompt = replace(prompt, token_ids=list(tokens.token_ids), media=tokens.media)
            request = PromptRequest(str(number), turn_prompt, params, seed=seed, group=group)
            self.prompt_queue.put(request)
            return await request.receive()

        setup = SessionSetup(
            self.renderer,
            generate,
            SamplingParams(self.longest),
            options=self.source.options,
            longest=self.longest,
        )
        env_seed = sample_seed(0, group) % 2**31
        task = EpisodeInput(prompt, sample_seed(0, number), env_seed, group=group)
        played = await play(self.source.agent, task, setup, needs_reward=True)

        session, episode = played.session, played.episode
        score = None
        if episode.ending.is_trained:
            turn_rewards = sum(turn.reward for turn in session.turns)
            score = sum(session.rewards.values()) + turn_rewards
        else:
            logger.warning("episode %d: %s: %s", number, episode.ending.value, episode.error)
        self.notify(str(number), score, episode.n_turns)


def create_and_launch_task_pool(
    source: AgentPlayer, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> tuple[TaskPool, threading.Thread]:
    """Return a pool with the options of ``TaskPool``, and the thread in which it plays."""
    pool = TaskPool(source, tokenizer, **options)
    return pool, pool.thread
