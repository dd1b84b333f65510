"""From the options of train_ppo and the shapes of its models to the estimate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from openppo.config import GenerationConfig, TrainPPOConfig
from openppo.experience.estimators import ESTIMATORS
from openppo.trainer.estimate.activations import Pass, generation_peaks, inference_peak, training_peak
from openppo.trainer.estimate.checkpoint import checkpoint_bytes
from openppo.trainer.estimate.communication import all_gather_bytes, forward_bytes, optimizer_step_bytes
from openppo.trainer.estimate.estimate import Estimate, Phase
from openppo.trainer.estimate.remedies import ppo_changes
from openppo.trainer.estimate.shapes import ModelShape
from openppo.trainer.estimate.states import (
    Setting,
    States,
    frozen_states,
    n_trained,
    step_moments,
    trained_states,
)
from openppo.trainer.one_pass_critic import OnePassCritic
from openppo.trainer.steps.sample_log import n_forwards
from openppo.trainer.update import rows_of_documents

_EXPERIENCE_BYTES = 8 + 2 + 8 * 4
"""For one token: id, two masks, and eight float32 fields of ``Experience``."""
_TRAJECTORY_BYTES = 100
"""For one token: its places in four Python lists, and an int and a float object."""
_DECODE_ROWS_ON_CPU, _DECODE_ROWS_ON_GPU = 64, 256
_SHARE_FOR_CACHE = 0.5
_SHARE_FOR_GATHERED_WEIGHTS = 0.5  # as in strategy/deepspeed.py


@dataclass(frozen=True)
class Lengths:
    """Tokens of the data. ``document`` is the longest row of the PTX loss, 0 without it."""

    shortest_prompt: int
    longest_prompt: int
    document: int = 0


@dataclass(frozen=True)
class PPORun:
    """All that the memory of a run depends on.

    ``shapes`` has "actor" and, where they exist, "critic", "reward model", "process reward model", and "reference" if
    it is another model than the actor at its start.
    """

    config: TrainPPOConfig
    shapes: dict[str, ModelShape]
    lengths: Lengths
    n_ranks: int = 1
    on_cpu: bool = False
    device_memory: int | None = None

    @property
    def setting(self) -> Setting:
        """How models are kept."""
        return Setting(self.config.deepspeed, self.n_ranks, self.on_cpu)

    @property
    def lora_ranks(self) -> dict[str, int]:
        """Of the trained models."""
        actor, critic = self.config.lora.lora_rank, self.config.model.critic_lora_rank
        return {"actor": actor} | ({"critic": actor if critic is None else critic} if "critic" in self.shapes else {})

    @property
    def has_reference(self) -> bool:
        """Whether a reference model is loaded beside the actor."""
        return self.config.kl.init_kl_coef > 0 and (self.config.lora.lora_rank == 0 or "reference" in self.shapes)

    @property
    def asks_greedy(self) -> bool:
        """Whether each prompt gets one response more, as ReMax wants."""
        return ESTIMATORS[self.config.advantage.advantage_estimator].needs_greedy

    @property
    def samples(self) -> int:
        """Responses of a global step on one rank."""
        ppo = self.config.ppo
        return -(-ppo.rollout_batch_size // self.n_ranks) * ppo.n_samples_per_prompt

    @property
    def share(self) -> int:
        """Samples of an optimizer step on one rank, at most."""
        return -(-self.config.batch.train_batch_size // self.n_ranks)

    @property
    def rows_to_train(self) -> int:
        """The longest samples in one micro-batch of training."""
        return self._rows(self.config.batch.micro_train_batch_size, self.config.ppo.micro_train_tokens, self.share)

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of an optimizer step on one rank."""
        return -(-self.share // self.rows_to_train)

    @property
    def rows_to_infer(self) -> int:
        """The longest samples in one pass that trains nothing."""
        return self._rows(self.config.ppo.micro_rollout_batch_size, self.config.ppo.micro_rollout_tokens, self.samples)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.lengths.longest_prompt + self.config.generation.generate_max_len

    @property
    def width(self) -> int:
        """Places of a row of so many tokens."""
        return self.setting.width(self.longest)

    def _rows(self, rows: int, tokens: int | None, most: int) -> int:
        return min(rows if tokens is None else max(1, tokens // self.longest), most)

    def states(self) -> dict[str, States]:
        """By role, in the order in which models are loaded."""
        setting, in_4bit = self.setting, self.config.lora.load_in_4bit
        others = [role for role in self.shapes if role not in (*self.lora_ranks, "reference")]
        made = {role: frozen_states(self.shapes[role], setting) for role in others}
        accumulates = self.micro_batches > 1 or self.lengths.document > 0
        for role in sorted(self.lora_ranks, reverse=True):  # the critic first
            rank = self.lora_ranks[role]
            made[role] = trained_states(self.shapes[role], setting, rank, in_4bit and rank > 0, accumulates)
        if self.has_reference:
            made["reference"] = frozen_states(self.shapes.get("reference", self.shapes["actor"]), setting)
        return made


def estimate_ppo(run: PPORun) -> Estimate:
    """Memory and communication of a train_ppo run."""
    states, host = run.states(), _host(run)
    lasting = sum(state.total for state in states.values()) + (sum(host.values()) if run.on_cpu else 0)
    awake = lasting - _resting(run, states)
    phases = [_loading(states), _generation(run, states, awake), _experience(run, states, awake)]
    n = {role: n_trained(run.shapes[role], rank) for role, rank in run.lora_ranks.items()}
    return Estimate(
        roles={role: state.device for role, state in states.items()},
        phases=[*phases, _training(run, states, lasting)],
        host=host,
        sent=_sent(run, awake),
        checkpoint=checkpoint_bytes(n["actor"], n.get("critic", 0), run.config.ppo.enable_ema),
        decode_rows=decode_rows(run, awake),
        n_ranks=run.n_ranks,
        device_memory=run.device_memory,
        changes=[
            (change, partial(estimate_ppo, dataclasses.replace(run, config=config)))
            for change, config in ppo_changes(run.config)
        ],
    )


def _host(run: PPORun) -> dict[str, int]:
    """Offloaded optimizers, the average, and experience: of all ranks, since optimizer steps mix them."""
    parts: dict[str, int] = {}
    for role, state in run.states().items():
        if state.host:
            parts[f"optimizer of the {role}"] = sum(state.host.values())
        elif run.config.ppo.offload_idle and "Adam moments" in state.device:
            parts[f"moments of the {role}, at rest"] = state.device["Adam moments"]
    if run.config.ppo.enable_ema:
        parts["average (EMA)"] = 4 * run.setting.share(n_trained(run.shapes["actor"], run.lora_ranks["actor"]))
    parts["experience"] = _TRAJECTORY_BYTES * run.samples * run.longest
    if run.config.ppo.buffer_cpu_offload:
        parts["experience"] += _buffer_bytes(run)
    return parts


def _resting(run: PPORun, states: dict[str, States]) -> int:
    """Bytes that leave the device while nothing is trained."""
    if not run.config.ppo.offload_idle or run.on_cpu:
        return 0
    return sum(state.device.get("Adam moments", 0) for state in states.values())


def _buffer_bytes(run: PPORun) -> int:
    """The replay buffer: a rank's own samples, and those of all ranks if there are others."""
    return _EXPERIENCE_BYTES * run.samples * run.longest * (1 + (run.n_ranks if run.n_ranks > 1 else 0))


def _loading(states: dict[str, States]) -> Phase:
    """One model after the other, before optimizers have moments."""
    loaded, peak = 0, 0
    for state in states.values():
        made = state.total - state.device.get("Adam moments", 0)
        peak = max(peak, loaded + made + state.loading)
        loaded += made
    return Phase("loading", loaded, {"a model on its way": peak - loaded})


def _generation(run: PPORun, states: dict[str, States], lasting: int) -> Phase:
    options, shape = run.config.generation, run.shapes["actor"]
    if options.rollout_engine == "vllm":  # its own weights and cache; without a known device the weights at least
        share = int(options.vllm_gpu_memory_utilization * (run.device_memory or 0))
        return Phase("generation", lasting, {"vLLM": max(share, run.setting.element * shape.n_parameters)})
    rows = min(decode_rows(run, lasting), run.samples)
    prompt, new = run.lengths.longest_prompt, options.generate_max_len
    warps = options.top_p < 1 or options.top_k is not None
    cache, beside = generation_peaks(shape, rows, prompt, new, run.setting.element, warps)
    passing = {"gathered weights": _gathered_to_generate(run), "key-value cache": cache, "sampling": beside}
    return Phase("generation", lasting, passing)


def most_decode_rows(options: GenerationConfig, on_cpu: bool) -> int:
    """``--max_num_seqs``, else its default where memory is not short."""
    if options.max_num_seqs is not None:
        return options.max_num_seqs
    return _DECODE_ROWS_ON_CPU if on_cpu else _DECODE_ROWS_ON_GPU


def decode_rows(run: PPORun, lasting: int) -> int:
    """Responses decoded at the same time: ``--max_num_seqs``, else what half of the memory beside ``lasting`` takes."""
    rows = most_decode_rows(run.config.generation, run.on_cpu)
    if run.config.generation.max_num_seqs is not None or run.device_memory is None:
        return rows
    shape, prompt = run.shapes["actor"], run.lengths.longest_prompt
    free = run.device_memory - lasting - _gathered_to_generate(run)
    of_one, _ = generation_peaks(shape, 1, prompt, run.config.generation.generate_max_len, run.setting.element, False)
    return max(1, min(rows, int(_SHARE_FOR_CACHE * free) // of_one))


def _gathered_to_generate(run: PPORun) -> int:
    actor = run.states()["actor"]
    return actor.gathered_to_infer if _in_lockstep(run) else actor.gathered_to_generate


def _in_lockstep(run: PPORun) -> bool:
    """Whether the whole weights are too large to gather once, as ``DeepspeedStrategy.fits_gathered`` decides."""
    if run.config.generation.rollout_engine == "vllm":
        return False
    states = run.states()
    lasting = sum(state.total for state in states.values()) - _resting(run, states)
    if run.on_cpu or run.device_memory is None:
        return False
    return states["actor"].gathered_to_generate > _SHARE_FOR_GATHERED_WEIGHTS * (run.device_memory - lasting)


def _experience(run: PPORun, states: dict[str, States], lasting: int) -> Phase:
    """The largest of all forward passes without gradients, beside the experience of all samples."""
    batch = Pass(run.rows_to_infer, run.width, run.longest - run.lengths.shortest_prompt, run.on_cpu)
    needs = [
        (inference_peak(shape, batch, run.setting.element), states[role].gathered_to_infer)
        for role, shape in run.shapes.items()
    ]
    activations, weights = max(needs, key=sum)
    experience = 2 * _EXPERIENCE_BYTES * run.samples * run.longest
    passing = {"gathered weights": weights, "activations and logits": activations, "experience": experience}
    return Phase("experience", lasting, passing)


def _training(run: PPORun, states: dict[str, States], lasting: int) -> Phase:
    """The largest moment of the actor's or the critic's optimizer step."""
    moments = [moment for role in run.lora_ranks for moment in _moments(run, role, states[role])]
    buffer = {} if run.config.ppo.buffer_cpu_offload else {"replay buffer": _buffer_bytes(run)}
    return Phase("training", lasting, max(moments, key=lambda moment: sum(moment.values())) | buffer)


def _moments(run: PPORun, role: str, state: States) -> list[dict[str, int]]:
    """Those of an optimizer step of one model."""
    checkpointing = run.config.deepspeed.gradient_checkpointing
    activations = max(
        training_peak(run.shapes[role], batch, run.setting.element, checkpointing, run.lora_ranks[role])
        for batch in _training_passes(run, role)
    )
    return step_moments(state, activations, run.on_cpu, f" ({role})")


def _training_passes(run: PPORun, role: str) -> list[Pass]:
    """Micro-batches of samples, and of documents for the actor's PTX loss."""
    scored = run.longest - (run.lengths.shortest_prompt if role == "actor" else 0)
    passes = [Pass(run.rows_to_train, run.width, scored, run.on_cpu)]
    if role == "actor" and run.lengths.document > 0:
        rows = min(rows_of_documents(run.config, run.lengths.document), run.share)
        passes.append(Pass(rows, run.lengths.document, run.lengths.document, run.on_cpu))
    return passes


def _sent(run: PPORun, lasting: int) -> dict[str, int]:
    """By phase, for one global step whose samples are logged token by token."""
    setting, ppo, batch = run.setting, run.config.ppo, run.config.batch
    actor = forward_bytes(run.shapes["actor"], setting, run.lora_ranks["actor"])
    generation = actor
    if _in_lockstep(run):  # weights are gathered for each token
        rows, greedy = decode_rows(run, lasting), run.samples // ppo.n_samples_per_prompt if run.asks_greedy else 0
        generation *= run.config.generation.generate_max_len * (-(-run.samples // rows) + -(-greedy // rows))
    ranks = run.lora_ranks
    forwards = {role: forward_bytes(shape, setting, ranks.get(role, 0)) for role, shape in run.shapes.items()}
    at_once = run.samples * run.n_ranks <= batch.train_batch_size
    critic_first = at_once and "critic" in forwards and OnePassCritic.is_exact(run.config)
    left_out = {"critic"} if critic_first else set()
    if run.config.old_log_probs_from(at_once) != "recompute":
        left_out.add("actor")
    experience = sum(n for role, n in forwards.items() if role not in left_out)
    if run.config.kl.init_kl_coef > 0 and "reference" not in forwards:  # it has the actor's shape
        experience += actor
    experience *= -(-run.samples // run.rows_to_infer)
    steps = batch.max_epochs * -(-run.samples * run.n_ranks // batch.train_batch_size)
    exchanged = _EXPERIENCE_BYTES * run.samples * run.n_ranks * run.longest * (2 if critic_first else 1)
    training = sum(optimizer_step_bytes(run.shapes[role], setting, run.micro_batches, ranks[role]) for role in ranks)
    return {
        "generation": generation,
        "experience": experience,
        "exchange of experience": all_gather_bytes(exchanged, run.n_ranks),
        "training": steps * training,
        "log of tokens": n_forwards(run.config) * actor,
    }
