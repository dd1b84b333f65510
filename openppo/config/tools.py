"""Options of the commands that do not train: generate, evaluate, serve_*, merge_lora, export, report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from openppo.config.agents import AgentConfig, ConversationConfig
from openppo.config.data import PromptDataConfig, parse_template_kwargs
from openppo.config.fields import (
    Options,
    at_least,
    inside,
    not_empty,
    not_negative,
    option,
    positive,
    require,
)
from openppo.config.models import ModelConfig, refuse_overwriting
from openppo.config.rewards import ENVIRONMENT_REWARDS, NO_REWARD, NONE, RewardConfig
from openppo.config.rollout import ResponseConfig, SamplingConfig


@dataclass(frozen=True)
class PromptsConfig(SamplingConfig, PromptDataConfig, ModelConfig):
    """Prompts, the model that responds to them, and its sampling."""

    pretrain: str
    """Causal language model: a local folder (also a PEFT folder) or a hub name."""
    prompt_split: str = "test"
    """Split of --prompt_data when it has splits."""
    n_samples_per_prompt: int = option(1, at_least(1))
    """Responses to each prompt."""
    temperature: float = option(0.0, not_negative)
    """Sampling temperature (0: the likeliest token)."""
    micro_batch_size: int = option(32, at_least(1))
    """Samples that are decoded or scored together."""
    bf16: bool = False
    """Load models in bfloat16."""
    fused_kernels: Literal["auto", "off"] = "auto"
    """Norms, rotary embeddings and gated MLPs in one kernel each (auto: on GPUs, with liger-kernel installed)."""
    seed: int = option(42, not_negative)
    """Seed of sampling."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        n = self.n_samples_per_prompt
        if n > 1 and self.temperature == 0:
            yield f"--n_samples_per_prompt {n} with --temperature 0 gives one response {n} times: raise --temperature."


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(PromptsConfig):
    """Options of openppo.cli.generate."""

    output_path: str = option(bound=not_empty)
    """JSONL file that receives one line for each response."""


@dataclass(frozen=True)
class EvaluateConfig(PromptsConfig):
    """Options of openppo.cli.evaluate."""

    prompt_data: str = option("", place=True)
    """Prompts, in any format of train_ppo; several sources with commas. An --environment may do without."""
    pass_reward: float | None = None
    """Reward from which a response passes (default: 1; with a reward model or server none, so pass@k is left out)."""
    pass_on: str | None = option(None, not_empty)
    """Named reward that alone decides whether a response passes, before its weight (default: the sum of all)."""
    value_head_prefix: str = "score"
    """Name of the scalar head of --reward_pretrain."""
    output_path: str | None = None
    """JSONL file that receives every response with its rewards (default: none is kept)."""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    agents: AgentConfig = field(default_factory=AgentConfig)

    def problems(self) -> Iterator[str]:
        yield from super().problems()

        if self.prompt_data == "" and self.agents.environment is None:
            yield "No prompts are given: pass --prompt_data FILE."
        elif self.prompt_data == "" and self.agents.eval_n_envs == 0:
            yield "--environment without --prompt_data has no rows to count: give --eval_n_envs."
        if self.agents.form is not None:
            yield from self.unread_by_agents()
        if self.agents.n_envs is not None:
            yield "--n_envs counts the seeds of a training step: give --eval_n_envs instead."

        if self.rewards.are_none:
            yield f"--reward_fn {NONE} leaves nothing to evaluate: use openppo.cli.generate, which only samples."
        if self.agents.environment is not None and self.rewards.names():
            yield ENVIRONMENT_REWARDS
        if not (self.rewards.names() or self.agents.may_give_rewards):
            yield self.agents.why_no_reward + NO_REWARD
        if not self.agents.may_give_rewards:
            yield from self.rewards.unknown_weights()
            yield from self.rewards.unknown_names("--pass_on", self.pass_on)
        yield from self.rewards.pass_problems(self.pass_reward, self.pass_on)


@dataclass(frozen=True)
class ServeRMConfig(Options):
    """Options of openppo.cli.serve_rm."""

    reward_pretrain: str
    """Reward model: a sequence-classification checkpoint with one label, or a PEFT folder of one."""
    value_head_prefix: str = "score"
    """Name of the model's scalar head."""
    host: str = "127.0.0.1"
    """Address to listen on; any but loopback needs --token_file."""
    port: int = option(5000, inside("[0, 65535]"))
    """Port to listen on (0: a free one)."""
    token_file: str | None = None
    """File with a token that clients must send as 'Authorization: Bearer TOKEN'."""
    max_batch_size: int = option(16, at_least(1))
    """Texts of one forward pass, over all requests that wait."""
    max_len: int = option(2048, at_least(1))
    """Largest number of tokens of a text; of a longer text the last ones are kept."""
    max_request_mb: float = option(64.0, positive)
    """Larger requests are refused."""
    normalize_reward: bool = False
    """Subtract the mean that the reward model stores and divide by its std."""
    bf16: bool = False
    """Load the model in bfloat16."""
    fused_kernels: Literal["auto", "off"] = "auto"
    """Norms, rotary embeddings and gated MLPs in one kernel each (auto: on GPUs, with liger-kernel installed)."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's attention."""
    trust_remote_code: bool = False
    """Run Python code from the model or tokenizer repository, with your permissions; else such models are refused."""

    def problems(self) -> Iterator[str]:
        if self.host not in ("127.0.0.1", "::1", "localhost") and self.token_file is None:
            yield f"--host {self.host} can be reached by others: give a --token_file."


@dataclass(frozen=True, kw_only=True)
class ServeAgentConfig(ConversationConfig, ResponseConfig, ModelConfig):
    """Options of openppo.cli.serve_agent."""

    pretrain: str = option(place=True)
    """Causal language model with a chat template: a local folder (also a PEFT folder) or a hub name."""
    port: int = option(8000, inside("[0, 65535]"))
    """Port to listen on, on 127.0.0.1 (0: a free one)."""
    episode_max_len: int | None = option(None, at_least(1))
    """Tokens of one episode, prompt and all turns (default: the model's context)."""
    chat_template: str | None = option(None, place=True)
    """Jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template, a JSON object: '{"enable_thinking": false}'."""
    bf16: bool = False
    """Load the model in bfloat16."""
    fused_kernels: Literal["auto", "off"] = "auto"
    """Norms, rotary embeddings and gated MLPs in one kernel each (auto: on GPUs, with liger-kernel installed)."""
    seed: int = option(42, not_negative)
    """Seed of sampling."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        parse_template_kwargs(self.chat_template_kwargs)

    def validate(self, world_size: int = 1) -> None:
        super().validate()
        require(world_size == 1, "serve_agent runs in one process: start it without torchrun.")


@dataclass(frozen=True)
class MergeLoRAConfig(Options):
    """Options of openppo.cli.merge_lora."""

    lora_path: str
    """PEFT folder, as training with --lora_rank saves it."""
    save_path: str = option(bound=not_empty, note=": name the folder that receives the full model")
    """Folder that receives the full model and its tokenizer."""
    pretrain: str | None = None
    """Base model (default: the one that the PEFT folder names)."""
    bf16: bool = False
    """Write the weights in bfloat16."""
    trust_remote_code: bool = False
    """Run Python code from the model or tokenizer repository, with your permissions; else such models are refused."""

    def validate(self, world_size: int = 1) -> None:
        super().validate()
        inputs = {"--lora_path": self.lora_path, "--pretrain": self.pretrain}
        refuse_overwriting(inputs, {"--save_path": self.save_path})


@dataclass(frozen=True)
class ExportConfig(Options):
    """Options of openppo.cli.export."""

    checkpoint: str
    """Checkpoint of a training command, such as ckpt/checkpoints_ppo/step_00000010, or a folder of them: the newest."""
    folder: str
    """Folder that receives the model in Hugging Face format, and its tokenizer."""
    role: Literal["actor", "critic"] = "actor"
    """Model of train_ppo to export; the other commands train a single one."""
    merge: bool = False
    """Write full weights where the run trained adapters (LoRA)."""
    bf16: bool = False
    """Write the weights in bfloat16."""
    pretrain: str | None = None
    """Present place of the run's --pretrain, if it has moved (default: where it was)."""
    critic_pretrain: str | None = None
    """Present place of the model that the critic started from, if it has moved (default: where it was)."""
    trust_remote_code: bool = False
    """Run Python code from the model or tokenizer repository, with your permissions; else such models are refused."""

    def validate(self, world_size: int = 1) -> None:
        super().validate()
        require(self.folder, "FOLDER is empty: name the folder that receives the model.")
        inputs = {"--pretrain": self.pretrain, "--critic_pretrain": self.critic_pretrain}
        refuse_overwriting({"CHECKPOINT": self.checkpoint, **inputs}, {"FOLDER": self.folder})
        if self.role != "critic" and self.critic_pretrain is not None:
            raise ValueError(
                "--critic_pretrain has an effect with --role critic only: add --role critic."
            )
        require(world_size == 1, "export runs in one process: start it without torchrun.")


@dataclass(frozen=True)
class ReportConfig(Options):
    """Options of openppo.cli.report."""

    run_dirs: tuple[str, ...]
    """Folders of runs: their --save_path, or its subfolder 'logs'. Several runs are laid over each other."""
    output: str | None = option(None, not_empty)
    """HTML file to write (default: logs/report.html of the run, ./report.html of several)."""

    def problems(self) -> Iterator[str]:
        if not self.run_dirs:
            yield "name the folder of a run: python -m openppo.cli.report RUN_DIR."
