"""Second phase: rows, sizes of batches, the plan of steps, and the checkpoint to resume from."""

from dataclasses import dataclass, replace

from openppo.build.batch_plan import BatchPlan, batch_plan
from openppo.build.check import Checked
from openppo.build.checks.images import check_run_with_images
from openppo.build.checks.own_algorithm import try_prompt_order
from openppo.build.memory.estimate import Estimate
from openppo.build.memory.sizing import estimated_ppo, log_estimate
from openppo.build.rows import load_only_documents, load_run_data
from openppo.build.scorers import ScorerBuilder
from openppo.config.resolved import Resolved
from openppo.sources.build import async_steps, is_async
from openppo.sources.task import Tasks
from openppo.trainer.cards.run_card import RunCard, make_run_card
from openppo.trainer.checkpointer import Checkpointer
from openppo.trainer.resume.edited_files import user_files
from openppo.trainer.run_data import RunData


@dataclass(frozen=True)
class LoadedData:
    """Rows of a run, and what follows from their number and lengths.

    ``tasks`` have their prompts; None if the caller's source makes the samples. ``estimate`` of memory is None where a
    model cannot be counted. ``checkpointer`` has found the checkpoint to resume from.
    """

    run_data: RunData
    tasks: Tasks | None
    resolved: Resolved
    estimate: Estimate | None
    plan: BatchPlan
    card: RunCard
    checkpointer: Checkpointer


def load_data(checked: Checked) -> LoadedData:
    """Load the rows, and plan sizes and steps; ``ValueError`` names the flag and the row at fault.

    A dry run tries out the sources of rewards, logs the estimate of memory, and ends the process.
    """
    config = checked.config
    strategy = checked.strategy
    run_data = _load_rows(checked)
    tasks = checked.tasks
    if tasks is not None:
        tasks = replace(tasks, tasks=run_data.tasks)

    resolved, estimate = _estimated(checked, run_data)
    if config.run.dry_run and tasks is not None:
        ScorerBuilder.of(checked, run_data, resolved).check()
    log_estimate(estimate, config, strategy)  # a dry run ends here

    plan = _plan(checked, run_data, tasks)
    card = make_run_card(
        config,
        strategy.comm,
        config.model.pretrain,
        rows=run_data.counts,
        tasks=run_data.tasks,
        resolved=resolved.options,
    )
    checkpointer = Checkpointer(
        config,
        strategy,
        "ppo",
        data=run_data.fingerprints | checked.objects.fingerprints(),
        user_files=user_files(config, run_data.tasks),
        facts=card.facts,
        resolved=resolved.options,
    )
    return LoadedData(
        run_data=run_data,
        tasks=tasks,
        resolved=resolved,
        estimate=estimate,
        plan=plan,
        card=card,
        checkpointer=checkpointer,
    )


def _load_rows(checked: Checked) -> RunData:
    """Load and check the rows of all tasks, or the documents beside the caller's source."""
    config = checked.config
    comm = checked.strategy.comm
    if checked.tasks is None:
        return load_only_documents(config, checked.tokenizer, checked.actor_config, comm=comm)

    run_data = load_run_data(
        checked.tasks,
        checked.tokenizer,
        checked.actor_config,
        comm=comm,
        objects=checked.objects,
    )
    try_prompt_order(config, run_data.prompts, comm)
    if run_data.kinds:
        check_run_with_images(config, run_data, checked.actor_config)
    if config.evaluation.val_only and not run_data.held_out:
        raise ValueError("--val_only: no task has eval_data: add it to a task in the --tasks file.")
    return run_data


def _estimated(checked: Checked, run_data: RunData) -> tuple[Resolved, Estimate | None]:
    """Choose the sizes of micro-batches by an estimate of memory; only options count for the caller's source."""
    config = checked.config
    if checked.tasks is None and not config.run.dry_run:
        return Resolved.of(config), None
    configs = checked.objects.configs | {"--pretrain": checked.actor_config}
    return estimated_ppo(config, run_data, checked.strategy, configs=configs)


def _plan(checked: Checked, run_data: RunData, tasks: Tasks | None) -> BatchPlan:
    """Plan the steps; those of an asynchronous run all have full batches."""
    config = checked.config
    n_prompts = len(run_data.prompts)
    plan = batch_plan(
        config, checked.strategy.comm.world_size, n_prompts=n_prompts, source=checked.source
    )
    if tasks is None or not is_async(config, tasks):
        return plan
    n_steps = async_steps(config, n_prompts, tasks)
    return replace(plan, steps=[config.prompts_per_step] * n_steps, prompt_epochs=1)
