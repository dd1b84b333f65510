"""Several tasks in one run, from a tasks file or from ``TaskService`` objects."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from openppo.agents.build import AgentPlayer, Solve, agent_source
from openppo.agents.episodes import Agent
from openppo.config import TrainPPOConfig, from_options
from openppo.config.agents import AgentConfig
from openppo.config.data import PPODataConfig
from openppo.config.fields import declared_options, given_options, raise_first, rules_of
from openppo.config.rewards import NO_REWARD, NONE, RewardConfig
from openppo.datasets import load_mixed_rows, load_tasks
from openppo.experience.own_estimator import estimator_problems
from openppo.rollout.samplers import Players
from openppo.rollout.tasks import RATIOS, Ratios, RunTask, TaskControl, TaskPlayers
from openppo.tasks.server import TaskServer
from openppo.tasks.service import ServiceAgent
from openppo.types import Prompt
from openppo.user_code import load_callable

VERIFIERS = ("exact_match", "regex", "math", "length")
_SAMPLING = ("generate_max_len", "stop", "stop_token_ids")
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("agent", "data", "reward", "eval_data"), (str, "a text")),
    **dict.fromkeys(("sampling", "options"), (dict, "options by name")),
    "timeout": ((int, float), "a number of seconds"),
}
_RUN_OPTIONS = {
    "prompt_data",
    "pretrain_data",
    "reward_weights",
    "reward_pretrain",
    "prm_pretrain",
    "agent_env",
}
_OPTIONS = {
    name: rules_of(option)
    for group in (AgentConfig, PPODataConfig, RewardConfig)
    for name, option in declared_options(group).items()
}
_LOCAL_OPTIONS = {name for name, rules in _OPTIONS.items() if rules.place} | {"agent_command"}
"""Options that name addresses, programs and files, some of which run."""
_ELSE = "Any other must be in the --tasks file at the start."


@dataclass(frozen=True)
class TaskService:
    """One of several tasks of a run; the run's options are its defaults.

    ``agent``: a coroutine ``solve(task, session)``, an ``Agent``, path.py:name of one, or the http address of a
    program; None: a single response, or the form that ``options`` name. ``data`` and ``eval_data``: files as for
    ``--prompt_data``. ``reward``: path.py[:name] of a reward function, the name of a verifier, or the address of a
    reward server; None: the agent's results. ``ratio``: share of the episodes that are trained on; of all tasks they
    sum to 1, or all are None. ``group_size``: as ``--n_samples_per_prompt``. ``max_concurrent``: episodes under way on
    all ranks. ``timeout``: seconds for one episode. ``retries``: times that a failed one is played again. ``sampling``:
    generate_max_len, stop, stop_token_ids. ``options``: further options of train_ppo by name, of agents, data and
    rewards.
    """

    name: str
    agent: Agent | Solve | str | None = None
    data: str = ""
    reward: str | None = None
    ratio: float | None = None
    group_size: int | None = None
    max_concurrent: int | None = None
    timeout: float | None = None
    retries: int = 2
    sampling: Mapping[str, Any] = field(default_factory=dict)
    eval_data: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str | None:
        """Address of the program that is the agent; None for another agent."""
        if isinstance(self.agent, str) and _is_address(self.agent):
            return self.agent
        return None


def task_source(
    config: TrainPPOConfig,
    services: Sequence[TaskService] | None = None,
    ratios: Ratios | None = None,
) -> TaskPlayers:
    """Make the ``source`` of ``build_ppo_trainer`` that plays ``services``, or those of the file ``--tasks``.

    ``ratios``, or the function that ``--task_ratios`` names, sets the ratios at each step. ``ValueError`` names the
    task and the change to make.
    """
    function = config.orchestrator.task_ratios
    if ratios is None and function is not None:
        ratios = RATIOS.get(function) or load_callable(function, "--task_ratios")
    services = read_tasks(Path(config.orchestrator.tasks or "")) if services is None else services

    names = [service.name for service in services]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"--tasks: two tasks have the name {repeated[0]!r}: rename one.")
    ratio_of = _ratios(services)
    tasks = [_run_task(service, config, ratio_of[service.name]) for service in services]
    return ServedTasks(config, tasks, ratios)


class ServedTasks(TaskPlayers):
    """Tasks that can be watched, changed and joined at the address in ``logs/tasks.json``."""

    def __init__(
        self, config: TrainPPOConfig, tasks: Sequence[RunTask], ratios: Ratios | None
    ) -> None:
        super().__init__(tasks, ratios)
        self.config = config

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ``ValueError``, with the task's name, for options that cannot work."""
        super().check(tokenizer)
        self.tokenizer = tokenizer

    def newcomer(self, fields: Mapping[str, Any]) -> tuple[RunTask, list[Prompt]]:
        """Make a task and its prompts from the ``fields`` of a ``TaskService``."""
        where = "a task that joins a run"
        (service,) = _services([fields], where)
        ratio = service.ratio
        if service.address is None:
            raise ValueError(f"{where} is a program: send its address as agent, http://... {_ELSE}")
        local = sorted(_LOCAL_OPTIONS & service.options.keys())
        if local:
            raise ValueError(
                f"{where} names no files and programs of this machine: leave {local[0]} out. {_ELSE}"
            )
        if not (isinstance(ratio, int | float) and 0 < ratio < 1) or service.eval_data is not None:
            raise ValueError(
                f"{where} needs a ratio between 0 and 1, and is not evaluated: leave eval_data out."
            )

        task = _run_task(service, self.config, ratio)
        with task.named():
            assert task.players is not None
            if task.has_rewards:
                raise ValueError("it gives its rewards itself: leave reward out.")
            task.players.check(self.tokenizer)
            prompts = self._load_prompts(task.config.data)
        return replace(task, fields=fields), [replace(prompt, task=task.name) for prompt in prompts]

    def _load_prompts(self, data: PPODataConfig) -> list[Prompt]:
        rows = load_mixed_rows(
            data,
            data.prompt_data,
            flag="data",
            split=data.prompt_split,
            seed=self.config.deepspeed.seed,
        )
        return load_tasks(rows, self.tokenizer, data)

    def serve(self, control: TaskControl) -> Callable[[], None]:
        """Serve ``control`` over HTTP until the function that is returned is called."""
        logs = Path(self.tasks[0].config.run.save_path) / "logs"
        return TaskServer(control, logs / "tasks.json").close


def read_tasks(file: Path) -> list[TaskService]:
    """Read the tasks of a YAML file: ``tasks``, a list of mappings with the fields of ``TaskService``."""
    where = f"--tasks {file}"
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    rows = document.get("tasks") if isinstance(document, dict) else None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"{where}: write 'tasks:' and below it a list, '- name: NAME' and so on.")
    return _services(rows, where)


def _services(rows: Sequence[Mapping[str, Any]], where: str) -> list[TaskService]:
    """Make services of rows; ``where`` begins messages."""
    known = [declared.name for declared in fields(TaskService)]
    for number, row in enumerate(rows, 1):
        name = row.get("name", f"number {number}")
        unknown = sorted(row.keys() - set(known))
        if unknown:
            raise ValueError(
                f"{where}: task {name} has no field {unknown[0]!r}; fields are {', '.join(known)}."
            )
        if not isinstance(row.get("name"), str):
            raise ValueError(f"{where}: task {name} needs a name: add 'name: NAME'.")
        for key, (expected, description) in _TYPES.items():
            value = row.get(key)
            if value is not None and not isinstance(value, expected):
                raise ValueError(f"{where}: task {name}: {key} is {value!r}: write {description}.")
    return [TaskService(**row) for row in rows]


def _ratios(services: Sequence[TaskService]) -> dict[str, float]:
    """Return the ratio of each task; equal ones if all are None."""
    ratios = {service.name: service.ratio for service in services if service.ratio is not None}
    if not ratios:
        return {service.name: 1 / len(services) for service in services}

    missing = [service.name for service in services if service.ratio is None]
    if missing:
        raise ValueError(
            f"--tasks: task {missing[0]} has no ratio, and others have: give one to each, or to none."
        )
    for name, ratio in ratios.items():
        if not (isinstance(ratio, int | float) and 0 < ratio <= 1):
            raise ValueError(
                f"--tasks: the ratio of task {name} is {ratio}: use a number above 0, at most 1."
            )
    total = sum(ratios.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"--tasks: the ratios sum to {total:g}: make them sum to 1.")
    return ratios


def _run_task(service: TaskService, config: TrainPPOConfig, ratio: float) -> RunTask:
    """Make the task of ``service``; ``ValueError`` for fields or options that cannot work."""
    _check_fields(service)
    options = {**given_options(config), **_task_options(service)}
    task = RunTask(
        service.name,
        from_options(TrainPPOConfig, **options),
        ratio=ratio,
        max_concurrent=service.max_concurrent,
        retries=service.retries,
    )
    with task.named():
        _check_options(task.config, config)
        players = _players(service, task.config)
        if task.config.rewards.are_none:
            raise ValueError(f"reward {NONE} is for a run without --tasks: name its rewards.")
        if not service.data and task.config.agents.environment is None:
            raise ValueError("it has no data, and no environment: give it data.")
        gives_rewards = players is not None and players.gives_rewards
        if not task.has_rewards and not gives_rewards:
            raise ValueError(task.config.agents.why_no_reward + NO_REWARD)
    return replace(task, players=players)


def _check_fields(service: TaskService) -> None:
    """Raise ``ValueError`` for a name, options or numbers that a task cannot have."""
    name = service.name
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"--tasks: {name!r} is no name of a task: use letters, digits, '.', '-' and '_'."
        )

    allowed = {"options": _OPTIONS.keys() - _RUN_OPTIONS, "sampling": set(_SAMPLING)}
    for key, allowed_names in allowed.items():
        wrong = sorted(vars(service)[key].keys() - allowed_names)
        if wrong:
            raise ValueError(
                f"--tasks: task {name}: {key} has {wrong[0]}, which is the run's, or no option of tasks."
            )

    for key, least in (("group_size", 1), ("max_concurrent", 1), ("retries", 0)):
        value = vars(service)[key]
        if value is not None and not (isinstance(value, int) and value >= least):
            raise ValueError(
                f"--tasks: task {name}: {key} {value}: use a whole number of {least} or more."
            )


def _task_options(service: TaskService) -> dict[str, Any]:
    """Options of train_ppo that a task sets."""
    options = {**service.options, **service.sampling, **_reward_options(service.reward)}
    options["prompt_data"] = service.data
    options["eval_data"] = service.eval_data
    options["tasks"] = None
    if service.group_size is not None:
        options["n_samples_per_prompt"] = service.group_size
    if service.timeout is not None:
        options["agent_timeout"] = service.timeout
    if isinstance(service.agent, str) and service.address is None:
        options["agent"] = service.agent
    if "environment" in options and not service.data:
        options["n_envs"] = 1  # each group still has its own seed
    return options


def _check_options(config: TrainPPOConfig, run_config: TrainPPOConfig) -> None:
    """Raise ``ValueError`` for options of a task that cannot work in this run."""
    for group in (config.agents, config.data, config.rewards, config.generation):
        group.validate()
    problems = chain(config.group_problems(), estimator_problems(config))
    raise_first(text.replace("--n_samples_per_prompt", "group_size") for text in problems)
    longest = run_config.generation.generate_max_len
    if config.generation.generate_max_len > longest:
        raise ValueError(
            f"generate_max_len is longer than the run's --generate_max_len {longest}: raise that."
        )


def _players(service: TaskService, config: TrainPPOConfig) -> Players | None:
    if service.address is not None:
        return AgentPlayer(ServiceAgent(service.address), config.agents)
    if service.agent is None or isinstance(service.agent, str):
        return agent_source(config.agents)
    return AgentPlayer(service.agent, config.agents)


def _reward_options(reward: str | None) -> dict[str, Any]:
    if reward is None:
        return {}
    if reward in VERIFIERS:
        return {"verifiable_reward": reward}
    if _is_address(reward):
        return {"remote_rm_url": reward}
    return {"reward_fn": reward}


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))
