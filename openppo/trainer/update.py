"""All optimizer steps of a global step: actor and critic over the mini-batches of a replay buffer."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from openppo import logger
from openppo.config import RunConfig, TrainPPOConfig
from openppo.datasets import cyclic_batches
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer, mini_batches
from openppo.models.batching import MicroBatchSize
from openppo.models.pretrained import pad_token_id
from openppo.tracking import Metrics, progress_bar
from openppo.tracking.phase import timed
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.components import PPOComponents
from openppo.trainer.supervised.batches import StepBatch, token_batch
from openppo.types import Comm
from openppo.weight_files import save_tensors


class SkippedSteps:
    """Counts them, keeps their batches in ``<save_path>/skipped``, and ends the run when there are too many in a row.

    All ranks see the same norms, since a gradient that is not finite on one rank is not finite on any.
    """

    def __init__(self, run: RunConfig, comm: Comm) -> None:
        self.run = run
        self.comm = comm
        self.total = 0
        self.in_a_row: dict[str, int] = {}

    def accept(self, norm: float, role: str, place: str, **batch: list[dict[str, Any]]) -> bool:
        """Whether a step with the gradient norm ``norm`` was taken. If not, this rank's ``batch`` is written.

        ``place`` names the step in messages. ``FloatingPointError`` when the last ``--max_skipped_steps`` were not.
        """
        if math.isfinite(norm):
            self.in_a_row[role] = 0
            return True
        self.total += 1
        self.in_a_row[role] = self.in_a_row.get(role, 0) + 1
        name = f"{place.replace(' ', '_')}_{role}_rank{self.comm.rank}.safetensors"
        file = Path(self.run.save_path, "skipped", name)
        _write(batch, file)
        what = f"a loss or the gradient of the {role} was not finite in {place}"
        if self.in_a_row[role] >= self.run.max_skipped_steps:
            raise FloatingPointError(
                f"{what}, and {self.in_a_row[role]} optimizer steps in a row were skipped (--max_skipped_steps). Lower "
                f"the learning rate, and look at the batches in {file.parent}. The weights are those before."
            )
        if self.comm.rank == 0:
            logger.warning(
                "%s: this optimizer step is skipped on all ranks; its batch is in %s", what, file
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes, as JSON."""
        return {"total": self.total, "in_a_row": dict(self.in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of an earlier session."""
        self.total, self.in_a_row = state["total"], dict(state["in_a_row"])


class Update:
    """Called with a filled replay buffer, trains actor and critic on it and completes the global step.

    It counts steps in ``components.state``. All ranks call every method together.
    """

    def __init__(self, config: TrainPPOConfig, components: PPOComponents) -> None:
        self.config = config
        self.components = components
        self.state = components.state
        self.timer = components.maker.hooks.timer
        self.comm = components.strategy.comm
        self.actor_step = ActorStep(
            components.actor, config, self.comm, device=components.strategy.device
        )
        self.skipped = SkippedSteps(config.run, self.comm)
        self.models = (
            [components.actor]
            if components.critic is None
            else [components.actor, components.critic]
        )
        self._documents = self._document_batches()
        self.set_training(False)

    def __call__(self, buffer: ReplayBuffer, metrics: Metrics) -> dict[str, float]:
        """Train for ``--max_epochs``, and return the metrics of the whole step, the same on all ranks.

        ``FloatingPointError`` after ``--max_skipped_steps`` optimizer steps in a row that had to be skipped.
        """
        n_samples, kl = (
            self.components.maker.count(buffer.items),
            self.components.maker.kl_controller,
        )
        n_tokens, state = sum(int(item.attention_mask.sum()) for item in buffer.items), self.state
        self.timer.count_tokens("step", n_tokens)
        trains_actor = self.state.global_step >= self.components.maker.frozen_steps
        with self.timer.phase("training"):
            self._train(buffer, n_samples, metrics, kl_coef=kl.value if trains_actor else None)
        state.global_step += 1
        reduced = metrics.reduced(self.comm)
        spread = reduced.get("returns_std", 0.0) ** 2
        if spread > 0:  # 1 for a perfect critic, 0 for one that predicts only the mean
            reduced["explained_variance"] = 1 - reduced["value_error_std"] ** 2 / spread
        reduced["skipped_steps"] = float(self.skipped.total)
        state.consumed_samples += n_samples
        state.consumed_tokens += int(self.comm.all_reduce(torch.tensor(n_tokens)))
        reduced |= {
            name: float(vars(state)[name]) for name in ("consumed_samples", "consumed_tokens")
        }
        if "kl" in reduced:
            reduced["kl_coef"] = kl.value
            if trains_actor:  # before, the KL is 0 for any coefficient
                kl.update(reduced["kl"], n_samples)
        return reduced

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where ``components.state`` says; models have their state again."""
        self.skipped.load_state_dict(state)
        self._move_moments(to_host=True)
        self._documents = self._document_batches()

    def set_training(self, mode: bool) -> None:
        """Switch actor and critic between training and evaluation mode."""
        for model in self.models:
            model.train(mode)

    def _train(
        self, buffer: ReplayBuffer, n_samples: int, metrics: Metrics, kl_coef: float | None
    ) -> None:
        """All optimizer steps of critic and, if there is a ``kl_coef``, actor."""
        batch, step = self.config.batch, self.state.global_step
        self.set_training(True)
        self._move_moments(to_host=False)
        order = self.components.strategy.training()
        n_updates = batch.max_epochs * -(-n_samples // batch.train_batch_size)
        with (
            order,
            progress_bar(n_updates, "training", enabled=self.components.strategy.is_main) as bar,
        ):
            for number, mini_batch in enumerate(mini_batches(buffer, self.config, step)):
                for micro, places in zip(mini_batch.micro_batches, mini_batch.places, strict=True):
                    self.timer.count_tokens(
                        "training", int(micro.attention_mask.sum()) if places else 0
                    )
                self._step(mini_batch, metrics, kl_coef, number=number)
                bar.update()
        self._move_moments(to_host=True)
        self.set_training(False)

    def _step(self, batch: MiniBatch, metrics: Metrics, kl_coef: float | None, number: int) -> None:
        """The optimizer step of that ``number`` of critic and, if there is a ``kl_coef``, actor."""
        parts = self.components
        state = self.state
        samples = [micro.tensors() for micro in batch.micro_batches]
        place = f"global step {state.global_step + 1} optimizer step {number + 1}"
        if kl_coef is not None:
            documents, measured = next(self._documents) if parts.data.documents else None, Metrics()
            with timed("actor_training"):
                norm = self.actor_step.train(
                    batch, documents, measured, kl_coef=kl_coef, on_policy=number == 0
                )
            read = (
                [] if documents is None else [micro._asdict() for micro in documents.micro_batches]
            )
            if self.skipped.accept(norm, "actor", place, samples=samples, documents=read):
                metrics.merge(measured)
                if parts.ema is not None:
                    parts.ema.update()
            state.document_batches += documents is not None
        if parts.critic_step is not None:
            measured, clip = Metrics(), state.global_step >= self.config.ppo.value_pretrain_steps
            if self.skipped.accept(
                parts.critic_step.train(batch, measured, clip), "critic", place, samples=samples
            ):
                metrics.merge(measured)

    def _move_moments(self, to_host: bool) -> None:
        """With ``--offload_idle`` Adam's moments are on the host while nothing is trained."""
        for model in self.models if self.config.ppo.offload_idle else ():
            model.offload_adam_moments() if to_host else model.load_adam_moments()

    def _document_batches(self) -> Iterator[StepBatch]:
        """For each optimizer step as many documents as it has samples, in endless reshuffled passes."""
        parts = self.components
        size = self.config.batch.train_batch_size
        start = self.state.document_batches
        documents = parts.data.documents
        pad = pad_token_id(parts.tokenizer)
        pack_to = parts.pack_documents_to
        limit = MicroBatchSize(self.config.batch.micro_rows, self.config.ppo.micro_train_tokens)
        rows = limit.rows_of(
            pack_to or max((len(document.token_ids) for document in documents), default=1)
        )
        for indices in cyclic_batches(
            len(documents), size, self.config.deepspeed.seed, start=start
        ):
            yield token_batch(
                [documents[i] for i in indices], rows, pad, comm=self.comm, pack_to=pack_to
            )


def _write(batch: Mapping[str, list[dict[str, Any]]], file: Path) -> None:
    """Tensors by kind, number of the micro-batch and field; a file that cannot be written ends no run."""
    fields = (
        (f"{kind}/{i}", micro) for kind, micros in batch.items() for i, micro in enumerate(micros)
    )
    tensors = {
        f"{place}/{name}": value
        for place, micro in fields
        for name, value in micro.items()
        if value is not None
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(
            {n: torch.as_tensor(value).detach().cpu().contiguous() for n, value in tensors.items()},
            file,
        )
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be written (%s)", file, error)
