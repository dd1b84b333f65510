"""Which architectures the engine samples from as they are trained, and that a run is refused for the others."""

import random
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from openppo.build.checks.engine import check_engines, check_like, engine_fault
from openppo.config import TrainPPOConfig, from_options
from openppo.media import TokenIds
from openppo.models.actor import Actor
from openppo.models.attention import use_fast_attention
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.models.size import check_cache
from openppo.rollout.decode_graphs import Forward
from openppo.rollout.engine import Engine
from openppo.rollout.hf_engine import HFEngine
from openppo.types import ModelInputs, SamplingParams, SingleProcess
from tests.architectures import NAMES, tiny_config
from tests.pinned import pinned_transformers

CPU = torch.device("cpu")
DECODED = "log-probs of decode steps and the plain forward differ"
REASONS = {
    DECODED: """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart camembert data2vec-text
        roberta roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl xmod""",
    "a tiny forward fails": "cpmant prophetnet trocr whisper",
    "has layers with no key-value cache": "openai-gpt rwkv xlm xlnet xlstm",
    "has layers with indexed_attention": "axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4",
    "linear_attention": """bailing_hybrid bamba falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2 minimax
        olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma""",
    "has layers with hybrid": "falcon_h1 inkling2_text inkling_text zaya",
    "has layers with conv": "lfm2_moe lfm3",
    "has layers with heavily_compressed_attention": "deepseek_v4",
}
REFUSED = {name: reason for reason, names in REASONS.items() for name in names.split()}
"""What is said of each; all other architectures pass."""
FEW = "llama gpt2 qwen2 gpt_neo mixtral phimoe gemma2 bart roberta roformer prophetnet deepseek_v32".split()
IN_BFLOAT16 = """
    bloom doge falcon gemma gemma2 gemma3_text glm4_moe gpt2 gpt_neo gpt_neox gpt_oss gptj llama mistral mixtral olmo2
    opt phi3 phimoe qwen2 qwen3 qwen3_moe
""".split()
"""All that is named is refused in bfloat16 too, but for RoFormer, whose error grows with length."""
WRONG_POSITIONS = "bart roberta mbart marian pegasus blenderbot camembert".split()
SCALES = (0.02, 0.2)
"""Of random weights: as transformers draws them, and so that logits differ as those of trained models do."""


class Weights:
    """Those of a model that is called as it is."""

    def gathered(self, in_lockstep: bool) -> AbstractContextManager[None]:
        return nullcontext()


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes)).to(dtype).eval()
    use_fast_attention(model)
    return model


def fault_of(
    actor: Actor, engines: dict[str, Engine] | None = None, is_exact: bool = True
) -> str | None:
    """Why the model is refused, None if it is not."""
    found: Any = engines or {"": HFEngine(actor.model, (), 0, 2)}  # type: ignore[arg-type]
    return engine_fault(actor, found, Weights(), CPU, ("hf", is_exact))  # type: ignore[arg-type]


def said_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> str | None:
    model = tiny_model(name, dtype, **changes)
    try:
        check_cache(model.config)
    except ValueError as error:
        return str(error)
    return fault_of(Actor(model), is_exact=dtype is torch.float32)


def every(names: list[str] | tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in names]


@pinned_transformers
@pytest.mark.parametrize("name", every(NAMES))
def test_architectures_pass_or_are_refused_with_the_reason(name: str) -> None:
    said = said_of(name)
    assert REFUSED[name] in str(said) if name in REFUSED else said is None


@pinned_transformers
def test_more_than_a_hundred_architectures_pass() -> None:
    assert REFUSED.keys() <= set(NAMES)
    assert len(NAMES) - len(REFUSED) >= 110


@pytest.mark.parametrize(
    ("name", "changes"),
    [("mixtral", {"output_router_logits": True}), ("persimmon", {"attention_dropout": 0.5})],
)
def test_options_that_are_switched_off_refuse_no_model(name: str, changes: dict[str, Any]) -> None:
    assert said_of(name, **changes) is None


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", every(IN_BFLOAT16 + WRONG_POSITIONS))
def test_only_wrong_positions_are_more_than_rounding_in_bfloat16(name: str, scale: float) -> None:
    config = tiny_config(name)
    scales = {
        option: scale for option in ("initializer_range", "init_std") if hasattr(config, option)
    }
    said = said_of(name, torch.bfloat16, **scales)
    assert DECODED in str(said) if name in WRONG_POSITIONS else said is None


@pytest.mark.parametrize("name", every([name for name in NAMES if name not in REFUSED]))
@torch.no_grad()
def test_engine_and_actor_have_the_log_probs_of_transformers(name: str) -> None:
    model = tiny_model(name)
    actor, prompts = Actor(model).train(), [[3, 4, 5], [9, 12, 2, 6, 11, 13, 8, 1, 4, 30, 22]]
    sampled = HFEngine(model.eval(), (), 0, 2).generate(
        [TokenIds(ids) for ids in prompts], SamplingParams(6), [1, 2]
    )
    for prompt, completion in zip(prompts, sampled, strict=True):
        row = torch.tensor([prompt + completion.token_ids])
        logits = model.eval()(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
        theirs = logits.log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
        trained = actor.train()(ModelInputs(row, torch.ones_like(row).bool()))[0, len(prompt) :]
        torch.testing.assert_close(torch.tensor(completion.log_probs), theirs, atol=1e-4, rtol=0)
        torch.testing.assert_close(trained, theirs, atol=1e-4, rtol=0)


def test_noise_in_training_mode_is_found_where_an_actor_keeps_it() -> None:
    for name, noise in (("mixtral", "router_jitter_noise"), ("phimoe", "input_jitter_noise")):
        assert fault_of(Actor(tiny_model(name, **{noise: 0.3}))) is None, (
            "an Actor's routers have none"
        )
    actor = Actor(tiny_model("mixtral"))
    for part in actor.modules():
        if hasattr(part, "jitter_noise"):
            part.jitter_noise = 0.3
    assert "in training and evaluation mode differ" in str(fault_of(actor))


def test_recorded_steps_that_differ_are_named() -> None:
    def stale(forward: Forward) -> Forward:
        first = forward()
        return lambda: first

    model = tiny_model("llama")
    as_is = HFEngine(model, (), 0, 2, new_recorder=lambda: lambda forward: forward)
    wrong = HFEngine(model, (), 0, 2, new_recorder=lambda: stale)
    assert fault_of(Actor(model), {"": HFEngine(model, (), 0, 2), " replayed": as_is}) is None
    said = fault_of(Actor(model), {"": HFEngine(model, (), 0, 2), " replayed": wrong})
    assert "decode steps replayed and the plain forward differ" in str(said)


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 0.01), (torch.bfloat16, 3.0)])
def test_a_model_that_sees_padding_is_refused(dtype: torch.dtype, shift: float) -> None:
    class SeesPadding(Actor):
        def forward(self, inputs: ModelInputs, *args: Any, **kwargs: Any) -> Any:
            is_wide = inputs.sequences.shape[1] > 16
            return super().forward(inputs, *args, **kwargs) + shift * is_wide

    said = fault_of(SeesPadding(tiny_model("llama", dtype)), is_exact=dtype is torch.float32)
    assert f"padded to other lengths differ by {shift:.2g} nats" in str(said)


def test_refusing_names_model_reason_and_remedy() -> None:
    options = from_options(TrainPPOConfig, pretrain="some/model", prompt_data="d", reward_fn="f.py")
    actor: Any = Actor(tiny_model("bart"))
    actor.gathered = Weights().gathered
    strategy: Any = SimpleNamespace(comm=SingleProcess(), device=CPU, uncompiled=nullcontext)
    with pytest.raises(
        ValueError,
        match=f"--pretrain some/model cannot be sampled.*{DECODED} by .*--engine_check off",
    ):
        check_engines(options, strategy, actor, {"": HFEngine(actor.model, (), 0, 2)})


def test_the_check_leaves_modes_and_random_numbers_as_they_were() -> None:
    actor = Actor(
        tiny_model("llama"), lora_rank=2, lora_dropout=0.5
    )  # of a loaded model, in a module that is new
    modes, drawn = [part.training for part in actor.modules()], []
    assert len(set(modes)) == 2
    for checked in (False, True):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        assert not checked or fault_of(actor) is None
        drawn.append([random.random(), np.random.rand(), torch.rand(1).item()])
    assert drawn[0] == drawn[1]
    assert [part.training for part in actor.modules()] == modes


def test_the_check_reads_and_samples_no_ids_that_are_left_out() -> None:
    actor, read = Actor(tiny_model("llama")), set[int]()
    ids = SampledIds((range(1, 3), range(5, 60)))
    n_ids = actor.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    actor.model.get_input_embeddings().register_forward_pre_hook(  # type: ignore[operator]
        lambda _, inputs: read.update(inputs[0].flatten().tolist())
    )
    assert DECODED in str(differs(actor, ids, ALL_IDS))
    read.clear()
    assert differs(actor, ids, ids) is None
    assert {0, 3, 4} < read <= {0, 3, 4, *range(60, n_ids)}


def differs(actor: Actor, of_engine: SampledIds, of_actor: SampledIds) -> str | None:
    """Why a model is refused whose engine and actor leave these ids out."""
    engine = HFEngine(actor.model, (), 0, 2, sampled_ids=of_engine)  # type: ignore[arg-type]
    actor.normalize_over(of_actor)
    faults = list[str | None]()
    check_like(engine, lambda engines: faults.append(fault_of(actor, dict(engines))))
    return faults[0]


def test_memory_that_ends_is_no_verdict_about_a_model() -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("full"))
    engine: Any = SimpleNamespace(
        with_weights=lambda weights: nullcontext(), submit=full, sampled_ids=ALL_IDS
    )
    with pytest.raises(torch.OutOfMemoryError):
        fault_of(Actor(tiny_model("llama")), {"": engine})
