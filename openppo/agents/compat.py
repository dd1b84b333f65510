"""verl's Agent/Env interface: agents fill a queue of prompts, and a loop of one's own generates and trains.

Names as in verl's issue 1172 and pull request 808; prompts are token ids, which continue those of earlier turns.
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
from openppo.agents.build import AgentSource
from openppo.agents.episodes import play
from openppo.agents.renderer import Renderer
from openppo.agents.session import SessionSetup, Task
from openppo.config import PPODataConfig
from openppo.datasets import load_mixed_rows, load_tasks
from openppo.rollout.driver import agent_loop, end_tasks
from openppo.rollout.engine_sampler import make_trajectory
from openppo.rollout.seeds import sample_seed
from openppo.types import Completion, Ending, Episode, Prompt, SamplingParams, Trajectory

NotifyScore = Callable[[str, float | None, int], Any]
"""Called at an episode's end with its id, its score (None if it failed) and its number of turns."""
BeginGroup = Callable[
    [int, Sequence[str]], Future[None]
]  # of a row's group and episodes: they begin when it is done


@dataclass(eq=False)
class PromptRequest:
    """A turn that an agent waits for. ``request_id`` is that of its episode, the same for all its turns."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    seed: int
    group: int
    answer: Future[Completion] = field(default_factory=Future)
    taken: bool = False


class BufferDataset(IterableDataset[Any]):
    """The items of a queue without end, for a DataLoader with ``collate_fn=list``; waits for each."""

    def __init__(self, buffer: "Queue[Any] | None" = None) -> None:
        self.buffer: Queue[Any] = buffer or Queue()

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.buffer.get()

    def take(self, most: int, timeout: float | None = None) -> list[Any]:
        """All items up to ``most``; waits for the first, and returns none after ``timeout`` seconds."""
        taken: list[Any] = []
        with suppress(Empty):
            taken.append(self.buffer.get(timeout=timeout))
            while len(taken) < most:
                taken.append(self.buffer.get_nowait())
        return taken


class MultiRoundBufferDataset(BufferDataset):
    """Turns of episodes that have ended, each as a trajectory with its episode's ``score``."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds: dict[str, list[tuple[PromptRequest, Trajectory]]] = defaultdict(list)

    def put_batch(
        self, requests: Sequence[PromptRequest], completions: Sequence[Completion]
    ) -> None:
        """Answer ``requests``; those that were given up meanwhile are left out."""
        for request, completion in zip(requests, completions, strict=True):
            if request.answer.set_running_or_notify_cancel():
                turn = make_trajectory(request.prompt, completion, request.group)
                self._rounds[request.request_id].append((request, turn))
                request.answer.set_result(completion)

    def notify_score(
        self, request_id: str, score: float | None, total_round_count: int | None = None
    ) -> None:
        """Put an episode's turns into the buffer; without a score they are dropped."""
        for turn in self.scored(request_id, score, total_round_count):
            self.buffer.put(turn)

    def scored(
        self, request_id: str, score: float | None, total_round_count: int | None
    ) -> list[Trajectory]:
        """The turns of an episode that has ended, which are forgotten here."""
        rounds = self._rounds.pop(request_id, [])
        if score is None:
            return []
        turns = [turn for request, turn in rounds if request.taken and turn.action_ids][
            :total_round_count
        ]
        total = sum(len(turn.action_ids) for turn in turns)
        episode = Episode([], Ending.COMPLETED, len(turns))
        for turn in turns:
            turn.scores = {"score": score}
            turn.episode = episode
            turn.share = len(turn.action_ids) / total
        return turns


class TaskPool:
    """Plays an agent on rows. What it asks the model waits in ``prompt_queue`` until ``put_batch`` answers."""

    def __init__(
        self,
        source: AgentSource,
        tokenizer: PreTrainedTokenizerBase,
        longest: int = 4096,  # tokens of an episode
        notify_score_fn: NotifyScore = lambda *_: None,
        begin_group_fn: BeginGroup | None = None,
    ) -> None:
        source.check(tokenizer)
        self.source = source
        self.tokenizer = tokenizer
        self.longest = longest
        self.notify, self.begin_group = notify_score_fn, begin_group_fn
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
                await asyncio.wrap_future(
                    self.begin_group(group, [str(number) for number in numbers])
                )
            episodes += [
                asyncio.create_task(self._play(prompt, group, number)) for number in numbers
            ]
        await asyncio.gather(*episodes)

    async def _play(self, prompt: Prompt, group: int, number: int) -> None:
        async def generate(
            ids: Sequence[int], params: SamplingParams, seed: int, continue_from: int | None
        ) -> Completion:
            request = PromptRequest(
                str(number), replace(prompt, token_ids=list(ids)), params, seed=seed, group=group
            )
            self.prompt_queue.put(request)
            completion = await asyncio.wrap_future(request.answer)
            request.taken = True
            return completion

        setup = SessionSetup(
            self.renderer,
            generate,
            SamplingParams(self.longest),
            options=self.source.options,
            longest=self.longest,
        )
        task = Task(prompt, sample_seed(0, number), sample_seed(0, group) % 2**31, group=group)
        played = await play(self.source.agent, task, setup, needs_reward=True)
        score, episode = None, played.episode
        if episode.ending.is_trained:
            score = sum(played.session.rewards.values()) + sum(
                turn.reward for turn in played.session.turns
            )
        else:
            logger.warning("episode %d: %s: %s", number, episode.ending.value, episode.error)
        self.notify(str(number), score, episode.n_turns)


def create_and_launch_task_pool(
    source: AgentSource, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> tuple[TaskPool, threading.Thread]:
    """A pool with the options of ``TaskPool``, and the thread in which it plays."""
    server = TaskPool(source, tokenizer, **options)
    return server, server.thread
