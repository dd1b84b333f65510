"""Which architectures the engine samples from as they are trained, and that a run is refused for the others."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from openppo.config import TrainPPOConfig, from_options
from openppo.models.actor import Actor
from openppo.models.attention import use_cpu_attention
from openppo.rollout.decode_graphs import Forward
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.row_cache import check_cache
from openppo.trainer.engine_check import BOUNDS, Bound, check_hf_engine, engine_fault
from openppo.types import SamplingParams, SingleProcess
from tests.architectures import NAMES, tiny_config

CPU = torch.device("cpu")
DECODED = "log-probs of decode steps and the plain forward differ"
FAILS = "a tiny forward fails"
NO_CACHE = "has layers with no key-value cache"
REFUSED = {
    # positions that come from the cache's length, or from ids
    **dict.fromkeys(
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart".split(), DECODED
    ),
    **dict.fromkeys("camembert data2vec-text roberta roberta-prelayernorm roformer xlm-roberta".split(), DECODED),
    **dict.fromkeys("xlm-roberta-xl xmod".split(), DECODED),
    "big_bird": "forwards in training and evaluation mode differ",
    # a forward of another kind
    **dict.fromkeys("cpmant prophetnet trocr whisper".split(), FAILS),
    # another cache
    **dict.fromkeys("openai-gpt rwkv xlm xlnet xlstm".split(), NO_CACHE),
    **dict.fromkeys("axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4".split(), "has layers with indexed_attention"),
    **dict.fromkeys("bailing_hybrid bamba falcon_mamba granitemoehybrid jamba".split(), "linear_attention"),
    **dict.fromkeys("kimi_linear mamba mamba2 minimax olmo_hybrid qwen3_5_moe_text".split(), "linear_attention"),
    **dict.fromkeys("qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma".split(), "linear_attention"),
    **dict.fromkeys("falcon_h1 inkling2_text inkling_text zaya".split(), "has layers with hybrid"),
    **dict.fromkeys("lfm2_moe lfm3".split(), "has layers with conv"),
    "deepseek_v4": "has layers with heavily_compressed_attention",
}
"""What is said of each; all other architectures pass."""
FEW = "llama gpt2 qwen2 gpt_neo mixtral phimoe gemma2 bart roberta roformer prophetnet deepseek_v32".split()
IN_BFLOAT16 = """
    bloom doge falcon gemma gemma2 gemma3_text glm4_moe gpt2 gpt_neo gpt_neox gpt_oss gptj llama mistral mixtral olmo2
    opt phi3 phimoe qwen2 qwen3 qwen3_moe
""".split()
"""All that is named is refused in bfloat16 too, but for RoFormer, whose error grows with length."""
SCALES = (0.02, 0.2)
"""Of random weights: as transformers draws them, and so that logits differ as those of trained models do."""


class Weights:
    """Those of a model that is called as it is."""

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        return nullcontext()


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).to(dtype).eval()
    use_cpu_attention(model)
    return model


def said_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> str | None:
    """Why the model is refused, None if it is not."""
    model = tiny_model(name, dtype, **changes)
    try:
        check_cache(model.config)
    except ValueError as error:
        return str(error)
    return fault_of(Actor(model), {"": HFEngine(model, (), 0, 2)}, BOUNDS["hf", dtype is torch.float32])


def fault_of(actor: Actor, engines: dict[str, Engine], bound: Bound = BOUNDS["hf", True]) -> str | None:
    return engine_fault(actor, engines, Weights(), CPU, bound)  # type: ignore[arg-type]


def scaled(name: str, scale: float) -> dict[str, float]:
    config = tiny_config(name)
    return {option: scale for option in ("initializer_range", "init_std") if hasattr(config, option)}


def every(names: list[str] | tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", every(NAMES))
def test_architectures_pass_or_are_refused_with_the_reason(name: str) -> None:
    said = said_of(name)
    if name in REFUSED:
        assert said is not None and REFUSED[name] in said
    else:
        assert said is None


def test_more_than_a_hundred_architectures_pass() -> None:
    assert REFUSED.keys() <= set(NAMES)
    assert len(NAMES) - len(REFUSED) >= 109


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", every(IN_BFLOAT16))
def test_rounding_in_bfloat16_is_no_fault(name: str, scale: float) -> None:
    assert said_of(name, torch.bfloat16, **scaled(name, scale)) is None


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", every(["bart", "roberta", "mbart", "marian", "pegasus", "blenderbot", "camembert"]))
def test_wrong_positions_in_bfloat16_are_more_than_rounding(name: str, scale: float) -> None:
    said = said_of(name, torch.bfloat16, **scaled(name, scale))
    assert said is not None and DECODED in said


@pytest.mark.parametrize("name", every([name for name in NAMES if name not in REFUSED]))
@torch.no_grad()
def test_engine_and_actor_have_the_log_probs_of_transformers(name: str) -> None:
    model = tiny_model(name)
    actor, prompts = Actor(model).train(), [[3, 4, 5], [9, 12, 2, 6, 11, 13, 8, 1, 4, 30, 22]]
    sampled = HFEngine(model.eval(), (), 0, 2).generate(prompts, SamplingParams(6), [1, 2])
    for prompt, completion in zip(prompts, sampled, strict=True):
        row = torch.tensor([prompt + completion.token_ids])
        logits = model.eval()(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
        trained = actor.train()(row, torch.ones_like(row).bool())[0, len(prompt) :]
        torch.testing.assert_close(torch.tensor(completion.log_probs), theirs, atol=1e-4, rtol=0)
        torch.testing.assert_close(trained, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "noise"), [("mixtral", "router_jitter_noise"), ("phimoe", "input_jitter_noise")])
def test_routers_without_noise_pass(name: str, noise: str) -> None:
    model = tiny_model(name, **{noise: 0.3})
    assert fault_of(Actor(model), {"": HFEngine(model, (), 0, 2)}) is None


def test_noise_in_training_mode_is_found() -> None:
    actor = Actor(tiny_model("mixtral"))
    for part in actor.modules():
        if hasattr(part, "jitter_noise"):
            part.jitter_noise = 0.3
    said = fault_of(actor, {"": HFEngine(actor.model, (), 0, 2)})  # type: ignore[arg-type]
    assert said is not None and "in training and evaluation mode differ" in said


def test_adapters_with_dropout_pass() -> None:
    actor = Actor(tiny_model("llama"), lora_rank=2, lora_dropout=0.5)
    assert fault_of(actor, {"": HFEngine(actor.model, (), 0, 2)}) is None  # type: ignore[arg-type]


def test_recorded_steps_that_differ_are_named() -> None:
    def stale(forward: Forward) -> Forward:
        first = forward()
        return lambda: first

    model = tiny_model("llama")
    as_is = HFEngine(model, (), 0, 2, new_recorder=lambda: lambda forward: forward)
    wrong = HFEngine(model, (), 0, 2, new_recorder=lambda: stale)
    assert fault_of(Actor(model), {"": HFEngine(model, (), 0, 2), " replayed": as_is}) is None
    said = fault_of(Actor(model), {"": HFEngine(model, (), 0, 2), " replayed": wrong})
    assert said is not None and "decode steps replayed and the plain forward differ" in said


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 0.01), (torch.bfloat16, 3.0)])
def test_a_model_that_sees_padding_is_refused(dtype: torch.dtype, shift: float) -> None:
    class SeesPadding(Actor):
        def forward(self, sequences: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(sequences, *args, **kwargs) + shift * (sequences.shape[1] > 16)

    model = tiny_model("llama", dtype)
    bound = BOUNDS["hf", dtype is torch.float32]
    said = fault_of(SeesPadding(model), {"": HFEngine(model, (), 0, 2)}, bound)
    assert said is not None and f"padded to other lengths differ by {shift:.2g} nats" in said


@pytest.mark.parametrize("length", [10, 11, 12, 20])
def test_positions_that_end_early_are_never_exceeded(length: int) -> None:
    assert said_of("gpt2", n_positions=length) is None


class TrainedAsItIs:
    """A ``TrainableModel`` and strategy of one process, without DeepSpeed."""

    comm, device, zero_stage, any_rank = SingleProcess(), CPU, 0, bool
    uncompiled = staticmethod(nullcontext)

    def __init__(self, actor: Actor) -> None:
        self.module = actor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def fits_gathered(self, engine: Any, moments_offloaded: bool) -> bool:
        return True

    @contextmanager
    def for_generation(self, engine: Any, in_lockstep: bool) -> Iterator[None]:
        yield


def checked(actor: Actor) -> None:
    options = from_options(TrainPPOConfig, pretrain="some/model", prompt_data="d", reward_fn="f.py")
    one: Any = TrainedAsItIs(actor)
    check_hf_engine(options, one, one)


def test_refusing_names_model_reason_and_remedy() -> None:
    with pytest.raises(ValueError, match=f"--pretrain some/model cannot be sampled.*{DECODED} by .*--engine_check off"):
        checked(Actor(tiny_model("bart")))


def test_the_check_leaves_modes_and_random_numbers_as_they_were() -> None:
    actor = Actor(tiny_model("llama"), lora_rank=2, lora_dropout=0.5)
    modes = [part.training for part in actor.modules()]
    assert len(set(modes)) == 2  # of a loaded model, in a module that is new

    def drawn() -> list[Any]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = drawn()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    checked(actor)
    assert drawn() == expected
    assert [part.training for part in actor.modules()] == modes


def test_memory_that_ends_is_no_verdict_about_a_model() -> None:
    class Full(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("full")

    actor = Actor(tiny_model("llama"))
    engine = SimpleNamespace(with_weights=lambda weights: nullcontext(), submit=Full())
    with pytest.raises(torch.OutOfMemoryError):
        fault_of(actor, {"": engine})  # type: ignore[dict-item]
