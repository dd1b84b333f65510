"""All optimizer steps of a global step: actor and critic over the mini-batches of a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from openppo.config import TrainPPOConfig
from openppo.datasets import cyclic_batches
from openppo.experience.replay_buffer import MiniBatch, ReplayBuffer
from openppo.models.pretrained import pad_token_id
from openppo.strategy.checkpoint.random_state import get_random_state, set_random_state
from openppo.strategy.trainable_model import TrainableModel
from openppo.tracking import progress_bar
from openppo.trainer.batches import TokenBatch, token_batch
from openppo.trainer.components import PPOComponents, StepInProgress, TrainState
from openppo.trainer.skipped import SkippedSteps
from openppo.trainer.steps.actor_step import ActorStep
from openppo.trainer.steps.critic_step import Complete, CriticStep
from openppo.types import Interrupted


class UpdateStep:
    """Trains actor and critic on a replay buffer; can be left between micro-batches and taken up again.

    ``position`` is the run's, which it moves on. All ranks call every method together.
    """

    def __init__(self, config: TrainPPOConfig, parts: PPOComponents, position: TrainState) -> None:
        self.config = config
        self.components = parts
        self.position = position
        self.comm = parts.strategy.comm
        device = parts.strategy.device
        self.actor_step = ActorStep(parts.actor, config, self.comm, device, parts.stop)
        self.critic_step = None
        if parts.critic is not None:
            self.critic_step = CriticStep(parts.critic, config, self.comm, device, parts.stop)
        self.skipped = SkippedSteps(config.run, self.comm)
        self._documents = self._document_batches()
        self._next_documents: TokenBatch | None = None

    @property
    def trains_actor(self) -> bool:
        """Whether the actor is trained in this global step, or frozen still."""
        return self.position.global_step >= frozen_actor_steps(self.config)

    @property
    def pretrains_values(self) -> bool:
        """Whether only the critic learns, on Monte-Carlo returns."""
        return self.position.global_step < self.config.ppo.value_pretrain_steps

    def train(self, buffer: ReplayBuffer, step: StepInProgress, kl_coef: float) -> None:
        """The mini-batches of ``step`` that are not done yet. Raises ``Interrupted`` on all ranks alike.

        ``FloatingPointError`` after ``--max_skipped_steps`` steps in a row that had to be skipped.
        """
        self._wake()
        batch, done = self.config.batch, step.optimizer_steps
        n_left = batch.max_epochs * -(-step.n_samples // batch.train_batch_size) - done
        with progress_bar(n_left, "training", enabled=self.components.strategy.is_main) as bar:
            for mini_batch in self._mini_batches(buffer, done):
                if self.trains_actor and not step.actor_done:
                    self._train_actor(mini_batch, step, kl_coef)
                    step.actor_done = True
                if self.critic_step is not None and not step.critic_done:
                    self._train_critic(mini_batch, step)
                step.optimizer_steps += 1
                step.actor_done = step.critic_done = False
                bar.update()
        for engine in self._resting:
            engine.offload_moments()

    def train_critic_first(self, buffer: ReplayBuffer, step: StepInProgress, complete: Complete) -> None:
        """Train the critic on the first mini-batch, which is all of ``buffer``, and get its values from that forward.

        They are those of the weights that experience is made with, so that no other forward is needed: ``complete``
        makes returns of them, and ``buffer`` has both afterwards. ``step`` is not in progress before this is done.
        Errors as of ``train``.
        """
        self._wake()
        batches = [next(self._mini_batches(buffer))]
        for mini_batch in progress_bar(batches, "critic", enabled=self.components.strategy.is_main):
            self._train_critic(mini_batch, step, complete)
            buffer.take_back(mini_batch, ("values", "advantages", "returns"))
        step.critic_done = True

    def _wake(self) -> None:
        self.components.train()
        for engine in self._resting:
            engine.load_moments()

    def _mini_batches(self, buffer: ReplayBuffer, done: int = 0) -> Iterator[MiniBatch]:
        batch, seed = self.config.batch, self.config.deepspeed.seed + self.position.global_step
        micro, tokens = batch.micro_train_batch_size, self.config.ppo.micro_train_tokens
        return buffer.mini_batches(batch.train_batch_size, micro, batch.max_epochs, seed, done, tokens)

    def go_on_from(self, position: TrainState) -> None:
        """Continue where ``position`` says, which replaces the old one; engines have their state again."""
        self.position = position
        for engine in self._resting:
            engine.offload_moments()
        self._documents, self._next_documents = self._document_batches(), None

    @property
    def _resting(self) -> list[TrainableModel]:
        """Those whose moments are on the host while nothing is trained."""
        engines = self.components.actor, self.components.critic
        return [engine for engine in engines if engine is not None] if self.config.ppo.offload_idle else []

    def _train_actor(self, batch: MiniBatch, step: StepInProgress, kl_coef: float) -> None:
        if self.components.documents and self._next_documents is None:
            self._next_documents = next(self._documents)
        documents = self._next_documents
        trained = self._whole_or_nothing(
            "actor",
            lambda: self.actor_step.train(batch, documents, step.metrics, kl_coef, step.optimizer_steps == 0),
            lambda: _tensors(batch) | _document_tensors(documents),
            step,
        )
        self._next_documents = None
        self.position.document_batches += bool(self.components.documents)
        self.position.policy_version += 1
        self.components.engine.version = self.position.policy_version
        if trained and self.components.ema is not None:
            self.components.ema.update()

    def _train_critic(self, batch: MiniBatch, step: StepInProgress, complete: Complete | None = None) -> None:
        assert self.critic_step is not None
        critic, clip = self.critic_step, not self.pretrains_values
        self._whole_or_nothing(
            "critic", lambda: critic.train(batch, step.metrics, clip, complete), lambda: _tensors(batch), step
        )

    def _whole_or_nothing(
        self, role: str, train: Callable[[], float], tensors: Callable[[], dict[str, Tensor]], step: StepInProgress
    ) -> bool:
        """Whether weights changed. If not, ``tensors`` are written to a file and metrics are as before.

        After an interruption random numbers are as before too.
        """
        mark, random_state = step.metrics.mark(), get_random_state()
        try:
            norm = train()
        except Interrupted:
            step.metrics.rewind(mark)
            set_random_state(random_state)
            raise
        place = f"global step {self.position.global_step + 1} optimizer step {step.optimizer_steps + 1}"
        accepted = self.skipped.accept(norm, role, place, tensors())
        if not accepted:
            step.metrics.rewind(mark)
        return accepted

    def _document_batches(self) -> Iterator[TokenBatch]:
        """For each optimizer step as many documents as it has samples, in endless reshuffled passes."""
        documents, batch, start = self.components.documents, self.config.batch, self.position.document_batches
        pad, pack_to = pad_token_id(self.components.tokenizer), self.components.pack_documents_to
        length = pack_to or max((len(document.token_ids) for document in documents), default=1)
        rows = rows_of_documents(self.config, length)
        for indices in cyclic_batches(len(documents), batch.train_batch_size, self.config.deepspeed.seed, start):
            chosen = [documents[i] for i in indices]
            yield token_batch(chosen, rows, pad, self.comm, pack_to)


def rows_of_documents(config: TrainPPOConfig, length: int) -> int:
    """Of one forward and backward pass over documents in rows of at most ``length`` tokens."""
    tokens = config.ppo.micro_train_tokens
    return config.batch.micro_train_batch_size if tokens is None else max(1, tokens // length)


def frozen_actor_steps(config: TrainPPOConfig) -> int:
    """Global steps at the start in which the actor stays as it is."""
    return max(config.ppo.freezing_actor_steps, config.ppo.value_pretrain_steps, 0)


def _tensors(batch: MiniBatch) -> dict[str, Tensor]:
    """This rank's micro-batches, by number and field."""
    micro_batches = enumerate(batch.micro_batches)
    return {f"{i}/{name}": tensor for i, micro in micro_batches for name, tensor in micro.tensors().items()}


def _document_tensors(documents: TokenBatch | None) -> dict[str, Tensor]:
    """This rank's micro-batches of --pretrain_data, by number and field."""
    micro_batches = enumerate(documents.micro_batches) if documents is not None else ()
    fields = {f"documents/{i}/{name}": value for i, micro in micro_batches for name, value in micro._asdict().items()}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}
