"""Sizes of the passes of an update."""

from openppo.config import TrainPPOConfig, from_options
from openppo.trainer.update import rows_of_documents


def test_documents_keep_to_the_bound_on_tokens_or_else_on_rows() -> None:
    places = {"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py", "micro_train_batch_size": 3}
    bounds = (None, 1024, 1000, 5)
    configs = [from_options(TrainPPOConfig, micro_train_tokens=tokens, **places) for tokens in bounds]
    assert [rows_of_documents(config, 512) for config in configs] == [3, 2, 1, 1]
