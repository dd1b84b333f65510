"""Estimated memory of a train_ppo run: what lasts, and the peak of each phase."""

from itertools import accumulate
from typing import NamedTuple

from openppo.build.memory.estimate import (
    Estimate,
    Machine,
    model_memory,
    pass_bytes,
    training_bytes,
)
from openppo.build.roles import critic_lora
from openppo.config import TrainPPOConfig
from openppo.config.resolved import Resolved
from openppo.experience.forwards import forward_size
from openppo.models.batching import MicroBatchSize
from openppo.models.size import ModelSize
from openppo.rollout.decode_graphs import COLUMNS_TOGETHER
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
    memory = _PPOMemory(config, resolved, lengths, sizes=sizes, machine=machine)
    return memory.estimate()


class _PPOMemory:
    """Bytes of a train_ppo run on one rank: what lasts, and one method for each phase."""

    def __init__(
        self,
        config: TrainPPOConfig,
        resolved: Resolved,
        lengths: Lengths,
        sizes: dict[str, ModelSize],
        machine: Machine,
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.machine = machine
        self.lengths = lengths
        self.sizes = sizes
        self.loras = {"critic": critic_lora(config), "actor": config.lora}
        self.models = {
            role: model_memory(size, machine, self.loras.get(role)) for role, size in sizes.items()
        }
        self.trained = {
            role: sizes[role].n_trained(lora.lora_rank)
            for role, lora in self.loras.items()
            if role in sizes
        }

        self.samples = machine.per_rank(config.prompts_per_step) * config.ppo.n_samples_per_prompt
        self.longest = lengths.longest_prompt + config.generation.generate_max_len
        self.scored = self.longest - lengths.shortest_prompt
        n_copies = 1 + machine.n_ranks if machine.n_ranks > 1 else 1
        self.buffer = _EXPERIENCE * self.samples * self.longest * n_copies

        self.host = self._host()
        self.lasting = sum(model.lasting for model in self.models.values())
        if machine.on_cpu:
            self.lasting += self.host
        self.resident = self.lasting
        if config.ppo.offload_idle and not machine.on_cpu:
            self.resident -= sum(model.moments for model in self.models.values())

    def estimate(self) -> Estimate:
        """Return the bytes of roles, phases, host and checkpoint."""
        phases = {
            "loading": self._loading(),
            "generation": self._generation(),
            "experience": self._experience(),
            "training": self._training(),
        }
        checkpoint = 12 * sum(self.trained.values())
        if self.config.ppo.ema_beta is not None:
            checkpoint += 4 * self.trained["actor"]
        roles = {role: model.lasting for role, model in self.models.items()}
        return Estimate(roles, phases, host=self.host, checkpoint=checkpoint, machine=self.machine)

    def _host(self) -> int:
        """Host memory: offloaded states, the replay buffer and the average."""
        ppo = self.config.ppo
        host = self.buffer + sum(model.host for model in self.models.values())
        if ppo.offload_idle:
            host += sum(model.resting for model in self.models.values())
        if ppo.ema_beta is not None:
            host += 4 * self.machine.per_rank(self.trained["actor"])
        return host

    def _loading(self) -> int:
        """Models load one after the other, each with its own extra."""
        models = self.models.values()
        loaded = accumulate(model.lasting - model.moments for model in models)
        peaks = [total + model.loading for total, model in zip(loaded, models, strict=True)]
        return max(peaks)

    def _experience(self) -> int:
        """The largest forward, with two copies of the experience."""
        forward = max(self._forward(role) for role in self.sizes)
        experience = 2 * _EXPERIENCE * self.samples * self.longest
        return self.machine.workspaces + self.resident + forward + experience

    def _forward(self, role: str) -> int:
        """A forward of the model of ``role`` over a micro-batch of experience."""
        rows = min(self.samples, forward_size(self.config, self.resolved).rows_of(self.longest))
        activations = pass_bytes(
            self.sizes[role],
            self.machine,
            rows,
            length=self.longest,
            scored=self.scored,
            patches=self.lengths.patches,
        )
        return activations + self.machine.live(self.models[role].gathered)

    def _training(self) -> int:
        """The largest optimizer step."""
        step = max(self._step(role) for role in self.trained)
        return self.machine.workspaces + self.lasting + step

    def _step(self, role: str) -> int:
        """An optimizer step of the model of ``role``."""
        batch = self.config.batch
        length = max(self.longest, self.lengths.document)
        limit = MicroBatchSize(batch.micro_rows, self.resolved.micro_train_tokens)
        samples = self.machine.per_rank(batch.train_batch_size)
        return training_bytes(
            self.sizes[role],
            self.models[role],
            self.loras[role],
            machine=self.machine,
            rows=min(samples, limit.rows_of(length)),
            length=length,
            scored=max(self.scored, self.lengths.document),
            patches=self.lengths.patches,
        )

    def _generation(self) -> int:
        """Sampling by the engine, with its weights and its cache."""
        in_use = self.machine.workspaces + self.resident
        if self.config.generation.rollout_engine == "vllm":
            return in_use + self._vllm()
        free = 2**62 if self.machine.on_cpu else max(0, self.machine.room - in_use)
        weights = self._sampled_weights(free)
        return in_use + weights + self._decoding(max(0, free - weights))

    def _vllm(self) -> int:
        """Memory that vLLM reserves, or its copy of the weights if that is larger."""
        options = self.config.generation
        weights = self.machine.element * self.sizes["actor"].n_parameters
        copy = weights // options.vllm_tensor_parallel_size
        reserved = int(options.vllm_gpu_memory_utilization * self.machine.memory)
        return max(reserved, copy)

    def _sampled_weights(self, free: int) -> int:
        """Weights that sampling adds: gathered ones, and with LoRA merged copies if they fit ``free``."""
        lora = self.config.lora
        gathered = self.models["actor"].gathered
        if gathered > free // 2:
            return self.machine.live(gathered)  # ranks decode in lockstep

        is_merged = lora.lora_rank > 0 and not lora.load_in_4bit
        merged = self.machine.element * self.sizes["actor"].n_quantized if is_merged else 0
        return gathered + merged if gathered + merged <= free // 2 else gathered

    def _decoding(self, free: int) -> int:
        """The cache of the decoded rows, with reading their prompts or sampling from their logits."""
        machine = self.machine
        options = self.config.generation
        actor = self.sizes["actor"]
        element = machine.element

        row = element * actor.cache * (self.longest + SLACK_COLUMNS)
        max_rows = ROWS_ON_CPU if machine.on_cpu else ROWS_ON_GPU
        rows = min(self.samples, options.max_num_seqs or rows_that_fit(free, row, max_rows))

        is_cut = options.top_p < 1 or options.top_k is not None
        sampling = rows * actor.vocabulary * (element + (32 if is_cut else 16))
        prompt = self.lengths.longest_prompt
        read_together = min(rows * prompt, max(prefill_tokens(machine.on_cpu), prompt))
        prefill = element * actor.width // 2 * read_together
        return rows * row + max(sampling, prefill) + self._graphs(rows)

    def _graphs(self, rows: int) -> int:
        """Logits of recorded decode steps: for ``rows``, half of them, ..., by width of the cache."""
        if self.config.generation.cuda_graphs == "off" or self.machine.on_cpu:
            return 0
        logits = 2 * rows * self.sizes["actor"].vocabulary * self.machine.element
        n_widths = -(-self.longest // COLUMNS_TOGETHER)
        return logits * n_widths
