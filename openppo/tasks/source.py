"""Several tasks in one run: a tasks file, or ``TaskService`` objects of one's own."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from openppo.agents.build import AgentSource, Solve, agent_source
from openppo.agents.episodes import Agent
from openppo.config import TrainPPOConfig, from_options
from openppo.config.agents import AgentConfig
from openppo.config.data import PPODataConfig
from openppo.config.fields import declared_options, given_options, raise_first, rules_of
from openppo.config.rewards import NO_REWARD, RewardConfig
from openppo.datasets import load_mixed_rows, load_tasks
from openppo.rollout.samplers import Players
from openppo.rollout.tasks import RATIOS, Ratios, RunTask, TaskControl, TaskPlayers
from openppo.tasks.server import TaskServer
from openppo.tasks.service import ServiceAgent
from openppo.types import Prompt
from openppo.user_code import load_callable

VERIFIERS = ("exact_match", "regex", "math", "length")
_SAMPLING = ("generate_max_len", "stop", "stop_token_ids")
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("agent", "data", "reward", "eval_data"), (str, "a text")),
    **dict.fromkeys(("sampling", "options"), (dict, "options by name")),
    "timeout": ((int, float), "a number of seconds"),
}
_OF_THE_RUN = {
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
_ELSE = "Any other must be in the --tasks file at the start."
_OF_THIS_MACHINE = {name for name, rules in _OPTIONS.items() if rules.place} | {"agent_command"}
"""Options that name files, some of which run, programs and addresses."""


@dataclass(frozen=True)
class TaskService:
    """One of several tasks of a run. What is left out is as the run's options say.

    ``agent``: a coroutine ``solve(task, session)``, an ``Agent``, path.py:name of one, or the http address of a
    program; None: a single response, or a form that ``options`` name. ``data`` and ``eval_data``: files as for
    ``--prompt_data``. ``reward``: path.py[:name] of a reward function, the name of a verifier, or the address of a
    reward server; None: what the agent returns. ``ratio``: share of the episodes that are trained on; of all tasks they
    sum to 1, or none is given. ``group_size``: as ``--n_samples_per_prompt``. ``max_concurrent``: episodes under way on
    all ranks. ``timeout``: seconds for one episode. ``retries``: times that a failed one is played again.
    ``sampling``: generate_max_len, stop, stop_token_ids. ``options``: further options of train_ppo by name, of agents,
    data and rewards.
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
        """That of a program which is the agent."""
        return self.agent if isinstance(self.agent, str) and _is_address(self.agent) else None


def task_source(
    config: TrainPPOConfig,
    services: Sequence[TaskService] | None = None,
    ratios: Ratios | None = None,
) -> TaskPlayers:
    """The ``source`` of ``build_ppo_trainer`` that plays ``services``, or those of the file ``--tasks``.

    ``ratios``, or what ``--task_ratios`` names, sets the ratios anew at each step. ``ValueError`` names the task and
    what to change.
    """
    if (named := config.orchestrator.task_ratios) is not None and ratios is None:
        ratios = RATIOS.get(named) or load_callable(named, "--task_ratios")
    services = read_tasks(Path(config.orchestrator.tasks or "")) if services is None else services
    names = [service.name for service in services]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--tasks: two tasks have the name {twice[0]!r}: rename one.")
    parts = _ratios(services)
    return ServedTasks(
        config, [_run_task(each, config, parts[each.name]) for each in services], ratios
    )


class ServedTasks(TaskPlayers):
    """Tasks that can be watched and changed while the run lasts, and joined: ``logs/tasks.json`` says where."""

    def __init__(
        self, config: TrainPPOConfig, tasks: Sequence[RunTask], ratios: Ratios | None
    ) -> None:
        super().__init__(tasks, ratios)
        self.config = config

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """``ValueError`` naming the task of what cannot work."""
        super().check(tokenizer)
        self.tokenizer = tokenizer

    def newcomer(self, fields: Mapping[str, Any]) -> tuple[RunTask, list[Prompt]]:
        """The task that a program registers with the ``fields`` of a ``TaskService``, and its prompts."""
        what = "a task that joins a run"
        (service,) = _services([fields], what)
        ratio = service.ratio
        if service.address is None:
            raise ValueError(f"{what} is a program: send its address as agent, http://... {_ELSE}")
        if named := sorted(_OF_THIS_MACHINE & service.options.keys()):
            raise ValueError(
                f"{what} names no files and programs of this machine: leave {named[0]} out. {_ELSE}"
            )
        if not (isinstance(ratio, int | float) and 0 < ratio < 1) or service.eval_data is not None:
            raise ValueError(
                f"{what} needs a ratio between 0 and 1, and is not evaluated: leave eval_data out."
            )
        task = _run_task(service, self.config, ratio)
        with task.named():
            assert task.players is not None
            if task.has_rewards:
                raise ValueError("it gives its rewards itself: leave reward out.")
            task.players.check(self.tokenizer)
            data, seed = task.config.data, self.config.deepspeed.seed
            rows = load_mixed_rows(
                data, data.prompt_data, flag="data", split=data.prompt_split, seed=seed
            )
            prompts = load_tasks(rows, self.tokenizer, data)
        return replace(task, fields=fields), [replace(prompt, task=task.name) for prompt in prompts]

    def serve(self, control: TaskControl) -> Callable[[], None]:
        """Answer until what is returned is called."""
        return TaskServer(
            control, Path(self.tasks[0].config.run.save_path) / "logs" / "tasks.json"
        ).close


def read_tasks(file: Path) -> list[TaskService]:
    """The tasks of a YAML file: ``tasks``, a list of mappings with the fields of ``TaskService``."""
    where = f"--tasks {file}"
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    rows = read.get("tasks") if isinstance(read, dict) else None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"{where}: write 'tasks:' and below it a list, '- name: NAME' and so on.")
    return _services(rows, where)


def _services(rows: Sequence[Mapping[str, Any]], where: str) -> list[TaskService]:
    known = [each.name for each in fields(TaskService)]
    for number, row in enumerate(rows, 1):
        name = row.get("name", f"number {number}")
        if unknown := sorted(row.keys() - set(known)):
            raise ValueError(
                f"{where}: task {name} has no field {unknown[0]!r}; fields are {', '.join(known)}."
            )
        if not isinstance(row.get("name"), str):
            raise ValueError(f"{where}: task {name} needs a name: add 'name: NAME'.")
        for each, (kind, called) in _KINDS.items():
            if (value := row.get(each)) is not None and not isinstance(value, kind):
                raise ValueError(f"{where}: task {name}: {each} is {value!r}: write {called}.")
    return [TaskService(**row) for row in rows]


def _ratios(services: Sequence[TaskService]) -> dict[str, float]:
    given = {service.name: service.ratio for service in services if service.ratio is not None}
    if not given:
        return {service.name: 1 / len(services) for service in services}
    if missing := [service.name for service in services if service.ratio is None]:
        raise ValueError(
            f"--tasks: task {missing[0]} has no ratio, and others have: give one to each, or to none."
        )
    if bad := [
        name
        for name, ratio in given.items()
        if not (isinstance(ratio, int | float) and 0 < ratio <= 1)
    ]:
        raise ValueError(
            f"--tasks: the ratio of task {bad[0]} is {given[bad[0]]}: use a number above 0, at most 1."
        )
    if not math.isclose(total := sum(given.values()), 1.0, abs_tol=1e-6):
        raise ValueError(f"--tasks: the ratios sum to {total:g}: make them sum to 1.")
    return given


def _run_task(service: TaskService, config: TrainPPOConfig, ratio: float) -> RunTask:
    name = service.name
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"--tasks: {name!r} is no name of a task: use letters, digits, '.', '-' and '_'."
        )
    for what, given, allowed in (
        ("options", service.options, _OPTIONS.keys() - _OF_THE_RUN),
        ("sampling", service.sampling, set(_SAMPLING)),
    ):
        if wrong := sorted(given.keys() - allowed):
            raise ValueError(
                f"--tasks: task {name}: {what} has {wrong[0]}, which is the run's, or no option of tasks."
            )
    for what, least in (("group_size", 1), ("max_concurrent", 1), ("retries", 0)):
        value = vars(service)[what]
        if value is not None and not (isinstance(value, int) and value >= least):
            raise ValueError(
                f"--tasks: task {name}: {what} {value}: use a whole number of {least} or more."
            )
    own = {**service.options, **service.sampling, **_reward_options(service.reward)}
    own |= {"prompt_data": service.data, "eval_data": service.eval_data, "tasks": None}
    own |= {} if service.group_size is None else {"n_samples_per_prompt": service.group_size}
    own |= {} if service.timeout is None else {"agent_timeout": service.timeout}
    if isinstance(service.agent, str) and service.address is None:
        own["agent"] = service.agent
    if "environment" in own and not service.data:
        own["n_envs"] = 1  # each group has a seed of its own all the same
    made = from_options(TrainPPOConfig, **{**given_options(config), **own})
    task = RunTask(
        name,
        made,
        None,
        ratio=ratio,
        max_concurrent=service.max_concurrent,
        retries=service.retries,
    )
    with task.named():
        for group in (made.agents, made.data, made.rewards, made.generation):
            group.validate()
        raise_first(
            text.replace("--n_samples_per_prompt", "group_size") for text in made.group_problems()
        )
        if made.generation.generate_max_len > (most := config.generation.generate_max_len):
            raise ValueError(
                f"generate_max_len is longer than the run's --generate_max_len {most}: raise that."
            )
        players = _players(service, made)
        if not service.data and made.agents.environment is None:
            raise ValueError("it has no data, and no environment: give it data.")
        if not task.has_rewards and not (players is not None and players.gives_rewards):
            raise ValueError(made.agents.why_no_reward + NO_REWARD)
    return RunTask(
        name,
        made,
        players,
        ratio=ratio,
        max_concurrent=service.max_concurrent,
        retries=service.retries,
    )


def _players(service: TaskService, config: TrainPPOConfig) -> Players | None:
    if service.address is not None:
        return AgentSource(ServiceAgent(service.address), config.agents)
    if service.agent is None or isinstance(service.agent, str):
        return agent_source(config.agents)
    return AgentSource(service.agent, config.agents)


def _reward_options(reward: str | None) -> dict[str, Any]:
    if reward is None:
        return {}
    if reward in VERIFIERS:
        return {"verifiable_reward": reward}
    return {"remote_rm_url": reward} if _is_address(reward) else {"reward_fn": reward}


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))
