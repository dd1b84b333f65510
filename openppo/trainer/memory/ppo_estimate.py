"""Estimated memory of a train_ppo run: what lasts, and the peak of each phase."""

from itertools import accumulate
from typing import NamedTuple

from openppo.config import TrainPPOConfig
from openppo.experience.forwards import forward_size
from openppo.models.batching import MicroBatchSize
from openppo.models.size import ModelSize
from openppo.rollout.decode_graphs import COLUMNS_TOGETHER
from openppo.rollout.hf_engine import ROWS_ON_CPU, ROWS_ON_GPU
from openppo.rollout.prefill import prefill_tokens
from openppo.rollout.row_cache import SLACK_COLUMNS, rows_that_fit
from openppo.trainer.memory.estimate import (
    Estimate,
    Machine,
    model_memory,
    pass_bytes,
    training_bytes,
)
from openppo.trainer.roles import critic_lora

_EXPERIENCE = 42  # bytes of a token in an Experience


class Lengths(NamedTuple):
    """Tokens of the data; ``document`` is the longest row of the PTX loss. ``patches`` are of one prompt's images."""

    shortest_prompt: int
    longest_prompt: int
    document: int = 0
    patches: int = 0


def estimate_ppo(
    config: TrainPPOConfig, lengths: Lengths, sizes: dict[str, ModelSize], machine: Machine
) -> Estimate:
    """Memory of a train_ppo run; ``sizes`` has its models by role in the order of loading."""
    return _PPOMemory(config, lengths, sizes, machine=machine).estimate()


class _PPOMemory:
    """Bytes of a train_ppo run on one rank: what lasts, and one method for each phase."""

    def __init__(
        self,
        config: TrainPPOConfig,
        lengths: Lengths,
        sizes: dict[str, ModelSize],
        machine: Machine,
    ) -> None:
        self.config, self.machine = config, machine
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

        self.samples = machine.share(config.prompts_per_step) * config.ppo.n_samples_per_prompt
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
        """Roles, phases, host and checkpoint together."""
        phases = {
            "loading": self._loading(),
            "generation": self._generation(),
            "experience": self._experience(),
            "training": self._training(),
        }
        checkpoint = 12 * sum(self.trained.values())
        if self.config.ppo.enable_ema:
            checkpoint += 4 * self.trained["actor"]
        roles = {role: model.lasting for role, model in self.models.items()}
        return Estimate(roles, phases, host=self.host, checkpoint=checkpoint, machine=self.machine)

    def _host(self) -> int:
        ppo = self.config.ppo
        host = sum(model.host for model in self.models.values())
        if ppo.offload_idle:
            host += sum(model.resting for model in self.models.values())
        if ppo.buffer_cpu_offload:
            host += self.buffer
        if ppo.enable_ema:
            host += 4 * self.machine.share(self.trained["actor"])
        return host

    def _loading(self) -> int:
        loaded = accumulate(model.lasting - model.moments for model in self.models.values())
        return max(
            total + model.loading for total, model in zip(loaded, self.models.values(), strict=True)
        )

    def _experience(self) -> int:
        machine = self.machine
        rows = min(self.samples, forward_size(self.config).rows_of(self.longest))
        forwards = [
            pass_bytes(
                size,
                machine,
                rows,
                length=self.longest,
                scored=self.scored,
                patches=self.lengths.patches,
            )
            + machine.live(self.models[role].gathered)
            for role, size in self.sizes.items()
        ]
        experience = 2 * _EXPERIENCE * self.samples * self.longest
        return machine.workspaces + self.resident + max(forwards) + experience

    def _training(self) -> int:
        machine = self.machine
        batch = self.config.batch
        ppo = self.config.ppo
        length = max(self.longest, self.lengths.document)
        micro_rows = MicroBatchSize(batch.micro_rows, ppo.micro_train_tokens).rows_of(length)
        steps = [
            training_bytes(
                self.sizes[role],
                self.models[role],
                self.loras[role],
                machine=machine,
                rows=min(machine.share(batch.train_batch_size), micro_rows),
                length=length,
                scored=max(self.scored, self.lengths.document),
                patches=self.lengths.patches,
            )
            for role in self.trained
        ]
        training = machine.workspaces + self.lasting + max(steps)
        return training if ppo.buffer_cpu_offload else training + self.buffer

    def _generation(self) -> int:
        in_use = self.machine.workspaces + self.resident
        if self.config.generation.rollout_engine == "vllm":
            return in_use + self._vllm()
        free = 2**62 if self.machine.on_cpu else max(0, self.machine.room - in_use)
        weights = self._sampled_weights(free)
        return in_use + weights + self._decoding(max(0, free - weights))

    def _vllm(self) -> int:
        options = self.config.generation
        copy = (
            self.machine.element
            * self.sizes["actor"].n_parameters
            // options.vllm_tensor_parallel_size
        )
        return max(int(options.vllm_gpu_memory_utilization * self.machine.memory), copy)

    def _sampled_weights(self, free: int) -> int:
        """Weights that sampling adds: gathered ones, and copies of those that adapters are merged into, if they fit."""
        lora, whole = self.config.lora, self.models["actor"].gathered
        if whole > free // 2:
            return self.machine.live(whole)  # ranks decode in lockstep
        is_merged = lora.lora_rank > 0 and not lora.load_in_4bit
        copies = self.machine.element * self.sizes["actor"].n_quantized if is_merged else 0
        return whole + copies if whole + copies <= free // 2 else whole

    def _decoding(self, free: int) -> int:
        """The cache of the decoded rows, with reading their prompts or sampling from their logits."""
        machine = self.machine
        options = self.config.generation
        actor = self.sizes["actor"]
        element = machine.element
        row = element * actor.cache * (self.longest + SLACK_COLUMNS)
        most = ROWS_ON_CPU if machine.on_cpu else ROWS_ON_GPU
        rows = min(self.samples, options.max_num_seqs or rows_that_fit(free, row, most))

        is_cut = options.top_p < 1 or options.top_k is not None
        sampling = rows * actor.vocabulary * (element + (32 if is_cut else 16))
        prompt = self.lengths.longest_prompt
        read_together = min(rows * prompt, max(prefill_tokens(machine.on_cpu), prompt))
        prompts = element * actor.width // 2 * read_together

        graphs = (
            0  # logits of each: for rows, half of them and so on, and for each width of the cache
        )
        if options.cuda_graphs != "off" and not machine.on_cpu:
            graphs = 2 * rows * actor.vocabulary * element * -(-self.longest // COLUMNS_TOGETHER)
        return rows * row + max(sampling, prompts) + graphs
