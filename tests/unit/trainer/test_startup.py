"""What ranks, perhaps of several hosts, must have in common; ranks are threads here."""

import datetime
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DogeConfig, Llama4TextConfig, LlamaConfig, MptConfig, PreTrainedConfig

from openppo.config import TrainPPOConfig, from_options
from openppo.datasets import TokenExample
from openppo.models.actor import Actor
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.comm import check_same
from openppo.trainer.data import load_ppo_data
from openppo.trainer.startup import check_context, check_options
from openppo.types import SamplingParams, SingleProcess
from tests.architectures import tiny_config

HOST = socket.gethostname()


class Threads:
    """The ``Comm`` of one of several threads."""

    def __init__(self, rank: int, shared: list[Any], barrier: Barrier) -> None:
        self.rank, self.world_size = rank, len(shared)
        self.shared, self.barrier = shared, barrier

    def all_gather_object(self, value: Any) -> list[Any]:
        self.shared[self.rank] = value
        self.barrier.wait()
        values = list(self.shared)
        self.barrier.wait()  # before anyone writes again
        return values


def run(n_ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """What ``work(comm)`` returns on each rank, or the message of its ``ValueError``."""
    shared: list[Any] = [None] * n_ranks
    barrier = Barrier(n_ranks, timeout=60)

    def one(rank: int) -> Any:
        try:
            return work(Threads(rank, shared, barrier))
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(one, range(n_ranks)))


def config(**options: Any) -> TrainPPOConfig:
    """Options that are valid on four ranks."""
    return from_options(TrainPPOConfig, **{"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py"} | options)


def test_an_option_that_differs_is_named_with_the_ranks_that_have_it_so() -> None:
    messages = run(4, lambda comm: check_options(config(seed=7 if comm.rank > 1 else 42), comm))
    assert messages == [f"--seed is 42 on rank 0 and 7 on rank 2 ({HOST}), rank 3 ({HOST}): start all ranks alike."] * 4


def test_all_options_that_differ_are_named() -> None:
    (message, _) = run(2, lambda comm: check_options(config(gamma=0.5 + comm.rank / 4, bf16=comm.rank == 1), comm))
    assert f"--gamma is 0.5 on rank 0 and 0.75 on rank 1 ({HOST}); --bf16 is False on rank 0 and True on" in message


def test_places_may_differ_but_not_whether_they_are_given() -> None:
    elsewhere = run(2, lambda comm: check_options(config(pretrain=f"{comm.rank}/m", save_path=f"{comm.rank}"), comm))
    assert elsewhere == [None, None]
    (message, _) = run(2, lambda comm: check_options(config(eval_data=[None, "e"][comm.rank]), comm))
    assert message == f"--eval_data is not given on rank 0 and given on rank 1 ({HOST}): start all ranks alike."


def test_versions_that_differ_are_named() -> None:
    class OlderTorch(Threads):
        """A rank of another environment."""

        def all_gather_object(self, value: Any) -> list[Any]:
            return super().all_gather_object(value | {"torch": "1.0"} if isinstance(value, dict) else value)

    def work(comm: Threads) -> None:
        check_options(config(), OlderTorch(comm.rank, comm.shared, comm.barrier) if comm.rank == 1 else comm)

    (message, _) = run(2, work)
    assert message == f"torch is {torch.__version__} on rank 0 and 1.0 on rank 1 ({HOST}): start all ranks alike."


def test_options_that_cannot_work_are_an_error_on_all_ranks() -> None:
    messages = run(3, lambda comm: check_options(config(), comm))
    assert messages == ["--train_batch_size 128 does not divide among 3 ranks: use a multiple of 3."] * 3


@pytest.mark.parametrize("content", [[([1, 2], "a")], "def f(): ...", [TokenExample([1], [False])]])
def test_the_same_content_is_the_same(content: Any) -> None:
    assert run(3, lambda comm: check_same(comm, {"--prompt_data": content})) == [None] * 3


def test_other_content_is_an_error_that_names_flag_and_ranks() -> None:
    (message, *others) = run(3, lambda comm: check_same(comm, {"--a": "x", "--b": [comm.rank == 2]}))
    assert message == f"--b holds something else on rank 2 ({HOST}) than on rank 0: copy the same file to all hosts."
    assert others == [message] * 2


def test_labels_that_json_does_not_know_are_compared_by_their_type() -> None:
    def check(comm: Any) -> None:
        check_same(comm, {"--prompt_data": [([1, 2], object()), ([3], datetime.datetime.now())]})

    assert run(2, check) == [None] * 2


def test_examples_are_compared_by_what_they_hold() -> None:
    def check(comm: Any) -> None:
        check_same(comm, {"--dataset": [TokenExample([1, 2, 3 + comm.rank], [False, True, True])]})

    assert all("--dataset holds something else" in message for message in run(2, check))


@pytest.mark.parametrize(
    ("rope", "fits"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, False),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}, False),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, True),
        ({"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 64}}, False),
        ({"rope_type": "default"}, True),
    ],
)
def test_positions_that_turn_short_rows_otherwise_beside_long_ones_end_at_the_original_context(
    rope: dict[str, Any], fits: bool
) -> None:
    config: Any = SimpleNamespace(max_position_embeddings=256, rope_parameters=rope, get_text_config=lambda: config)
    check_context(config, "--pretrain model", 40, 24)
    if fits:
        check_context(config, "--pretrain model", 100, 156)
        return
    with pytest.raises(ValueError, match="exceeds the context of 64 tokens of --pretrain model.*depend on what else"):
        check_context(config, "--pretrain model", 40, 25)


@pytest.mark.parametrize(
    ("config", "most", "reason"),
    [
        (Llama4TextConfig(), 8191, "temperatures.*depend on what else is in a batch"),
        (DogeConfig(keep_window_size=512), 512, "dynamic masks make log-probs depend on what else is in a batch"),
        (MptConfig(max_seq_len=512), 512, ""),
    ],
)
def test_rows_end_where_their_neighbours_would_matter(config: PreTrainedConfig, most: int, reason: str) -> None:
    check_context(config, "--pretrain model", most - 100, 100)
    with pytest.raises(ValueError, match=f"context of {most} tokens of --pretrain model.*generate_max_len.*{reason}"):
        check_context(config, "--pretrain model", most - 100, 101)


@pytest.mark.parametrize("beyond", [0, 12])
@pytest.mark.parametrize(("name", "limit"), [("llama4_text", "floor_scale"), ("doge", "keep_window_size")])
def test_up_to_there_a_row_is_sampled_as_alone(name: str, limit: str, beyond: int) -> None:
    torch.manual_seed(1)
    layers = {"num_hidden_layers": 4} if name == "llama4_text" else {}  # of which every fourth has temperatures
    model = AutoModelForCausalLM.from_config(tiny_config(name, **{limit: 16 - beyond}, **layers)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # Doge's own are 0, and then all tokens count alike
    prompts = [[3, 4, 5], [9, 12, 2, 6, 11, 13, 8, 1, 4, 30]]
    sampled = HFEngine(model, (), 0, 2).generate(prompts, SamplingParams(6), [1, 2])
    row = torch.tensor([prompts[0] + sampled[0].token_ids])
    alone = Actor(model)(row, torch.ones_like(row).bool())[0, 3:]
    assert torch.allclose(alone, torch.tensor(sampled[0].log_probs), atol=1e-4) == (beyond == 0)


def test_a_loader_of_the_users_own_reads_documents_too(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    (tmp_path / "mine.py").write_text("def rows(source):\n    return [{'text': source}] * 3\n")
    loader = f"{tmp_path}/mine.py:rows"
    config = from_options(TrainPPOConfig, pretrain="m", reward_fn="f.py", pretrain_data="ab", dataset_class=loader)
    data = load_ppo_data(config, make_tokenizer(), LlamaConfig(vocab_size=40), SingleProcess(), prompts=False)
    assert [document.token_ids for document in data.documents] == [[4, 5, 1]] * 3
