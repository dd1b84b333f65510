"""What a rank of ``--rollout_ranks`` runs: it samples with weights that trainers send, until they end."""

from dataclasses import dataclass

from openppo.orchestrator.worker import Worker
from openppo.rollout.engine import Engine
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.weights import WeightReceiver, WholeWeights
from openppo.tracking.phase import current, phase


@dataclass(eq=False)
class RolloutRank:
    """A job with ``fit`` and ``close``, as a trainer is one."""

    strategy: InferenceStrategy
    engine: Engine
    weights: WholeWeights
    receiver: WeightReceiver
    worker: Worker

    def fit(self) -> None:
        """Sample until the trainers end."""
        while True:
            current.step = self.engine.version + 1
            with phase("generation"), self.engine.with_weights(self.weights):
                pause = self.worker.drive()
            if pause.reason == "end":
                return
            with phase("sync"):
                self.receiver.receive()
            self.engine.version = pause.version

    def close(self) -> None:
        """End the agents, and leave the process group."""
        self.worker.player.sampler.close()
        self.strategy.close()
