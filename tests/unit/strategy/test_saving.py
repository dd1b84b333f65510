"""What lies in a folder after saving, and weights handed over one by one; several ranks are in tests/distributed."""

import copy
import json
import os
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from openppo.config import AdamConfig, DeepSpeedConfig, MergeLoRAConfig
from openppo.jobs.merge_lora import LoRAMerge
from openppo.models import Actor
from openppo.processor_files import copy_processor
from openppo.strategy import DeepspeedStrategy, trainable_model
from openppo.strategy.saving import save_model, save_tokenizer
from openppo.strategy.trainable_model import merged_weights
from tests.unit.models.conftest import make_gpt2, make_llama


@pytest.mark.parametrize("config_type", [LlamaConfig, GPT2Config])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "lora", [{}, {"lora_rank": 2, "target_modules": ["q_proj", "c_attn"]}], ids=["full", "merged"]
)
def test_a_file_has_the_tensors_that_transformers_would_write(config_type, tied, lora, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(
        config_type(vocab_size=12, tie_word_embeddings=tied, **sizes)
    )
    model.save_pretrained(tmp_path / "theirs")
    actor: Any = Actor(str(tmp_path / "theirs"), **lora).model
    save_model(actor, tmp_path / "ours", is_main=True)
    if lora:
        config = MergeLoRAConfig(
            lora_path=str(tmp_path / "ours"), save_path=str(tmp_path / "merged")
        )
        LoRAMerge(config).fit()
    theirs, ours = (
        load_file(tmp_path / f / "model.safetensors")
        for f in ("theirs", "merged" if lora else "ours")
    )
    assert ours.keys() == theirs.keys()
    assert ("lm_head.weight" in ours) is not tied
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / ("merged" if lora else "ours"))
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert (again.lm_head.weight is again.get_input_embeddings().weight) is tied


def test_a_frozen_model_in_bfloat16_keeps_what_is_packed_as_integers():
    module = nn.Linear(4, 4)
    module.packed = nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
    DeepspeedStrategy(DeepSpeedConfig(bf16=True)).prepare_frozen(module)
    assert (module.weight.dtype, module.packed.tolist()) == (torch.bfloat16, [0, 1, 2, 3])


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}], ids=["weights", "adapters"])
def test_a_saved_folder_is_whole_and_as_open_as_the_umask_says(tmp_path, lora):
    core = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o2775)
    before = os.umask(0o027)
    try:
        save_model(Actor(make_llama(), **lora).model, folder, is_main=True)
        save_tokenizer(tokenizer, folder)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o2775
    modes = {file.name: file.stat().st_mode & 0o777 for file in folder.iterdir() if file.is_file()}
    assert len(modes) >= 4
    assert set(modes.values()) == {0o640}
    assert AutoTokenizer.from_pretrained(folder).unk_token == "<unk>"
    model: Any = Actor(make_llama(), **lora).model
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = torch.empty(0)  # as ZeRO-3 leaves them where they are not gathered
    with pytest.raises(AssertionError, match="has no elements"):
        save_model(model, tmp_path / "empty", is_main=True)
    assert not (tmp_path / "empty").exists()
    (tmp_path / "file").write_text("where the folder would be")
    with pytest.raises(OSError, match="file"):  # its own writer raises a bare ``Exception`` there
        save_tokenizer(tokenizer, tmp_path / "file")


def test_saving_adapters_leaves_a_readme_of_a_person_as_it_is(tmp_path):
    model = Actor(make_llama(), lora_rank=2).model
    save_model(model, tmp_path / "none", is_main=True)
    assert not (tmp_path / "none/README.md").exists(), "peft's empty card says nothing"
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nBy hand.\n")
    save_model(model, tmp_path, is_main=True)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert (tmp_path / "README.md").read_text() == "---\nlicense: mit\n---\nBy hand.\n"


def test_adapters_are_saved_with_the_processor_of_their_base(tmp_path):
    for name, file, text in (
        ("base", "processor_config.json", "{}"),
        ("adapters", "adapter_config.json", ""),
    ):
        (tmp_path / name).mkdir()
        text = text or json.dumps({"base_model_name_or_path": str(tmp_path / "base")})
        (tmp_path / name / file).write_text(text)
    (tmp_path / "out").mkdir()
    copy_processor(str(tmp_path / "adapters"), tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["processor_config.json"]


MODELS = [
    make_llama(),
    make_llama(tie_word_embeddings=True),
    make_llama(attention_bias=True),
    make_gpt2(),
]
"""GPT-2's layers keep their weights transposed, and its head is tied."""


def adapted(model: PreTrainedModel, **lora: Any) -> Any:
    """With adapters that change something."""
    policy = Actor(model, **{"lora_rank": 4, "lora_alpha": 12, **lora}).model
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return policy


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_the_models_with_adapters_added_as_peft_merges_them(model):
    names = [name for name, _ in model.named_parameters()]
    plain = dict(merged_weights(model))
    assert list(plain) == names
    assert all(plain[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters()), (
        "nothing is copied"
    )
    policy = adapted(model)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    found = dict(merged_weights(policy))
    assert all(torch.equal(p, before[name]) for name, p in policy.named_parameters())
    assert list(found) == names
    for name, tensor in copy.deepcopy(policy).merge_and_unload().named_parameters():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.parametrize("lora", [False, True])
def test_partitioned_weights_are_gathered_in_groups_not_one_by_one(lora, monkeypatch):
    model = adapted(make_llama()) if lora else make_llama()
    plain = {name: weight.clone() for name, weight in merged_weights(model)}
    gathered: list[list[Any]] = []

    def gather(parameters: list[Any], enabled: bool) -> AbstractContextManager[None]:
        gathered.append(parameters)
        return GatheredParameters(parameters, enabled=enabled)

    monkeypatch.setattr(trainable_model, "GatheredParameters", gather)
    partitioned = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    strategy = DeepspeedStrategy(DeepSpeedConfig(zero_stage=3), overrides=partitioned)
    strategy.prepare(model, AdamConfig(), 1e-3, total_steps=1)
    largest = max(weight.nbytes for weight in plain.values())
    for limit, n_gathers in (
        (2**30, {1}),
        (2 * largest, range(2, len(plain) // 2)),
        (1, {len(plain)}),
    ):
        gathered.clear()
        monkeypatch.setattr(trainable_model, "GATHERED_BYTES", limit)
        found = dict(merged_weights(model))
        assert list(found) == list(plain) and all(
            torch.equal(found[name], plain[name]) for name in plain
        )
        assert len(gathered) in n_gathers
        sizes = [sum(p.ds_numel * p.element_size() for p in group) for group in gathered]
        assert lora or max(sizes) <= limit + largest
    assert all(p.numel() == 0 for p in model.parameters()), "they are partitioned again"


def test_in_bfloat16_the_sum_is_rounded_once():
    policy = adapted(make_llama().bfloat16(), target_modules=["q_proj"])
    exact = dict(copy.deepcopy(policy).float().merge_and_unload().named_parameters())
    for name, weight in merged_weights(policy):
        assert weight.dtype is torch.bfloat16
        if (
            "q_proj" in name
        ):  # half a unit in the last of 8 bits, and as much for the product of two factors
            assert ((weight.float() - exact[name]).abs() <= exact[name].abs() * 2**-8 + 1e-3).all()
