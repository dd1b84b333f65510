"""The table at the start of supervised training."""

from __future__ import annotations

from typing import Any

from openppo.tracking.terminal import announce
from openppo.trainer.overview.roles import model_role
from openppo.trainer.overview.start_table import Facts, count, memory_fact, page
from openppo.trainer.supervised.loop import SupervisedTrainer


def announce_supervised_start(trainer: SupervisedTrainer[Any]) -> None:
    """Log the model and the batch arithmetic of ``trainer``, on rank 0."""
    parts, config = trainer.components, trainer.config
    if not parts.strategy.is_main:
        return
    batch, ranks, n = config.batch, trainer.comm.world_size, len(parts.train_examples)
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    share = -(-min(batch.train_batch_size, n) // ranks)
    micro_batches = count(-(-share // batch.micro_train_batch_size), "micro-batch", "micro-batches")
    whole = batch.max_epochs * -(-n // batch.train_batch_size)
    cut = f"; --max_steps ends it after {trainer.total_steps:,}" if trainer.total_steps < whole else ""
    facts: Facts = [
        ("each step", f"{min(batch.train_batch_size, n):,} samples, in {micro_batches} of up to "
                      f"{batch.micro_train_batch_size}{each}"),
        ("in all", f"{count(batch.max_epochs, 'epoch')} of {count(n, 'sample')}, {count(whole, 'step')}{cut}"),
    ]  # fmt: skip
    if parts.eval_examples:
        facts.append(("held out", count(len(parts.eval_examples), "sample")))
    if trainer.global_step > 0:
        facts.append(("goes on", f"after step {trainer.global_step:,} of {trainer.total_steps:,}"))
    role = model_role("model", config.supervised.pretrain, parts.engine.module, parts.strategy, is_trained=True)
    announce(page([role], facts + memory_fact(parts.estimate, ranks)))
