"""--max_num_seqs holds for a model whose memory cannot be estimated."""

from pathlib import Path
from typing import Any

import pytest

from openppo.cli.options import parse_options
from openppo.config import TrainPPOConfig
from openppo.trainer import build_ppo_trainer


def uncounted(*_: Any) -> Any:
    raise ValueError("no such model")


@pytest.mark.parametrize(("given", "rows"), [([], 64), (["--max_num_seqs", "3"], 3)])
def test_max_num_seqs_holds_without_an_estimate(
    given: list[str], rows: int, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"input": "abc"}\n' * 4)
    (tmp_path / "reward.py").write_text("def reward_fn(responses):\n    return [0.0] * len(responses)\n")
    arguments = f"""--pretrain {models / "actor"} --prompt_data {tmp_path / "prompts.jsonl"} --generate_max_len 8
        --reward_fn {tmp_path / "reward.py"} --advantage_estimator reinforce --init_kl_coef 0
        --rollout_batch_size 4 --train_batch_size 4 --save_path {tmp_path / "out"}"""
    monkeypatch.setattr("openppo.trainer.memory.model_size", uncounted)
    trainer = build_ppo_trainer(parse_options(TrainPPOConfig, [*arguments.split(), *given]))
    assert trainer.components.estimate is None
    assert trainer.components.engine.max_batch_size == rows  # type: ignore[attr-defined]
    trainer.components.trackers.close()
