"""From the options of train_sft, train_rm and train_prm and the shape of their model to the estimate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from openppo.config.commands import SupervisedCommand
from openppo.trainer.estimate.activations import Pass, training_peak
from openppo.trainer.estimate.checkpoint import checkpoint_bytes
from openppo.trainer.estimate.communication import optimizer_step_bytes
from openppo.trainer.estimate.estimate import Estimate, Phase
from openppo.trainer.estimate.remedies import supervised_changes
from openppo.trainer.estimate.shapes import ModelShape
from openppo.trainer.estimate.states import Setting, n_trained, step_moments, trained_states


@dataclass(frozen=True)
class SupervisedRun:
    """All that the memory of a run depends on.

    ``longest`` is the length of the longest row, ``scored`` the places of a batch at which logits are computed, and
    ``rows_per_sample`` is 2 for pairs.
    """

    config: SupervisedCommand
    shape: ModelShape
    longest: int
    scored: int
    rows_per_sample: int = 1
    n_ranks: int = 1
    on_cpu: bool = False
    device_memory: int | None = None


def estimate_supervised(run: SupervisedRun) -> Estimate:
    """Memory and communication of a run that trains one model."""
    batch, deepspeed, lora = run.config.batch, run.config.deepspeed, run.config.lora
    setting, samples = Setting(deepspeed, run.n_ranks, run.on_cpu), -(-batch.train_batch_size // run.n_ranks)
    micro_batches = -(-samples // batch.micro_train_batch_size)
    state = trained_states(run.shape, setting, lora.lora_rank, lora.load_in_4bit, accumulates=micro_batches > 1)
    length = min(run.longest, run.config.supervised.max_len)
    rows = run.rows_per_sample * min(batch.micro_train_batch_size, samples)
    activations = training_peak(
        run.shape,
        Pass(rows, setting.width(length), min(run.scored, length), run.on_cpu),
        setting.element,
        deepspeed.gradient_checkpointing,
        lora.lora_rank,
    )
    made = state.total - state.device.get("Adam moments", 0)
    lasting = state.total + (sum(state.host.values()) if run.on_cpu else 0)
    moments = step_moments(state, activations, run.on_cpu)
    return Estimate(
        roles={"model": state.device},
        phases=[
            Phase("loading", made, {"a model on its way": state.loading}),
            Phase("training", lasting, max(moments, key=lambda moment: sum(moment.values()))),
        ],
        host={"optimizer": sum(state.host.values())} if state.host else {},
        sent={"training": optimizer_step_bytes(run.shape, setting, micro_batches, lora.lora_rank)},
        checkpoint=checkpoint_bytes(n_trained(run.shape, lora.lora_rank)),
        n_ranks=run.n_ranks,
        device_memory=run.device_memory,
        changes=[
            (change, partial(estimate_supervised, dataclasses.replace(run, config=config)))
            for change, config in supervised_changes(run.config)
        ],
    )
