"""All optimizer steps of a global step: actor and critic over the mini-batches of a replay buffer."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from openppo.config import RunConfig, TrainPPOConfig
from openppo.datasets import cyclic_batches
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer, mini_batches
from openppo.models.pretrained import pad_token_id
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import Metrics, progress_bar
from openppo.trainer.actor_step import ActorStep
from openppo.trainer.components import PPOComponents
from openppo.trainer.critic_step import CriticStep, CriticUpdate
from openppo.trainer.supervised.batches import StepBatch, token_batch
from openppo.types import Comm

logger = logging.getLogger("openppo")


class SkippedSteps:
    """Counts them, keeps their batches in ``<save_path>/skipped``, and ends the run when there are too many in a row.

    All ranks see the same norms, since a gradient that is not finite on one rank is not finite on any.
    """

    def __init__(self, run: RunConfig, comm: Comm) -> None:
        self.run = run
        self.comm = comm
        self.total = 0
        self.in_a_row: dict[str, int] = {}

    def accept(self, norm: float, role: str, place: str, batch: Mapping[str, Tensor]) -> bool:
        """Whether a step with the gradient norm ``norm`` was taken. If not, this rank's ``batch`` is written.

        ``place`` names the step in messages. ``FloatingPointError`` when the last ``--max_skipped_steps`` were not.
        """
        if math.isfinite(norm):
            self.in_a_row[role] = 0
            return True
        self.total += 1
        self.in_a_row[role] = self.in_a_row.get(role, 0) + 1
        name = f"{place.replace(' ', '_')}_{role}_rank{self.comm.rank}.safetensors"
        file = Path(self.run.save_path) / "skipped" / name
        _write(batch, file)
        what = f"a loss or the gradient of the {role} was not finite in {place}"
        if self.in_a_row[role] >= self.run.max_skipped_steps:
            raise FloatingPointError(
                f"{what}, and {self.in_a_row[role]} optimizer steps in a row were skipped (--max_skipped_steps). Lower "
                f"the learning rate, and look at the batches in {file.parent}. The weights are those before."
            )
        if self.comm.rank == 0:
            logger.warning("%s: this optimizer step is skipped on all ranks; its batch is in %s", what, file)
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
        self._frozen_actor_steps = config.ppo.frozen_actor_steps
        self.comm = components.strategy.comm
        device = components.strategy.device
        self.actor_step = ActorStep(components.actor, config, self.comm, device)
        self.critic_step: CriticUpdate | None = components.critic_update
        if self.critic_step is None and components.critic is not None:
            self.critic_step = CriticStep(components.critic, config, self.comm, device)
        self.skipped = SkippedSteps(config.run, self.comm)
        self._documents = self._document_batches()
        self.set_training(False)

    def __call__(self, buffer: ReplayBuffer, metrics: Metrics) -> dict[str, float]:
        """Train for ``--max_epochs``, and return the metrics of the whole step, the same on all ranks.

        ``FloatingPointError`` after ``--max_skipped_steps`` optimizer steps in a row that had to be skipped.
        """
        n_samples, kl = self.components.maker.count(buffer.items), self.components.maker.kl_controller
        with self.timer.phase("training"):
            self._train(buffer, n_samples, metrics, kl.value)
        n_tokens = sum(int(item.attention_mask.sum()) for item in buffer.items)
        self.timer.count_tokens("training", n_tokens * self.config.batch.max_epochs)
        self.state.global_step += 1
        reduced = _with_explained_variance(metrics.reduced(self.comm))
        reduced["skipped_steps"] = float(self.skipped.total)
        if "kl" in reduced:
            reduced["kl_coef"] = kl.value
            if self.state.global_step > self._frozen_actor_steps:  # before, the KL is 0 for any coefficient
                kl.update(reduced["kl"], n_samples)
        return reduced

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where ``components.state`` says; models have their state again."""
        self.skipped.load_state_dict(state)
        self._rest()
        self._documents = self._document_batches()

    def _train(self, buffer: ReplayBuffer, n_samples: int, metrics: Metrics, kl_coef: float) -> None:
        batch, step = self.config.batch, self.state.global_step
        self.set_training(True)
        for model in self._resting:
            model.load_adam_moments()
        n_updates = batch.max_epochs * -(-n_samples // batch.train_batch_size)
        with progress_bar(n_updates, "training", enabled=self.components.strategy.is_main) as bar:
            for number, mini_batch in enumerate(mini_batches(buffer, self.config, step)):
                place = f"global step {step + 1} optimizer step {number + 1}"
                if step >= self._frozen_actor_steps:
                    self._train_actor(mini_batch, metrics, kl_coef, on_policy=number == 0, place=place)
                if self.critic_step is not None:
                    self._train_critic(self.critic_step, mini_batch, metrics, place)
                bar.update()
        self._rest()
        self.set_training(False)

    def set_training(self, mode: bool) -> None:
        """Switch actor and critic between training and evaluation mode."""
        for model in (self.components.actor, self.components.critic):
            if model is not None:
                model.train(mode)

    def _train_actor(self, batch: MiniBatch, metrics: Metrics, kl_coef: float, on_policy: bool, place: str) -> None:
        documents = next(self._documents) if self.components.documents else None
        accepted = self._guarded(
            "actor",
            lambda measured: self.actor_step.train(batch, documents, measured, kl_coef, on_policy),
            _tensors(batch) | _document_tensors(documents),
            metrics,
            place,
        )
        self.state.document_batches += documents is not None
        self.state.policy_version += 1
        if accepted and self.components.ema is not None:
            self.components.ema.update()

    def _train_critic(self, critic: CriticUpdate, batch: MiniBatch, metrics: Metrics, place: str) -> None:
        clip = self.state.global_step >= self.config.ppo.value_pretrain_steps
        self._guarded("critic", lambda measured: critic.train(batch, measured, clip), _tensors(batch), metrics, place)

    def _guarded(
        self,
        role: str,
        train: Callable[[Metrics], float],
        tensors: dict[str, Tensor],
        metrics: Metrics,
        place: str,
    ) -> bool:
        """Whether weights changed. If not, ``tensors`` are written to a file and nothing is added to ``metrics``."""
        measured = Metrics()
        accepted = self.skipped.accept(train(measured), role, place, tensors)
        if accepted:
            metrics.merge(measured)
        return accepted

    def _rest(self) -> None:
        for model in self._resting:
            model.offload_adam_moments()

    @property
    def _resting(self) -> list[TrainableModel]:
        """Models whose moments are on the host while nothing is trained."""
        models = self.components.actor, self.components.critic
        return [model for model in models if model is not None] if self.config.ppo.offload_idle else []

    def _document_batches(self) -> Iterator[StepBatch]:
        """For each optimizer step as many documents as it has samples, in endless reshuffled passes."""
        documents, batch, start = self.components.documents, self.config.batch, self.state.document_batches
        pad, pack_to = pad_token_id(self.components.tokenizer), self.components.pack_documents_to
        length = pack_to or max((len(document.token_ids) for document in documents), default=1)
        rows = rows_of_documents(self.config, length)
        for indices in cyclic_batches(len(documents), batch.train_batch_size, self.config.deepspeed.seed, start):
            chosen = [documents[i] for i in indices]
            yield token_batch(chosen, rows, pad, self.comm, pack_to)


def rows_of_documents(config: TrainPPOConfig, length: int) -> int:
    """Documents of one forward and backward pass, in rows of at most ``length`` tokens."""
    tokens = config.ppo.micro_train_tokens
    return config.batch.micro_train_batch_size if tokens is None else max(1, tokens // length)


def _with_explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that predicts only the mean."""
    spread = metrics.get("returns_std", 0.0) ** 2
    if spread > 0:
        metrics["explained_variance"] = 1 - metrics["value_error_std"] ** 2 / spread
    return metrics


def _tensors(batch: MiniBatch) -> dict[str, Tensor]:
    """This rank's micro-batches, by number and field."""
    micro_batches = enumerate(batch.micro_batches)
    return {f"{i}/{name}": tensor for i, micro in micro_batches for name, tensor in micro.tensors().items()}


def _document_tensors(documents: StepBatch | None) -> dict[str, Tensor]:
    """This rank's micro-batches of --pretrain_data, by number and field."""
    micro_batches = enumerate(documents.micro_batches) if documents is not None else ()
    fields = {f"documents/{i}/{name}": value for i, micro in micro_batches for name, value in micro._asdict().items()}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def _write(batch: Mapping[str, Tensor], file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in batch.items()}, file)
    except (OSError, SafetensorError) as error:
        logger.warning("%s cannot be written (%s)", file, error)
