"""Tasks of a run by their fields: from a file, from Python, or registered by a program."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Required, TypedDict, cast

import yaml
from transformers import PreTrainedTokenizerBase

from openppo.agents.build import AgentPlayer, Solve, agent_source
from openppo.agents.episodes import Agent
from openppo.agents.service import ServiceAgent
from openppo.config import TrainPPOConfig, from_options
from openppo.config.agents import AgentConfig
from openppo.config.data import PPODataConfig
from openppo.config.fields import declared_options, given_options, raise_first, rules_of
from openppo.config.rewards import NO_REWARD, NONE, RewardConfig
from openppo.datasets import load_mixed_rows, load_tasks
from openppo.experience.own_estimator import estimator_problems
from openppo.rollout.players import Players
from openppo.sources.progress import RATIOS, Ratios
from openppo.sources.task import Task, TaskControl, Tasks
from openppo.sources.task_server import TaskServer
from openppo.user_code import load_callable

VERIFIERS = ("exact_match", "regex", "math", "length")
_SAMPLING = ("generate_max_len", "stop", "stop_token_ids")
_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("data", "reward", "eval_data"), (str, "a text")),
    "agent": ((str, Agent, Callable), "a text"),  # objects come from Python alone
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


class TaskFields(TypedDict, total=False):
    """Fields of one of several tasks of a run, whose options are its defaults; ``name`` is required.

    >>> TaskFields(name="sums", data="sums.jsonl", reward="exact_match", ratio=0.5)["reward"]
    'exact_match'
    """

    name: Required[str]
    # A coroutine ``solve(task, session)``, an ``Agent``, path.py:name of one, or the http address of a program. Without
    # it, the task is played as single responses, or in the form that ``options`` name.
    agent: Agent | Solve | str | None
    # Files as for --prompt_data.
    data: str
    # path.py[:name] of a reward function, the name of a verifier, or the address of a reward server; without it, the
    # agent gives the rewards.
    reward: str | None
    # Share of the episodes that are trained on. Those of all tasks sum to 1, or none has one.
    ratio: float | None
    # As --n_samples_per_prompt.
    group_size: int | None
    # Episodes under way on all ranks, at most.
    max_concurrent: int | None
    # Seconds for one episode.
    timeout: float | None
    # Times that a failed episode is played again (default: 2).
    retries: int
    # generate_max_len, stop, stop_token_ids.
    sampling: Mapping[str, Any]
    # Files as for --eval_data.
    eval_data: str | None
    # Further options of train_ppo by name, of agents, data and rewards.
    options: Mapping[str, Any]


def task_source(
    config: TrainPPOConfig,
    tasks: Sequence[TaskFields] | None = None,
    ratios: Ratios | None = None,
) -> Tasks:
    """Make the ``source`` of ``build_ppo_trainer`` that plays ``tasks``, or those of the file ``--tasks``.

    ``ratios``, or the function that ``task_ratios`` names, sets the ratios at each step. While the run lasts, tasks
    can be watched, changed and joined at the address in ``logs/tasks.json``. ``ValueError`` names the task and the
    change to make.
    """
    function = config.orchestrator.task_ratios
    if ratios is None and function is not None:
        ratios = RATIOS.get(function) or load_callable(function, "task_ratios")
    file = Path(config.orchestrator.tasks or "")
    rows = read_tasks(file) if tasks is None else _checked(tasks, "tasks")

    names = [row["name"] for row in rows]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"--tasks: two tasks have the name {repeated[0]!r}: rename one.")
    ratio_of = _ratios(rows)
    return Tasks(
        [make_task(row, config, ratio_of[row["name"]]) for row in rows],
        mixed=True,
        ratios=ratios,
        newcomer=partial(_newcomer, config),
        serve=partial(_serve, Path(config.run.save_path) / "logs" / "tasks.json"),
    )


def _serve(file: Path, control: TaskControl) -> Callable[[], None]:
    """Serve ``control`` over HTTP until the function that is returned is called."""
    return TaskServer(control, file).close


def _newcomer(
    config: TrainPPOConfig, tokenizer: PreTrainedTokenizerBase, fields: Mapping[str, Any]
) -> Task:
    """Make a task with its prompts from the ``fields`` that a program registers."""
    where = "a task that joins a run"
    (row,) = _checked([fields], where)
    if _address(row) is None:
        raise ValueError(f"{where} is a program: send its address as agent, http://... {_ELSE}")
    local = sorted(_LOCAL_OPTIONS & row.get("options", {}).keys())
    if local:
        raise ValueError(
            f"{where} names no files and programs of this machine: leave {local[0]} out. {_ELSE}"
        )
    ratio = row.get("ratio")
    if not (isinstance(ratio, int | float) and 0 < ratio < 1) or row.get("eval_data") is not None:
        raise ValueError(
            f"{where} needs a ratio between 0 and 1, and is not evaluated: leave eval_data out."
        )

    task = make_task(row, config, ratio)
    if task.is_scored:
        raise ValueError(f"task {task.name}: it gives its rewards itself: leave reward out.")
    task.check(tokenizer)
    with task.named():
        data = task.config.data
        data_rows = load_mixed_rows(
            data,
            data.prompt_data,
            flag="data",
            split=data.prompt_split,
            seed=config.deepspeed.seed,
        )
        prompts = load_tasks(data_rows, tokenizer, data)
    return replace(task.with_prompts(prompts), fields=fields)


def read_tasks(file: Path) -> list[TaskFields]:
    """Read the tasks of a YAML file: ``tasks``, a list of mappings with the fields of ``TaskFields``."""
    where = f"--tasks {file}"
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    rows = document.get("tasks") if isinstance(document, dict) else None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"{where}: write 'tasks:' and below it a list, '- name: NAME' and so on.")
    return _checked(rows, where)


def _checked(rows: Sequence[Mapping[str, Any]], where: str) -> list[TaskFields]:
    """Check the fields of rows, and their types; ``where`` begins messages."""
    known = list(TaskFields.__annotations__)
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
    return [cast(TaskFields, row) for row in rows]


def _ratios(rows: Sequence[TaskFields]) -> dict[str, float]:
    """Return the ratio of each task; equal ones if none has one."""
    ratios = {row["name"]: row.get("ratio") for row in rows}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    if not known:
        return dict.fromkeys(ratios, 1 / len(rows))

    missing = [name for name, ratio in ratios.items() if ratio is None]
    if missing:
        raise ValueError(
            f"--tasks: task {missing[0]} has no ratio, and others have: give one to each, or to none."
        )
    for name, ratio in known.items():
        if not (isinstance(ratio, int | float) and 0 < ratio <= 1):
            raise ValueError(
                f"--tasks: the ratio of task {name} is {ratio}: use a number above 0, at most 1."
            )
    total = sum(known.values())
    if not math.isclose(total, 1.0, abs_tol=1e-6):
        raise ValueError(f"--tasks: the ratios sum to {total:g}: make them sum to 1.")
    return known


def make_task(row: TaskFields, config: TrainPPOConfig, ratio: float) -> Task:
    """Make a task, without prompts yet; ``ValueError`` for fields or options that cannot work."""
    _check_fields(row)
    options = {**given_options(config), **_task_options(row)}
    task = Task(
        row["name"],
        from_options(TrainPPOConfig, **options),
        ratio=ratio,
        max_concurrent=row.get("max_concurrent"),
        retries=row.get("retries", 2),
    )
    with task.named():
        _check_options(task.config, config)
        task = replace(task, players=_players(row, task.config))
        if task.config.rewards.are_none:
            raise ValueError(f"reward {NONE} is for a run without --tasks: name its rewards.")
        if not row.get("data") and task.config.agents.environment is None:
            raise ValueError("it has no data, and no environment: give it data.")
        if not task.is_scored and not task.gives_rewards:
            raise ValueError(task.config.agents.why_no_reward + NO_REWARD)
    return task


def _check_fields(row: TaskFields) -> None:
    """Raise ``ValueError`` for a name, options or numbers that a task cannot have."""
    name = row["name"]
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"--tasks: {name!r} is no name of a task: use letters, digits, '.', '-' and '_'."
        )

    fields: Mapping[str, Any] = row
    allowed = {"options": _OPTIONS.keys() - _RUN_OPTIONS, "sampling": set(_SAMPLING)}
    for key, allowed_names in allowed.items():
        wrong = sorted(fields.get(key, {}).keys() - allowed_names)
        if wrong:
            raise ValueError(
                f"--tasks: task {name}: {key} has {wrong[0]}, which is the run's, or no option of tasks."
            )

    for key, least in (("group_size", 1), ("max_concurrent", 1), ("retries", 0)):
        value = fields.get(key)
        if value is not None and not (isinstance(value, int) and value >= least):
            raise ValueError(
                f"--tasks: task {name}: {key} {value}: use a whole number of {least} or more."
            )


def _task_options(row: TaskFields) -> dict[str, Any]:
    """Options of train_ppo that a task sets."""
    options: dict[str, Any] = {**row.get("options", {}), **row.get("sampling", {})}
    options |= _reward_options(row.get("reward"))
    options["prompt_data"] = row.get("data", "")
    options["eval_data"] = row.get("eval_data")
    options["tasks"] = None
    group_size = row.get("group_size")
    if group_size is not None:
        options["n_samples_per_prompt"] = group_size
    timeout = row.get("timeout")
    if timeout is not None:
        options["agent_timeout"] = timeout
    agent = row.get("agent")
    if isinstance(agent, str) and _address(row) is None:
        options["agent"] = agent
    if "environment" in options and not row.get("data"):
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


def _players(row: TaskFields, config: TrainPPOConfig) -> Players | None:
    address = _address(row)
    if address is not None:
        return AgentPlayer(ServiceAgent(address), config.agents)
    agent = row.get("agent")
    if agent is None or isinstance(agent, str):
        return agent_source(config.agents)
    return AgentPlayer(agent, config.agents)


def _address(row: TaskFields) -> str | None:
    """Address of the program that is a task's agent; None for another agent."""
    agent = row.get("agent")
    return agent if isinstance(agent, str) and _is_address(agent) else None


def _reward_options(reward: str | None) -> dict[str, Any]:
    if reward is None:
        return {}
    if reward.partition(":")[0] in VERIFIERS:
        return {"verifiable_reward": reward}
    if _is_address(reward):
        return {"remote_rm_url": reward}
    return {"reward_fn": reward}


def _is_address(text: str) -> bool:
    return text.startswith(("http://", "https://"))
