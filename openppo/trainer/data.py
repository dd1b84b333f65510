"""Data and rewards of a PPO run, or of each of its tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.datasets import (
    TokenExample,
    load_documents,
    load_mixed_rows,
    load_prompts,
    load_tasks,
    seed_prompts,
)
from openppo.datasets.media import RowVision
from openppo.datasets.sources import ShowRows, value_of
from openppo.experience.forwards import forward_size
from openppo.models.pretrained import check_model, check_token_ids, context_length
from openppo.rewards import Scorer
from openppo.rewards.build import ScorerSetup
from openppo.rewards.scoring import TaskScorer
from openppo.rollout.samplers import Players
from openppo.rollout.tasks import RunTask, TaskPlayers
from openppo.strategy.comm import InferenceStrategy, check_same, collective
from openppo.tracking.console import log_lines
from openppo.tracking.report.run_data import short_names
from openppo.trainer.objects import NOTHING, OwnObjects
from openppo.trainer.resume.compatible import examples_fingerprint
from openppo.trainer.reward_trial import trial_lines
from openppo.trainer.roles import loading, other_models
from openppo.trainer.startup import (
    blank_prompt,
    check_context,
    once_per_host,
    policy_vision,
    tokenizing,
)
from openppo.types import Comm, Prompt


@dataclass(frozen=True)
class PPOData:
    """``held_out`` is empty without ``--eval_data``, ``documents`` without ``--pretrain_data``.

    ``longest`` is the most tokens that a prompt and its response, or an episode, can have; documents are cut there.
    ``fingerprints`` by flag are of what they were before, so that a run may resume with another ``--generate_max_len``.
    """

    prompts: list[Prompt]
    held_out: list[Prompt]
    documents: list[TokenExample]
    fingerprints: dict[str, str]
    longest: int

    @property
    def kinds(self) -> set[str]:
        """Kinds of what prompts have beside texts: image, video."""
        return {item.kind for prompt in [*self.prompts, *self.held_out] for item in prompt.media}

    @property
    def source_names(self) -> dict[str, str]:
        """What the sources of prompts that are of no task are called in metrics."""
        return short_names(sorted({prompt.source for prompt in self.prompts if not prompt.task}))


def load_ppo_data(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
    prompts: bool = True,
    agent: Players | None = None,
    own: OwnObjects = NOTHING,
) -> PPOData:
    """Everything that the run reads, the same on all ranks; without ``prompts`` only documents.

    ``own`` may hold the prompts. With ``agent`` rows are its tasks, of which an environment needs none. ``ValueError``
    names the flag and the row of what cannot be used, and the ranks if only some cannot.
    """
    loading = _Loading(
        config,
        tokenizer,
        actor_config,
        reads_prompts=prompts,
        agent=agent,
        own=own,
        show=tokenizing(comm),
    )
    data = once_per_host(comm, config.data, loading.run)
    rows = {
        "--prompt_data": list(map(_content, data.prompts)),
        "--eval_data": list(map(_content, data.held_out)),
    }
    check_same(comm, rows | {"--pretrain_data": data.documents})
    return data


@dataclass(frozen=True)
class _Loading:
    """Reads the data of a run, as ``load_ppo_data`` says."""

    config: TrainPPOConfig
    tokenizer: PreTrainedTokenizerBase
    actor_config: PreTrainedConfig
    reads_prompts: bool
    agent: Players | None
    own: OwnObjects
    show: ShowRows

    def run(self) -> PPOData:
        """Prompts, held-out ones and documents, each within its length."""
        config = self.config
        options = self.config.data
        evaluation = self.config.evaluation
        vision = policy_vision(config.model, self.tokenizer, self.actor_config, options=options)
        prompts = self._prompts(
            "--prompt_data",
            options.prompt_data,
            options.prompt_data_probs,
            split=options.prompt_split,
            vision=vision,
        )
        prints = {"--prompt_data": examples_fingerprint(map(_content, prompts))} if prompts else {}
        prompts = prompts or seed_prompts(config.agents.n_envs or 0)
        held_out = self._prompts(
            "--eval_data", evaluation.eval_data, None, split=evaluation.eval_split, vision=vision
        )
        held_out = held_out or seed_prompts(config.agents.eval_n_envs)

        longest = self._longest([*prompts, *held_out])
        self._check_contexts(longest)
        documents, texts = _load_documents(config, self.tokenizer, longest, show=self.show)
        prints |= {"--pretrain_data": examples_fingerprint(texts)} if documents else {}
        ids = (x.token_ids for x in chain[Any](prompts, held_out, documents))
        check_token_ids(
            self.actor_config, f"--pretrain {config.model.pretrain}", self.tokenizer, rows=ids
        )
        return PPOData(prompts, held_out, documents, fingerprints=prints, longest=longest)

    def _prompts(
        self,
        flag: str,
        source: str | None,
        probs: str | None,
        *,
        split: str,
        vision: RowVision | None,
    ) -> list[Prompt]:
        if not source or not self.reads_prompts:
            return []
        options, agent = self.config.data, self.agent
        if flag == "--prompt_data" and self.own.prompts is not None:
            return self.own.read_prompts(self.tokenizer, options, empty=agent is not None)
        load_rows = load_prompts if agent is None or agent.needs_prompts else load_tasks
        seed = self.config.deepspeed.seed
        rows = load_mixed_rows(options, source, probs, flag=flag, split=split, seed=seed)
        return load_rows(rows, self.tokenizer, options, show=self.show, vision=vision)

    def _longest(self, prompts: Sequence[Prompt]) -> int:
        """Tokens of the longest prompt with its response, or of an agent's episode."""
        new_tokens, most = self.config.generation.generate_max_len, self.config.data.prompt_max_len
        if self.agent is None:
            return max((len(prompt.token_ids) for prompt in prompts), default=most) + new_tokens
        # How long an agent's prompts are is not known, and its episodes end where the context does.
        self.agent.check_prompts(prompts)
        episode = self.config.agents.episode_max_len or most + new_tokens
        return min(episode, context_length(self.actor_config) or episode)

    def _check_contexts(self, longest: int) -> None:
        config, new_tokens = self.config, self.config.generation.generate_max_len
        models = other_models(config)
        if self.reads_prompts:
            models = [("--pretrain", config.model.pretrain), *models]
        for flag, name in models:
            model_config = self.own.configs.get(flag) or check_model(
                name, flag, config.model.trust_remote_code
            )
            check_context(
                model_config, f"{flag} {name}", longest - new_tokens, new_tokens=new_tokens
            )


def _load_documents(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, longest: int, show: ShowRows
) -> tuple[list[TokenExample], list[Any]]:
    """Documents of the PTX loss, cut at ``longest`` tokens, and what they were before; none without that loss."""
    options = config.data
    if options.pretrain_data is None or config.ppo.ptx_coef == 0:
        return [], []
    given = (options.pretrain_data, options.pretrain_data_probs)
    seed = config.deepspeed.seed
    key = options.pretrain_key
    rows = load_mixed_rows(
        options, *given, flag="--pretrain_data", split=options.pretrain_split, seed=seed
    )
    key = key or options.input_key
    documents = load_documents(
        rows, tokenizer, key, max_len=longest, show=show, processes=options.dataset_num_proc
    )
    return documents, [
        row.row if key is None else value_of(row.row, key, "--pretrain_key") for row in rows
    ]


def load_tasks_data(
    tasks: TaskPlayers,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
    own: OwnObjects = NOTHING,
) -> PPOData:
    """What all tasks of a run read, as ``load_ppo_data``. ``ValueError`` names the task."""
    loaded = []
    for number, task in enumerate(tasks.tasks):
        config = task.config
        if number > 0:  # documents are the run's
            config = replace(config, data=replace(config.data, pretrain_data=None))
        with task.named():
            loaded.append(
                load_ppo_data(
                    config, tokenizer, actor_config, comm=comm, agent=task.players, own=own
                )
            )
    if not tasks.are_named:
        return loaded[0]
    named = list(zip(tasks.tasks, loaded, strict=True))
    return PPOData(
        [replace(prompt, task=task.name) for task, data in named for prompt in data.prompts],
        [replace(prompt, task=task.name) for task, data in named for prompt in data.held_out],
        loaded[0].documents,
        fingerprints={
            f"{flag} of task {task.name}": value
            for task, data in named
            for flag, value in data.fingerprints.items()
        },
        longest=max(data.longest for data in loaded),
    )


@dataclass(frozen=True)
class TaskRewards:
    """What the sources of rewards are made of."""

    tasks: TaskPlayers
    tokenizer: PreTrainedTokenizerBase
    strategy: InferenceStrategy
    data: PPOData
    actor_config: PreTrainedConfig
    function: Callable[..., Any] | None = None

    def check(self) -> None:
        """``ValueError`` for what ``build`` would find wrong before it loads a model; logs rewards of a few rows."""
        for task in self.tasks.tasks:
            with task.named():
                setup = self._setup(task)
                scorer = setup.check()
                if scorer is not None and task.players is None:  # whole episodes cannot be made up
                    self._try_out(scorer, setup.prompts)
                rewards = task.config.rewards
                models = {
                    "--reward_pretrain": rewards.reward_pretrain,
                    "--prm_pretrain": rewards.prm_pretrain,
                }
                for flag, model in models.items():
                    if model is not None:
                        logger.info(
                            "%s %s scores no row here: a dry run reads no weights", flag, model
                        )
        self.build_held_out()

    def _try_out(self, scorer: Scorer, prompts: Sequence[Prompt]) -> None:
        """Log rewards of a few prompts' labels; ``ValueError`` on all ranks where a source fails."""
        comm = self.strategy.comm

        def lines() -> list[str]:
            return trial_lines(scorer, prompts, self.tokenizer) if comm.rank == 0 else []

        log_lines(collective(comm, lines, (ValueError, RuntimeError, OSError)))

    def build(self) -> Scorer | None:
        """Scorer of all sources; None without any. ``ValueError`` names the flag of whatever cannot work."""
        scorers: dict[str, Scorer | None] = {}
        for task in self.tasks.tasks:
            with task.named():
                scorers[task.name] = self._setup(task).build() if task.has_rewards else None
        if not any(scorers.values()) or not self.tasks.are_named:
            return next(iter(scorers.values()))
        return TaskScorer(scorers)

    def build_held_out(self) -> Scorer | None:
        """Scorer of ``--eval_reward_fn``; None without it."""
        task = self.tasks.tasks[0]  # with several the option is refused
        if task.config.evaluation.eval_reward_fn is None:
            return None
        setup = replace(
            self._setup(task), source=task.config.eval_rewards, prompts=self.data.held_out
        )
        return replace(setup, function_flag="--eval_reward_fn").build()

    def _setup(self, task: RunTask) -> ScorerSetup:
        config, prompts = task.config, [*self.data.prompts, *self.data.held_out]
        shaping, stand_in = config.shaping, None
        if config.rewards.reward_pretrain is not None and self.strategy.comm.world_size > 1:
            run = config.model, self.tokenizer, self.actor_config, config.data, self.data.kinds
            stand_in = blank_prompt(*run, task.players is not None)
        return ScorerSetup(
            config.rewards,
            self.tokenizer,
            strategy=self.strategy,
            prompts=[prompt for prompt in prompts if prompt.task == task.name],
            actor=self.actor_config,
            size=forward_size(config),
            loading=loading(config),
            value_head_prefix=config.model.value_head_prefix,
            normalize=shaping.normalize_reward and shaping.reward_normalizer == "model",
            input_template=config.data.input_template,
            episodes=task.players is not None,
            function=self.function,
            stand_in=stand_in,
        )


def _content(prompt: Prompt) -> list[object]:
    """What a prompt is, or of a task without one its row."""
    content: list[object] = [prompt.token_ids or repr(prompt.row), repr(prompt.label)]
    return [*content, [item.key for item in prompt.media]] if prompt.media else content
