"""Agents on two real ranks whose weights are partitioned and never gathered, so that they decode in lockstep.

Launched by torchrun with a folder, this file plays a global step's episodes and writes what each rank did to
``RANK.json``.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from openppo.agents import AgentPlayer
from openppo.build.ppo import build_ppo_trainer
from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.rollout.driver import LONGEST_WAIT
from openppo.strategy import DeepspeedStrategy
from tests.conftest import save_tokenizer
from tests.distributed.conftest import write_rows
from tests.distributed.run_cases import HANG_AFTER, PARTITION_EVERYTHING, leave

TEMPLATE = """{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>{% endfor %}
{%- if add_generation_prompt %}a{% endif %}"""
TURNS = 3
SECONDS_OF_TOOLS = 0.25, 0.005  # of rank 0, 50 times as slow, and rank 1
OPTIONS = """--zero_stage 3 --rollout_batch_size 4 --train_batch_size 8 --micro_train_batch_size 2 --generate_max_len 8
    --n_samples_per_prompt 2 --advantage_estimator rloo"""


async def solve(task: Any, session: Any) -> float:
    """Ask, call a tool, ask again."""
    messages = list(task.messages)
    for i in range(TURNS):
        turn = await session.chat(messages)
        await asyncio.sleep(SECONDS_OF_TOOLS[int(os.environ["RANK"])])
        messages += [turn.message, {"role": "user", "content": "abcdefgh"[i:]}]
    return float(len(turn.text))


def main(folder: Path) -> None:
    """Play the episodes of one step, then train on them."""
    arguments = [
        *OPTIONS.split(),
        "--pretrain",
        str(folder / "actor"),
        "--prompt_data",
        str(folder / "prompts.jsonl"),
    ]
    config = parse_options(
        TrainPPOConfig, [*arguments, "--save_path", str(folder / "model"), "--agent", "in Python"]
    )
    strategy = DeepspeedStrategy(config.deepspeed, HANG_AFTER, PARTITION_EVERYTHING)
    with mock.patch.object(DeepspeedStrategy, "fits_gathered", return_value=False):
        trainer = build_ppo_trainer(config, strategy, source=AgentPlayer(solve, config.agents))
    any_rank, model, driver = (
        strategy.any_rank,
        trainer.components.actor.module.model,
        trainer.source.sampler.player.driver,
    )
    counts = {"agreements": 0, "forwards": 0}

    def agree(flag: bool) -> bool:
        counts["agreements"] += 1
        return any_rank(flag)

    def count(*_: Any) -> None:
        counts["forwards"] += 1

    driver.any_rank = agree
    hook = model.register_forward_pre_hook(count)
    began = time.monotonic()
    samples = trainer.rollout(trainer.components.data.prompts[:4])
    seconds = time.monotonic() - began
    hook.remove()
    engine = trainer.components.engine
    reuse = engine.reused_tokens / engine.read_tokens
    spans = [[len(segment.spans) for segment in sample.segments] for sample in samples]
    metrics = trainer.train_on(samples)
    found = {
        "steps": driver.steps,
        "seconds": seconds,
        "reuse": reuse,
        "spans": spans,
        "metrics": metrics,
    }
    (folder / f"{strategy.comm.rank}.json").write_text(json.dumps(found | counts))
    leave()


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, launch: Callable[..., str]
) -> list[dict[str, Any]]:
    """What each rank did."""
    folder = tmp_path_factory.mktemp("lockstep")
    torch.manual_seed(7)
    tokenizer = save_tokenizer(
        folder / "actor", "abcdefghijklmnopqrstuvwxyz", chat_template=TEMPLATE
    )
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    sizes |= {"vocab_size": len(tokenizer), "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder / "actor")
    write_rows(folder / "prompts.jsonl", [{"input": "abcdefgh"[: 1 + i]} for i in range(4)])
    launch(2, __file__, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_ranks_with_slow_and_quick_tools_take_equally_many_steps(ranks):
    assert ranks[0]["steps"] == ranks[1]["steps"] >= TURNS
    assert [rank["forwards"] for rank in ranks] == [rank["steps"] for rank in ranks], (
        "one forward in each"
    )


def test_all_episodes_are_played_to_the_end_and_trained_on(ranks):
    assert [rank["spans"] for rank in ranks] == [[[TURNS]] * 4] * 2
    assert ranks[0]["metrics"]["agent/completed"] == 1
    assert ranks[0]["metrics"]["agent/bridged_turns"] == TURNS - 1


def test_turns_resume_in_lockstep_and_their_log_probs_are_those_of_the_actor(ranks):
    """Of the last turn's tokens most were read before; of the first's none."""
    assert all(0.3 < rank["reuse"] < 1 for rank in ranks)
    assert ranks[0]["metrics"]["rollout_ratio_max"] == pytest.approx(1, abs=1e-4)


def test_ranks_that_wait_for_tools_agree_now_and_then(ranks):
    """Twice after at most ``LONGEST_WAIT``, or after a request or the end of the work wakes a rank up."""
    waits = [rank["agreements"] - rank["steps"] for rank in ranks]
    n_requests = 8 * TURNS
    assert waits[0] == waits[1] <= 2 * (ranks[0]["seconds"] / LONGEST_WAIT + n_requests + 2)
    assert waits[0] >= 2 * TURNS, "rank 0's tools take longer than rank 1's episodes"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
