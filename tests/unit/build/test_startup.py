"""What ranks, perhaps of several hosts, must have in common; and which sequences a model can read."""

import datetime
import socket
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DogeConfig, Llama4TextConfig, LlamaConfig, MptConfig

from openppo.build.checks.context import check_context
from openppo.build.checks.images import check_run_with_images
from openppo.build.checks.options import check_options
from openppo.build.ppo import build_ppo_trainer
from openppo.build.rows import load_only_documents
from openppo.config import TrainPPOConfig, from_options
from openppo.datasets import TokenExample
from openppo.media import TokenIds
from openppo.models.actor import Actor
from openppo.rollout.hf_engine import HFEngine
from openppo.strategy.comm import check_same
from openppo.types import ModelInputs, SamplingParams, SingleProcess
from tests.architectures import tiny_config
from tests.pinned import pinned_transformers
from tests.ranks import on_ranks

HOST = socket.gethostname()


def config(**options):
    """Options that are valid on four ranks."""
    return from_options(
        TrainPPOConfig, **{"pretrain": "m", "prompt_data": "d", "reward_fn": "f.py"} | options
    )


@pytest.mark.parametrize(
    ("n_ranks", "options", "message"),
    [
        (4, lambda rank: {"seed": 7 if rank > 1 else 42}, "42 on rank 0 and 7 on rank 2 (HOST), rank 3 (HOST): start"),
        (2, lambda rank: {"gamma": 0.5 + rank / 4, "bf16": rank == 1}, "True on rank 1 (HOST); --gamma is 0.5 on"),
        (2, lambda rank: {"eval_data": [None, "e"][rank]}, "--eval_data is not given on rank 0 and given on rank 1"),
        (3, lambda rank: {}, "--train_batch_size 128 does not divide among 3 ranks: use a multiple of 3."),
        (2, lambda rank: {"pretrain": f"{rank}/m", "save_path": f"{rank}"}, "None"),  # places may differ
    ],
)  # fmt: skip
def test_options_that_differ_are_an_error_on_all_ranks(n_ranks, options, message):
    said = on_ranks(n_ranks, lambda comm: check_options(config(**options(comm.rank)), comm))
    assert all(message.replace("HOST", HOST) in str(each) for each in said)
    assert len(set(map(str, said))) == 1


def test_a_program_gets_the_errors_of_the_command():
    strategy: Any = SimpleNamespace(comm=SingleProcess(), device=torch.device("cpu"))
    with pytest.raises(ValueError, match="--kl_estimator k3 as a reward"):
        build_ppo_trainer(config(kl_estimator="k3"), strategy)


def test_versions_that_differ_are_named():
    def work(comm):
        gather = comm.all_gather_object
        if comm.rank == 1:  # of another environment
            comm.all_gather_object = lambda value: gather(
                value | {"torch": "1.0"} if isinstance(value, dict) else value
            )
        check_options(config(), comm)

    message = (
        f"torch is {torch.__version__} on rank 0 and 1.0 on rank 1 ({HOST}): start all ranks alike."
    )
    assert str(on_ranks(2, work)[0]) == message


@pytest.mark.parametrize(
    ("content", "differs"),
    [
        (lambda rank: [([1, 2], "a")], False),
        (lambda rank: "def f(): ...", False),
        (lambda rank: [TokenExample([1, 2, 3], [False, True, True])], False),
        (
            lambda rank: [([1, 2], object()), ([3], datetime.datetime.now())],
            False,
        ),  # by type: JSON does not know them
        (lambda rank: [rank == 2], True),
        (lambda rank: [TokenExample([1, 2, int(rank == 2)], [False, True, True])], True),
    ],
)
def test_other_content_is_an_error_that_names_flag_and_ranks(content, differs):
    said = on_ranks(3, lambda comm: check_same(comm, {"--a": "x", "--b": content(comm.rank)}))
    message = f"--b holds something else on rank 2 ({HOST}) than on rank 0: copy the same file to all hosts."
    assert list(map(str, said)) == [message if differs else "None"] * 3


def rotary(kind, **more):
    rope = {"rope_type": kind, "original_max_position_embeddings": 64, **more}
    config = SimpleNamespace(max_position_embeddings=256, rope_parameters=rope)
    config.get_text_config = lambda: config
    return config


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (rotary("longrope"), 64),  # positions that turn short rows otherwise beside long ones
        (rotary("dynamic", factor=4.0), 64),
        (rotary("yarn", factor=4.0), 256),
        (Llama4TextConfig(), 8191),  # temperatures that count columns
        (DogeConfig(keep_window_size=512), 512),  # dynamic masks
        (MptConfig(max_seq_len=512), 512),
    ],
)
def test_rows_end_where_their_neighbours_would_matter(config, most):
    check_context(config, "--pretrain model", most - 24, 24)
    with pytest.raises(
        ValueError, match=f"context of {most} tokens of --pretrain model.*generate_max_len"
    ):
        check_context(config, "--pretrain model", most - 24, 25)


@pytest.mark.parametrize("beyond", [0, 12])
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("llama4_text", "floor_scale"),
        pytest.param("doge", "keep_window_size", marks=pinned_transformers),
    ],
)
def test_up_to_there_a_row_is_sampled_as_alone(name, limit, beyond):
    torch.manual_seed(1)
    layers = (
        {"num_hidden_layers": 4} if name == "llama4_text" else {}
    )  # of which every fourth has temperatures
    model = AutoModelForCausalLM.from_config(
        tiny_config(name, **{limit: 16 - beyond}, **layers)
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(
            parameter, std=0.3
        )  # Doge's own are 0, and then all tokens count alike
    prompts = [[3, 4, 5], [9, 12, 2, 6, 11, 13, 8, 1, 4, 30]]
    sampled = HFEngine(model, (), 0, 2).generate(
        [TokenIds(ids) for ids in prompts], SamplingParams(6), [1, 2]
    )
    row = torch.tensor([prompts[0] + sampled[0].token_ids])
    alone = Actor(model)(ModelInputs(row, torch.ones_like(row).bool()))[0, 3:]
    assert torch.allclose(alone, torch.tensor(sampled[0].log_probs), atol=1e-4) == (beyond == 0)


def test_a_loader_of_the_users_own_reads_documents_too(tmp_path, make_tokenizer):
    (tmp_path / "mine.py").write_text("def rows(source):\n    return [{'text': source}] * 3\n")
    loader = f"{tmp_path}/mine.py:rows"
    config = from_options(
        TrainPPOConfig, pretrain="m", reward_fn="f.py", pretrain_data="ab", dataset_class=loader
    )
    data = load_only_documents(
        config, make_tokenizer(), LlamaConfig(vocab_size=40), SingleProcess()
    )
    assert [document.token_ids for document in data.documents] == [[4, 5, 1]] * 3


@pytest.mark.parametrize(
    ("family", "kinds"),
    [("gemma3", {"image"}), ("qwen3_vl", {"image", "video"}), ("llava", {"image"})],
)
def test_vllm_is_given_only_what_was_compared(family, kinds):
    data, model = SimpleNamespace(documents=[], kinds=kinds), SimpleNamespace(model_type=family)
    with (
        nullcontext()
        if family == "llava"
        else pytest.raises(ValueError, match="vllm is given no videos, and images")
    ):
        check_run_with_images(config(rollout_engine="vllm"), data, model)
