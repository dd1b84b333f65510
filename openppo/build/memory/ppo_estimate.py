"""Estimated memory of a train_ppo run: each phase is a sum of named terms."""

from typing import NamedTuple

from openppo.build.memory.estimate import Estimate, loading_terms
from openppo.build.memory.machine import Machine, Terms
from openppo.build.memory.passes import Batch, Model
from openppo.build.roles import critic_lora
from openppo.config import TrainPPOConfig
from openppo.config.resolved import Resolved
from openppo.experience.forwards import forward_size
from openppo.models.batching import MicroBatchSize
from openppo.models.size import ModelSize
from openppo.rollout.hf_engine import ROWS_ON_CPU, ROWS_ON_GPU
from openppo.rollout.prefill import prefill_tokens
from openppo.rollout.row_cache import SLACK_COLUMNS, rows_that_fit

_EXPERIENCE = 42
"""Bytes of a token in an ``Experience``."""


class Lengths(NamedTuple):
    """Token counts of the data."""

    shortest_prompt: int
    longest_prompt: int
    document: int = 0
    """Longest row of the PTX loss."""
    patches: int = 0
    """Image patches of one prompt, at most."""


def estimate_ppo(
    config: TrainPPOConfig,
    resolved: Resolved,
    lengths: Lengths,
    sizes: dict[str, ModelSize],
    machine: Machine,
) -> Estimate:
    """Estimate a train_ppo run; ``sizes`` has its models by role in the order of loading."""
    loras = {"critic": critic_lora(config), "actor": config.lora}
    models = {role: Model(size, machine, loras.get(role)) for role, size in sizes.items()}
    run = _PPOMemory(config, resolved, lengths, models=models, machine=machine)

    checkpoint = 12 * sum(model.n_trained for model in models.values())
    if config.ppo.ema_beta is not None:
        checkpoint += 4 * models["actor"].n_trained
    return Estimate(
        roles={role: model.memory.lasting for role, model in models.items()},
        terms={
            "loading": loading_terms(models.values()),
            "generation": run.generation(),
            "experience": run.experience(),
            "training": run.training(),
        },
        host=run.host().total(),
        checkpoint=checkpoint,
        machine=machine,
    )


class _PPOMemory:
    """Bytes of a train_ppo run on one rank, with one method for each phase."""

    def __init__(
        self,
        config: TrainPPOConfig,
        resolved: Resolved,
        lengths: Lengths,
        models: dict[str, Model],
        machine: Machine,
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.lengths = lengths
        self.machine = machine
        self.models = models
        self.actor = models["actor"]

        self.samples = machine.per_rank(config.prompts_per_step) * config.ppo.n_samples_per_prompt
        self.longest = lengths.longest_prompt + config.generation.generate_max_len
        self.scored = self.longest - lengths.shortest_prompt
        self.experience_bytes = _EXPERIENCE * self.samples * self.longest
        # With several ranks each holds its own samples and all of them.
        n_copies = 1 + machine.n_ranks if machine.n_ranks > 1 else 1
        self.buffer = n_copies * self.experience_bytes

    def host(self) -> Terms:
        """Host memory: offloaded states, the replay buffer and the average."""
        ppo = self.config.ppo
        memories = [model.memory for model in self.models.values()]
        terms = Terms({"offloaded optimizer": sum(memory.host for memory in memories)})
        if ppo.offload_idle:
            terms["offloaded optimizer"] += sum(memory.resting for memory in memories)
        terms["experience"] = self.buffer
        if ppo.ema_beta is not None:
            terms["average"] = 4 * self.machine.per_rank(self.actor.n_trained)
        return terms

    def models_in_training(self) -> Terms:
        """All models with their optimizers, and the workspaces of libraries; on a CPU also the host's memory."""
        terms = Terms(workspaces=self.machine.workspaces)
        for model in self.models.values():
            terms += model.memory.terms
        return terms + self.host() if self.machine.on_cpu else terms

    def models_at_rest(self) -> Terms:
        """The same outside training, without the moments that ``--offload_idle`` takes off a GPU."""
        terms = self.models_in_training()
        if self.config.ppo.offload_idle and not self.machine.on_cpu:
            terms["optimizer"] -= sum(model.memory.moments for model in self.models.values())
        return terms

    def generation(self) -> Terms:
        """Models at rest, the engine's weights and cache, and the larger of prompts' activations and logits."""
        at_rest = self.models_at_rest()
        options = self.config.generation
        if options.rollout_engine == "vllm":
            return at_rest + Terms({"vLLM": self._vllm()})

        free = max(0, self.machine.room - at_rest.total())
        if self.machine.on_cpu:
            free = 2**62
        weights = self._engine_weights(free)
        rows = self._decoded_rows(max(0, free - weights))
        logits = self._sampled_logits(rows)
        prefill = self._prefill(rows)
        return at_rest + Terms(
            {
                "engine's weights": weights,
                "cache": rows * self._cache_row(),
                "logits": logits,
                "activations": max(0, prefill - logits),
            }
        )

    def experience(self) -> Terms:
        """Models at rest, the largest forward over a micro-batch, and two copies of the experience."""
        limit = forward_size(self.config, self.resolved)
        rows = min(self.samples, limit.rows_of(self.longest))
        batch = Batch(rows, self.longest, self.scored, patches=self.lengths.patches)
        forwards = [model.forward(batch) for model in self.models.values()]
        largest = max(forwards, key=Terms.total)
        return self.models_at_rest() + largest + Terms(experience=2 * self.experience_bytes)

    def training(self) -> Terms:
        """Models with their optimizers, and the largest optimizer step."""
        length = max(self.longest, self.lengths.document)
        limit = MicroBatchSize(self.config.batch.micro_rows, self.resolved.micro_train_tokens)
        samples = self.machine.per_rank(self.config.batch.train_batch_size)
        rows = min(samples, limit.rows_of(length))
        scored = max(self.scored, self.lengths.document)
        batch = Batch(rows, length, scored, patches=self.lengths.patches)

        steps = [model.step(batch) for model in self.models.values() if model.lora is not None]
        largest = max(steps, key=Terms.total)
        return self.models_in_training() + largest

    def _vllm(self) -> int:
        """Memory that vLLM reserves, or its copy of the weights if that is larger."""
        options = self.config.generation
        weights = self.machine.element * self.actor.size.n_parameters
        reserved = int(options.vllm_gpu_memory_utilization * self.machine.memory)
        return max(reserved, weights // options.vllm_tensor_parallel_size)

    def _engine_weights(self, free: int) -> int:
        """Gathered weights, and with LoRA merged copies, where they take at most half of ``free``."""
        lora = self.config.lora
        gathered = self.actor.memory.gathered
        if gathered > free // 2:
            return self.actor.memory.live  # ranks decode in lockstep

        is_merged = lora.lora_rank > 0 and not lora.load_in_4bit
        merged = self.machine.element * self.actor.size.n_quantized if is_merged else 0
        return gathered + merged if gathered + merged <= free // 2 else gathered

    def _cache_row(self) -> int:
        """Keys and values of one row."""
        columns = self.longest + SLACK_COLUMNS
        return self.machine.element * self.actor.size.cache * columns

    def _decoded_rows(self, free: int) -> int:
        """Number of rows that are decoded together."""
        most = ROWS_ON_CPU if self.machine.on_cpu else ROWS_ON_GPU
        limit = self.config.generation.max_num_seqs or rows_that_fit(free, self._cache_row(), most)
        return min(self.samples, limit)

    def _prefill(self, rows: int) -> int:
        """Activations while the prompts of ``rows`` are read."""
        prompt = self.lengths.longest_prompt
        tokens = min(rows * prompt, max(prefill_tokens(self.machine.on_cpu), prompt))
        return self.machine.element * self.actor.size.width // 2 * tokens

    def _sampled_logits(self, rows: int) -> int:
        """Logits of a decode step, with four copies in float32."""
        return rows * self.actor.size.vocabulary * (self.machine.element + 16)
