"""Options of the commands that do not train: generate, evaluate, serve_rm, merge_lora, export, report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from openppo.config.folders import refuse_overwriting
from openppo.config.rewards import RewardConfig
from openppo.config.roles import DataFormat, validate_data
from openppo.config.shared import require, validate_groups


@dataclass(frozen=True)
class PromptsConfig:
    """Which prompts a model answers, and how."""

    pretrain: str
    """Causal language model: a local folder (also a PEFT folder) or a hub name."""
    prompt_data: str
    """Prompts, in any format of train_ppo; several sources with commas."""
    prompt_split: str = "test"
    """Split of --prompt_data when it has splits."""
    data_format: DataFormat = "auto"
    """Shape of the rows; 'auto' recognizes it by the columns unless --input_key is given."""
    dataset_class: str | None = None
    """Your own loader of --prompt_data, path.py:name: a class or function called with the source that gives rows."""
    input_key: str | None = None
    """Column that holds the prompt (default: recognized)."""
    label_key: str | None = None
    """Column that is passed to the rewards as label (default: the answer of a recognized shape)."""
    input_template: str | None = None
    """Text around each prompt, with {} where the prompt goes."""
    apply_chat_template: bool = False
    """Render prompts with the tokenizer's chat template."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template, a JSON object: '{"enable_thinking": false}' (with --apply_chat_template)."""
    max_samples: int | None = None
    """Use only the first this many rows of each data set."""
    prompt_max_len: int = 1024
    """Prompts with more tokens are dropped, with a count in the log."""
    generate_max_len: int = 1024
    """Largest number of sampled tokens per response."""
    n_samples_per_prompt: int = 1
    """Responses to each prompt."""
    temperature: float = 0.0
    """Sampling temperature (0: the likeliest token)."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    top_k: int | None = None
    """Sample from the this many likeliest tokens."""
    micro_batch_size: int = 32
    """Samples that are decoded or scored together."""
    bf16: bool = False
    """Load models in bfloat16."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's SDPA."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings along, with all your rights; without it such are refused."""
    seed: int = 42
    """Seed of sampling."""
    engine_check: Literal["on", "off"] = "on"
    """Compare log-probs of a few sampled tokens with those of a plain forward, and refuse a model where they differ."""

    def validate(self) -> None:
        validate_data(self.input_template, self.max_samples, self.apply_chat_template, self.chat_template_kwargs)
        for name, value in (
            ("prompt_max_len", self.prompt_max_len),
            ("generate_max_len", self.generate_max_len),
            ("n_samples_per_prompt", self.n_samples_per_prompt),
            ("micro_batch_size", self.micro_batch_size),
        ):
            require(value >= 1, f"--{name} must be at least 1, got {value}.")
        require(self.temperature >= 0, f"--temperature must not be negative, got {self.temperature}.")
        require(0 < self.top_p <= 1, f"--top_p must lie in (0, 1], got {self.top_p}.")
        require(self.top_k is None or self.top_k >= 1, f"--top_k must be at least 1, got {self.top_k}.")
        require(self.seed >= 0, f"--seed must not be negative, got {self.seed}.")
        require(
            self.n_samples_per_prompt == 1 or self.temperature > 0,
            f"--n_samples_per_prompt {self.n_samples_per_prompt} with --temperature 0 would give the same response "
            "each time: raise --temperature.",
        )


@dataclass(frozen=True)
class OutputConfig:
    """Where answers go."""

    output_path: str
    """JSONL file that receives one line for each response."""

    def validate(self) -> None:
        require(self.output_path != "", "--output_path must not be empty.")


@dataclass(frozen=True)
class JudgementConfig:
    """How answers are judged."""

    pass_reward: float | None = None
    """A response passes when its reward is at least this (default: 1; with a reward model or server none, and pass@k is
    left out, since its scale is its own)."""
    value_head_prefix: str = "score"
    """Name of the scalar head of --reward_pretrain."""
    output_path: str | None = None
    """JSONL file that receives every response with its rewards (default: none is kept)."""

    def validate(self) -> None:
        """Nothing to check: any number and name may occur."""


@dataclass(frozen=True)
class ServerConfig:
    """A reward server."""

    reward_pretrain: str
    """Reward model: a sequence-classification checkpoint with one label, or a PEFT folder of one."""
    value_head_prefix: str = "score"
    """Name of the model's scalar head."""
    host: str = "127.0.0.1"
    """Address to listen on; any but loopback needs --token_file."""
    port: int = 5000
    """Port to listen on (0: a free one)."""
    token_file: str | None = None
    """File with a token that clients must send as 'Authorization: Bearer TOKEN'."""
    max_batch_size: int = 16
    """Texts of one forward pass, over all requests that wait."""
    max_len: int = 2048
    """Longer texts keep their last this many tokens."""
    max_request_mb: float = 64.0
    """Larger requests are refused."""
    normalize_reward: bool = False
    """Subtract the mean that the reward model stores and divide by its std."""
    bf16: bool = False
    """Load the model in bfloat16."""
    flash_attn: bool = False
    """Use FlashAttention-2 (must be installed) instead of PyTorch's SDPA."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings along, with all your rights; without it such are refused."""

    def validate(self) -> None:
        require(0 <= self.port < 65536, f"--port must lie in 0..65535, got {self.port}.")
        for name, value in (("max_batch_size", self.max_batch_size), ("max_len", self.max_len)):
            require(value >= 1, f"--{name} must be at least 1, got {value}.")
        require(self.max_request_mb > 0, f"--max_request_mb must be positive, got {self.max_request_mb}.")
        require(
            self.host in ("127.0.0.1", "::1", "localhost") or self.token_file is not None,
            f"--host {self.host} can be reached by others: give a --token_file.",
        )


@dataclass(frozen=True)
class MergeConfig:
    """A PEFT folder and where its full weights go."""

    lora_path: str
    """PEFT folder, as training with --lora_rank saves it."""
    save_path: str
    """Folder that receives the full model and its tokenizer."""
    pretrain: str | None = None
    """Base model (default: the one that the PEFT folder names)."""
    bf16: bool = False
    """Write the weights in bfloat16."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings along, with all your rights; without it such are refused."""

    def validate(self) -> None:
        require(self.save_path != "", "--save_path is empty: name the folder that receives the full model.")
        refuse_overwriting(
            {"--lora_path": self.lora_path, "--pretrain": self.pretrain}, {"--save_path": self.save_path}
        )


@dataclass(frozen=True)
class CheckpointModelConfig:
    """A checkpoint, and the model that is made of it."""

    checkpoint: str
    """A checkpoint of a training command, such as ckpt/checkpoints_ppo/step_00000010, or a folder of them (the newest
    is taken)."""
    folder: str
    """Folder that receives the model in Hugging Face format, and its tokenizer."""
    role: Literal["actor", "critic"] = "actor"
    """Which model of train_ppo; the other commands train one."""
    merge: bool = False
    """Write full weights where the run trained adapters (LoRA)."""
    bf16: bool = False
    """Write the weights in bfloat16."""
    pretrain: str | None = None
    """Where the --pretrain of the run is now (default: where it was)."""
    critic_pretrain: str | None = None
    """Where the model that the critic started from is now (default: where it was)."""
    trust_remote_code: bool = False
    """Run the Python code that a model or tokenizer brings along, with all your rights; without it such are refused."""

    def validate(self) -> None:
        require(self.folder != "", "FOLDER is empty: name the folder that receives the model.")
        inputs = {"--pretrain": self.pretrain, "--critic_pretrain": self.critic_pretrain}
        refuse_overwriting({"CHECKPOINT": self.checkpoint, **inputs}, {"FOLDER": self.folder})
        require(
            self.role == "critic" or self.critic_pretrain is None,
            "--critic_pretrain is about the critic: add --role critic, or leave it out.",
        )


@dataclass(frozen=True)
class ReportPageConfig:
    """Runs, and the page about them."""

    run_dirs: tuple[str, ...]
    """Folders of runs: what they had as --save_path, or its subfolder 'logs'. Several are laid over each other."""
    output: str | None = None
    """HTML file to write (default: logs/report.html of the run, ./report.html of several)."""

    def validate(self) -> None:
        require(len(self.run_dirs) > 0, "name the folder of a run: python -m openppo.cli.report RUN_DIR.")
        require(self.output != "", "--output must not be empty.")


@dataclass(frozen=True)
class GenerateConfig:
    """Options of openppo.cli.generate."""

    prompts: PromptsConfig
    output: OutputConfig

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option that cannot work."""
        validate_groups(self)


@dataclass(frozen=True)
class EvaluateConfig:
    """Options of openppo.cli.evaluate."""

    prompts: PromptsConfig
    rewards: RewardConfig = field(default_factory=RewardConfig)
    judgement: JudgementConfig = field(default_factory=JudgementConfig)

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option that cannot work."""
        self.rewards.require_source()
        validate_groups(self)


@dataclass(frozen=True)
class ServeRMConfig:
    """Options of openppo.cli.serve_rm."""

    server: ServerConfig

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option that cannot work."""
        validate_groups(self)


@dataclass(frozen=True)
class MergeLoRAConfig:
    """Options of openppo.cli.merge_lora."""

    merge: MergeConfig

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option that cannot work."""
        validate_groups(self)


@dataclass(frozen=True)
class ExportConfig:
    """Options of openppo.cli.export."""

    model: CheckpointModelConfig

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option that cannot work."""
        self.model.validate()
        require(world_size == 1, "export runs in one process: start it without torchrun.")


@dataclass(frozen=True)
class ReportConfig:
    """Options of openppo.cli.report."""

    page: ReportPageConfig

    def validate(self, world_size: int) -> None:
        """Raise ``ValueError`` for the first option that cannot work."""
        validate_groups(self)
