"""Rows of a PPO run: prompts, held-out prompts and documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from openppo.build.checks.context import check_context
from openppo.build.objects import NOTHING, OwnObjects
from openppo.build.policy_inputs import policy_vision
from openppo.build.roles import other_models
from openppo.build.row_loading import once_per_host, tokenizing
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
from openppo.models.pretrained import check_model, check_token_ids, context_length
from openppo.rollout.players import Players
from openppo.sources.task import Task, Tasks
from openppo.strategy.comm import check_same
from openppo.trainer.resume.compatible import examples_fingerprint
from openppo.trainer.run_data import RunData
from openppo.types import Comm, Prompt


def load_run_data(
    tasks: Tasks,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
    objects: OwnObjects = NOTHING,
) -> RunData:
    """Load the data of all tasks, the same on all ranks, and the documents with those of the first.

    ``objects`` may hold prompts. Rows of agents are their tasks, of which an environment needs none. ``ValueError``
    names the task, the flag and the row that cannot be used, and the ranks if only some cannot use it.
    """
    loaded_tasks: list[Task] = []
    documents: list[TokenExample] = []
    fingerprints: dict[str, str] = {}
    longest = 0
    for task in tasks.tasks:
        with task.named():
            rows = _load(
                task.config,
                tokenizer,
                actor_config,
                comm=comm,
                reads_documents=not loaded_tasks,
                agent=task.players,
                objects=objects,
            )

        longest = max(longest, rows.longest)
        loaded_tasks.append(task.with_prompts(rows.prompts, rows.held_out))
        documents += rows.documents
        fingerprints |= {task.label(flag): known for flag, known in rows.fingerprints.items()}
    return RunData(loaded_tasks, documents, fingerprints=fingerprints, longest=longest)


def load_only_documents(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
) -> RunData:
    """Load the documents of a run whose samples come from the caller's source."""
    rows = _load(config, tokenizer, actor_config, comm=comm, reads_prompts=False)
    return RunData([], rows.documents, fingerprints=rows.fingerprints, longest=rows.longest)


class _Rows(NamedTuple):
    """Rows of a task, and documents; ``longest`` and ``fingerprints`` as in ``RunData``."""

    prompts: list[Prompt]
    held_out: list[Prompt]
    documents: list[TokenExample]
    fingerprints: dict[str, str]
    longest: int


def _load(
    config: TrainPPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    actor_config: PreTrainedConfig,
    comm: Comm,
    *,
    reads_prompts: bool = True,
    reads_documents: bool = True,
    agent: Players | None = None,
    objects: OwnObjects = NOTHING,
) -> _Rows:
    """Load the rows that ``config`` names, the same on all ranks."""
    loading = _Loading(
        config,
        tokenizer,
        actor_config,
        reads_prompts=reads_prompts,
        reads_documents=reads_documents,
        agent=agent,
        objects=objects,
        show=tokenizing(comm),
    )
    loaded = once_per_host(comm, config.data, loading.run)
    contents: dict[str, Any] = {
        "--prompt_data": [_content(prompt) for prompt in loaded.prompts],
        "--eval_data": [_content(prompt) for prompt in loaded.held_out],
        "--pretrain_data": loaded.documents,
    }
    check_same(comm, contents)
    return loaded


@dataclass(frozen=True)
class _Loading:
    """Loading of rows on one rank, with the arguments of ``_load``."""

    config: TrainPPOConfig
    tokenizer: PreTrainedTokenizerBase
    actor_config: PreTrainedConfig
    reads_prompts: bool
    reads_documents: bool
    agent: Players | None
    objects: OwnObjects
    show: ShowRows

    def run(self) -> _Rows:
        """Load prompts, held-out prompts and documents, and check their lengths and ids."""
        config = self.config
        options = self.config.data
        evaluation = self.config.evaluation
        vision = policy_vision(config.model, self.tokenizer, self.actor_config, options=options)
        fingerprints = {}

        prompts = self._prompts(
            "--prompt_data",
            options.prompt_data,
            options.prompt_data_probs,
            split=options.prompt_split,
            vision=vision,
        )
        if prompts:
            contents = (_content(prompt) for prompt in prompts)
            fingerprints["--prompt_data"] = examples_fingerprint(contents)
        else:
            prompts = seed_prompts(config.agents.n_envs or 0)

        held_out = self._prompts(
            "--eval_data", evaluation.eval_data, None, split=evaluation.eval_split, vision=vision
        )
        held_out = held_out or seed_prompts(config.agents.eval_n_envs)

        longest = self._longest([*prompts, *held_out])
        self._check_contexts(longest)

        documents: list[TokenExample] = []
        if self.reads_documents:
            documents, contents_before_cut = _load_documents(
                config, self.tokenizer, longest, show=self.show
            )
        if documents:
            fingerprints["--pretrain_data"] = examples_fingerprint(contents_before_cut)

        rows = (row.token_ids for row in chain[Any](prompts, held_out, documents))
        model = f"--pretrain {config.model.pretrain}"
        check_token_ids(self.actor_config, model, self.tokenizer, rows=rows)
        return _Rows(prompts, held_out, documents, fingerprints=fingerprints, longest=longest)

    def _prompts(
        self,
        flag: str,
        source: str | None,
        probs: str | None,
        *,
        split: str,
        vision: RowVision | None,
    ) -> list[Prompt]:
        """Load the prompts of ``flag``, by name or from the caller; none without ``source``."""
        if not source or not self.reads_prompts:
            return []
        options = self.config.data
        agent = self.agent
        if flag == "--prompt_data" and self.objects.prompts is not None:
            return self.objects.read_prompts(self.tokenizer, options, empty=agent is not None)

        seed = self.config.deepspeed.seed
        rows = load_mixed_rows(options, source, probs, flag=flag, split=split, seed=seed)
        load_rows = load_prompts if agent is None or agent.needs_prompts else load_tasks
        return load_rows(rows, self.tokenizer, options, show=self.show, vision=vision)

    def _longest(self, prompts: Sequence[Prompt]) -> int:
        """Tokens of the longest prompt with its response, or of an agent's episode."""
        new_tokens = self.config.generation.generate_max_len
        prompt_limit = self.config.data.prompt_max_len
        if self.agent is None:
            lengths = (len(prompt.token_ids) for prompt in prompts)
            return max(lengths, default=prompt_limit) + new_tokens

        # Lengths of an agent's prompts are not known, and its episodes end where the context does.
        self.agent.check_prompts(prompts)
        episode = self.config.agents.episode_max_len or prompt_limit + new_tokens
        return min(episode, context_length(self.actor_config) or episode)

    def _check_contexts(self, longest: int) -> None:
        """Raise ``ValueError`` if a model cannot read ``longest`` tokens."""
        model = self.config.model
        new_tokens = self.config.generation.generate_max_len
        models = other_models(self.config)
        if self.reads_prompts:
            models = [("--pretrain", model.pretrain), *models]

        for flag, name in models:
            model_config = self.objects.configs.get(flag)
            if model_config is None:
                model_config = check_model(name, flag, model.trust_remote_code)
            check_context(
                model_config, f"{flag} {name}", longest - new_tokens, new_tokens=new_tokens
            )


def _load_documents(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, longest: int, show: ShowRows
) -> tuple[list[TokenExample], list[Any]]:
    """Load the documents of the PTX loss; without it there are none.

    Returns the documents, cut at ``longest`` tokens, and their contents before the cut.
    """
    options = config.data
    if options.pretrain_data is None or config.ppo.ptx_coef == 0:
        return [], []

    rows = load_mixed_rows(
        options,
        options.pretrain_data,
        options.pretrain_data_probs,
        flag="--pretrain_data",
        split=options.pretrain_split,
        seed=config.deepspeed.seed,
    )
    key = options.pretrain_key or options.input_key
    documents = load_documents(
        rows, tokenizer, key, max_len=longest, show=show, processes=options.dataset_num_proc
    )
    if key is None:
        return documents, [row.row for row in rows]
    return documents, [value_of(row.row, key, "pretrain_key") for row in rows]


def _content(prompt: Prompt) -> list[object]:
    """Ids, label and media of a prompt; a row stands for the ids of a task without a prompt."""
    content: list[object] = [prompt.token_ids or repr(prompt.row)]
    content.append(repr(prompt.label))
    if prompt.media:
        content.append([item.key for item in prompt.media])
    return content
