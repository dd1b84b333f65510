"""Bytes that a model takes in a forward, a backward pass and an optimizer step (arXiv 2205.05198)."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from openppo.build.memory.machine import Machine, Terms
from openppo.build.memory.states import ModelMemory, model_memory
from openppo.config import LoRAConfig
from openppo.models.log_probs import CHUNK_ELEMENTS, CHUNK_ELEMENTS_ON_CPU, logits_at_once
from openppo.models.size import ModelSize


class Batch(NamedTuple):
    """Shape of a micro-batch."""

    rows: int
    length: int
    scored: int
    """Tokens of a row that have logits."""
    patches: int = 0
    """Image patches of a row."""


@dataclass(frozen=True)
class Model:
    """A model of a run on one rank. With ``lora`` it is trained, in full if the rank is 0."""

    size: ModelSize
    machine: Machine
    lora: LoRAConfig | None = None

    @cached_property
    def memory(self) -> ModelMemory:
        """Bytes of weights, gradients and optimizer."""
        return model_memory(self.size, self.machine, self.lora)

    @property
    def n_trained(self) -> int:
        """Number of trained parameters."""
        return 0 if self.lora is None else self.size.n_trained(self.lora.lora_rank)

    def forward(self, batch: Batch) -> Terms:
        """Terms of a pass without gradients: hidden states, and logits or half of a layer if that is larger."""
        logits = self._logits(batch)
        inside = max(self._layer(batch), self._tower_layer(batch)) // 2
        return Terms(
            {
                "activations": 2 * self._hidden(batch) + max(0, inside - logits),
                "logits": logits,
                "gathered weights": self.memory.live,
            }
        )

    def backward(self, batch: Batch) -> Terms:
        """Terms of a pass with gradients: activations of all layers or checkpoints and one layer, and logits."""
        size = self.size
        kept_layers = size.layers
        checkpoints = 0
        if self.machine.options.gradient_checkpointing:
            kept_layers = 1
            checkpoints = size.layers * self._hidden(batch)

        tower = self._tower_layer(batch) // 2
        if size.n_frozen < size.tower:
            tower = min(kept_layers, size.patch_layers) * self._tower_layer(batch)

        layers = kept_layers * self._layer(batch) + tower
        return Terms(
            activations=2 * self._hidden(batch) + checkpoints + layers,
            logits=self._logits(batch, gradient=True),
        )

    def step(self, batch: Batch) -> Terms:
        """Terms of a backward pass or an optimizer step, the larger of them, above what lasts."""
        update = Terms({"copies of gradients": self.memory.copies})
        larger = max(self.backward(batch), update, key=Terms.total)
        return larger + Terms(
            {"gradients": self.memory.gradients, "gathered weights": self.memory.live}
        )

    def _hidden(self, batch: Batch) -> int:
        """Bytes between two layers."""
        return self.machine.element * self.size.hidden * batch.rows * batch.length

    def _layer(self, batch: Batch) -> int:
        """Bytes that a backward pass keeps of one layer."""
        return self.machine.element * self.size.width * batch.rows * batch.length

    def _tower_layer(self, batch: Batch) -> int:
        """Bytes that a backward pass keeps of one layer of the vision tower."""
        return self.machine.element * self.size.patch_width * batch.rows * batch.patches

    def _logits(self, batch: Batch, gradient: bool = False) -> int:
        """Bytes of the logits that exist at a time, with two chunks in float32."""
        on_cpu = self.machine.on_cpu
        n_logits = batch.rows * batch.scored * self.size.vocabulary
        if not self.size.whole_logits:
            n_logits = min(n_logits, logits_at_once(on_cpu))
        # GPUs compute logits in float32
        logit = self.machine.element if on_cpu or self.size.whole_logits else 4
        if gradient:
            logit += self.machine.element
        chunk = CHUNK_ELEMENTS_ON_CPU if on_cpu else CHUNK_ELEMENTS
        return logit * n_logits + 8 * min(n_logits, chunk)
