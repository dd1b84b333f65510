"""Shared parts of generate and evaluate: a model that answers prompts, and the rows of its answers."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

from openppo.build.checks.context import check_context
from openppo.build.checks.engine import check_like, check_sampling
from openppo.build.policy_inputs import policy_vision
from openppo.build.row_loading import once_per_host, tokenizing
from openppo.config import PromptsConfig
from openppo.datasets import load_mixed_rows, load_prompts, load_tasks, shard
from openppo.datasets.image_families import check_images
from openppo.datasets.media import RowVision
from openppo.models.pretrained import check_token_ids
from openppo.rewards.response_text import response_text
from openppo.rollout.decode_graphs import choose_recorder
from openppo.rollout.players import Players
from openppo.rollout.policy import FrozenPolicy
from openppo.rollout.sampling import decoder, sampling_params, text_before_stop
from openppo.sources.groups import GroupInput, GroupPlayer, play_together
from openppo.sources.held_out import held_out_group
from openppo.strategy.comm import InferenceStrategy
from openppo.strategy.weights import WholeWeights
from openppo.tracking import Metrics
from openppo.tracking.output_files import check_output_file, replacing
from openppo.types import Comm, Prompt, Sample


class PromptsJob:
    """Tokenizer, prompts and process group of a command; ``_load_policy`` adds model and engine."""

    def __init__(
        self, options: PromptsConfig, output_path: str | None, players: Players | None = None
    ) -> None:
        self.options = options
        self.output = None if output_path is None else check_output(options, output_path)
        self.strategy = InferenceStrategy(options.bf16, fused_kernels=options.fused_kernels)
        self.comm = self.strategy.comm
        self.policy = FrozenPolicy(options)
        self.tokenizer = self.policy.tokenizer
        if players is not None:
            players.check(self.tokenizer)
        self.prompts = once_per_host(self.comm, options, lambda: self._load_prompts(players))
        self._check_prompts()
        self.params = sampling_params(options)

    def _check_prompts(self) -> None:
        """Refuse prompts that the model cannot read."""
        config = self.policy.config
        model = f"--pretrain {self.options.pretrain}"
        rows = [prompt.token_ids for prompt in self.prompts]
        longest = max(map(len, rows))
        check_context(config, model, longest, new_tokens=self.options.generate_max_len)
        check_token_ids(config, model, self.tokenizer, rows=rows)

    def _load_prompts(self, players: Players | None) -> list[Prompt]:
        """Load the rows of ``--prompt_data`` as prompts, or as tasks for ``players``."""
        options = self.options
        if not options.prompt_data:
            return []
        rows = load_mixed_rows(
            options,
            options.prompt_data,
            flag="--prompt_data",
            split=options.prompt_split,
            seed=options.seed,
        )
        load_rows = load_prompts if players is None or players.needs_prompts else load_tasks
        return load_rows(rows, self.tokenizer, options, tokenizing(self.comm), self._vision())

    def _vision(self) -> RowVision:
        """Make the reader of the model's images."""
        return policy_vision(self.options, self.tokenizer, self.policy.config, options=self.options)

    def close(self) -> None:
        """Wait for all ranks."""
        self.strategy.close()

    def _load_policy(self) -> None:
        """Load the model of ``--pretrain`` on this rank's device, and an engine that samples from it."""
        options = self.options
        policy = self.policy
        device = self.strategy.device
        policy.load(
            self.strategy.prepare_frozen,
            options.micro_batch_size,
            new_recorder=choose_recorder(options.cuda_graphs, policy.config, device),
        )
        if any(prompt.media for prompt in self.prompts):
            check_images(policy.config, f"--pretrain {options.pretrain}")

        if options.engine_check == "on":
            kind = ("hf", not options.bf16)
            check_like(
                policy.engine,
                lambda engines: check_sampling(
                    options.pretrain,
                    policy.actor,
                    engines,
                    weights=None,
                    device=device,
                    kind=kind,
                ),
            )

    def _weights(self) -> AbstractContextManager[None]:
        """Inside, the engine may sample; afterwards its memory is free for other work."""
        return self.policy.engine.with_weights(WholeWeights(self.policy.actor.model))

    def _played(self, player: GroupPlayer, eval_seed: int = 0) -> list[Sample]:
        """Play this rank's share of the prompts; return its samples, those of one prompt beside each other."""
        groups: list[GroupInput] = []
        for number, prompt in enumerate(self.prompts):
            group = held_out_group(
                prompt,
                number,
                params=self.params,
                n_samples=self.options.n_samples_per_prompt,
                seed=self.options.seed,
                eval_seed=eval_seed,
            )
            groups.append(group)

        rank_groups = shard(groups, self.comm.rank, self.comm.world_size)
        with self._weights():
            played = play_together(player, rank_groups, self.comm, metrics=Metrics())
        return [sample for group in played for sample in group.members]

    def _row(self, sample: Sample, number: int) -> dict[str, Any]:
        """Make the line of this rank's sample ``number``; its text ends before a stop string."""
        ids = sample.last.response_ids
        text = response_text(sample, self.tokenizer)
        return {
            "source": sample.prompt.source,
            "row": sample.prompt.index,
            "sample": number % self.options.n_samples_per_prompt,
            "prompt": sample.prompt.text,
            "response": text_before_stop(text, ids, self.params, decode=decoder(self.tokenizer)),
            "finish_reason": sample.last.finish_reason.value,
            "n_tokens": len(ids),
            "label": sample.prompt.label,
        }


def check_output(options: PromptsConfig, path: str) -> Path:
    """Return the file of ``--output_path``; ``ValueError`` if it cannot be written, or must not be overwritten."""
    sources = [name for name in (options.prompt_data or "").split(",") if name]
    inputs = [("--prompt_data", name) for name in sources]
    inputs.append(("--pretrain", options.pretrain))
    return check_output_file(path, "--output_path", is_ours=_is_row, inputs=inputs)


def _is_row(beginning: bytes) -> bool:
    """True for the beginning of a file of ``write_rows``."""
    return beginning.startswith(b'{"source": ') and b', "prompt": ' in beginning


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], comm: Comm) -> None:
    """Write the rows of all ranks as lines of JSON, in rank order; ``path`` is never incomplete."""
    rows_of_ranks = comm.all_gather_object(rows)
    if comm.rank != 0:
        return
    with replacing(path) as new, new.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for row in chain.from_iterable(rows_of_ranks):
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
