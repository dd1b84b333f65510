"""Adapters, the reference without them, and PEFT folders against plain peft and transformers."""

import json
import logging
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from peft import (
    AutoPeftModelForCausalLM,
    AutoPeftModelForSequenceClassification,
    LoraConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

from openppo.build.checks.adapters import check_adapters
from openppo.config import LoRAConfig
from openppo.models import Actor, get_llm_for_sequence_regression
from openppo.models.adapters import AdapterOffReference
from openppo.models.pretrained import check_model, load_tokenizer
from openppo.types import ModelInputs, SingleProcess

ROWS = [[5, 9, 2, 17, 30, 8, 2], [11, 2, 3], [7, 21, 38, 4, 2]]
WIDTH = 7
SEQUENCES = torch.tensor([row + [0] * (WIDTH - len(row)) for row in ROWS])
MASK = torch.tensor([[t < len(row) for t in range(WIDTH)] for row in ROWS])


def disturb(model):
    """Put numbers into everything that is trained: fresh adapters are the identity."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def saved(model, folder):
    """A PEFT folder of trained adapters, written by peft."""
    disturb(model)
    model.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def actor_folder(llama_folder, tmp_path_factory):
    return saved(Actor(str(llama_folder), lora_rank=4), tmp_path_factory.mktemp("actor"))


@pytest.fixture(scope="module")
def reward_folder(llama_folder, tmp_path_factory):
    """Adapters of a reward model and its head."""
    reward = get_llm_for_sequence_regression(
        str(llama_folder), "reward", init_value_head=True, lora_rank=4
    )
    return saved(reward, tmp_path_factory.mktemp("reward"))


def same(found, expected, atol=1e-5):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def trainable(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]


def test_all_linear_adapts_every_linear_layer_but_the_head_which_is_trained_whole(
    any_causal, tmp_path
):
    any_causal().save_pretrained(tmp_path)
    critic = get_llm_for_sequence_regression(str(tmp_path), "critic", lora_rank=2)
    names = trainable(critic)
    whole = [name for name in names if "lora_" not in name]
    assert whole == ["model.base_model.model.score.modules_to_save.default.weight"]
    adapted = {name.split(".lora_")[0] for name in names if "lora_" in name}
    assert len(adapted) in (
        2 * 7,
        2 * 4,
    )  # q, k, v, o, gate, up, down of Llama; attn, proj, fc, proj of GPT-2
    assert not any("score" in name or "lm_head" in name for name in adapted)
    critic.train()(ModelInputs(SEQUENCES, MASK)).sum().backward()
    assert [name for name, p in critic.named_parameters() if p.grad is not None] == names


@pytest.mark.parametrize("training", [True, False])
def test_the_reference_is_the_model_before_training_and_leaves_the_actor_alone(
    any_causal, training
):
    actor = Actor(any_causal(), temperature=0.7, lora_rank=4, lora_dropout=0.5 * training).train(
        training
    )
    disturb(actor)
    before, trained = actor(ModelInputs(SEQUENCES, MASK)), trainable(actor)
    reference = AdapterOffReference(Mock(side_effect=actor, module=actor))
    found = reference(ModelInputs(SEQUENCES, MASK), return_entropy=True)
    expected = Actor(any_causal(), temperature=0.7)(
        ModelInputs(SEQUENCES, MASK), return_entropy=True
    )
    torch.testing.assert_close(found, tuple(x.detach() for x in expected), rtol=0, atol=1e-6)
    assert (before - found[0]).abs().max() > 0.1
    with pytest.raises(IndexError):
        reference(ModelInputs(SEQUENCES + 1000, MASK))
    assert torch.equal(actor(ModelInputs(SEQUENCES, MASK)), before) is not training, (
        "dropout is back"
    )
    assert trainable(actor) == trained
    before.sum().backward()  # a graph from before the reference ran
    assert all(p.grad is not None for p in actor.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora_rank": 2, "target_modules": ("q_prog",)}, "--target_modules q_prog: .*not found"),
        (
            {"lora_rank": 2, "target_modules": ("lm_head",)},
            "--target_modules lm_head: .*it would change both",
        ),
        ({"lora_rank": -1}, "--lora_rank must not be negative"),
        ({"load_in_4bit": True}, "--load_in_4bit .*give --lora_rank"),
        ({"lora_rank": 2, "load_in_4bit": True}, "--load_in_4bit needs.*pip install bitsandbytes"),
    ],
)
def test_options_that_cannot_work_are_an_error_that_names_the_flag(
    llama, tmp_path, options, says, monkeypatch
):
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=says):
        Actor(str(tmp_path), **options)


def test_adapters_go_on_the_named_layers_and_their_folder_is_found_from_everywhere(
    llama_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(llama_folder.parent)
    actor = Actor(llama_folder.name, lora_rank=2, target_modules=("q_proj",))
    assert {name.split(".lora_")[0].split(".")[-1] for name in trainable(actor)} == {"q_proj"}
    actor.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(llama_folder)


def test_an_actor_reads_a_peft_folder_as_peft_does(any_causal, tmp_path, caplog):
    """GPT-2's layers are transposed."""
    any_causal().save_pretrained(tmp_path / "base")
    folder = saved(Actor(str(tmp_path / "base"), lora_rank=4), tmp_path / "adapters")
    with caplog.at_level(logging.INFO, logger="openppo"):
        actor = Actor(str(folder))
    theirs = AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload()
    same(
        actor(ModelInputs(SEQUENCES, MASK)).detach(),
        Actor(theirs)(ModelInputs(SEQUENCES, MASK)).detach(),
    )
    assert trainable(actor.model) == [name for name, _ in any_causal().named_parameters()]
    assert "adapters merged into" in caplog.text
    for model in (
        Actor(str(folder), bf16=True),
        Actor(str(tmp_path / "base"), bf16=True, lora_rank=4),
    ):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_reward_models_read_their_peft_folders_and_critics_those_of_language_models(
    actor_folder, reward_folder
):
    reward = get_llm_for_sequence_regression(str(reward_folder), "reward")
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(
        reward_folder, num_labels=1
    ).eval()
    with torch.no_grad():
        scores = torch.stack(
            [theirs(input_ids=torch.tensor([row])).logits[0, 0] for row in ROWS]
        )  # of the last token
    same(reward(ModelInputs(SEQUENCES, MASK)).detach(), scores)
    assert trainable(reward) == [name for name, _ in reward.named_parameters()]
    critic = get_llm_for_sequence_regression(str(actor_folder), "critic")
    same(
        critic.model.model(SEQUENCES)[0].detach(),
        Actor(str(actor_folder)).model.model(SEQUENCES)[0].detach(),
    )
    with pytest.raises(ValueError, match="no scalar head"):
        get_llm_for_sequence_regression(str(actor_folder), "reward")
    with pytest.raises(ValueError, match="reward model or critic"):
        Actor(str(reward_folder))
    for load, folder in (
        (Actor, actor_folder),
        (partial(get_llm_for_sequence_regression, role="critic"), reward_folder),
    ):
        with pytest.raises(
            ValueError, match=f"is a PEFT folder.*merge_lora --lora_path {folder} --save_path"
        ):
            load(str(folder), lora_rank=2)


def test_training_on_starts_with_the_adapters_of_the_folder(actor_folder, llama_folder, tmp_path):
    actor = Actor(str(llama_folder), lora_path=str(actor_folder), lora_dropout=0.25).eval()
    merged = Actor(str(actor_folder))
    same(
        actor(ModelInputs(SEQUENCES, MASK)).detach(), merged(ModelInputs(SEQUENCES, MASK)).detach()
    )
    fresh = Actor(str(llama_folder), lora_rank=4)
    assert trainable(actor) == trainable(fresh), "all adapters, and nothing else"
    assert (
        actor(ModelInputs(SEQUENCES, MASK)) - fresh(ModelInputs(SEQUENCES, MASK))
    ).abs().max() > 0.1
    assert actor.model.peft_config["default"].lora_dropout == 0.25

    disturb(actor)
    actor.model.save_pretrained(tmp_path)
    theirs = AutoPeftModelForCausalLM.from_pretrained(tmp_path).merge_and_unload()
    same(
        actor.eval()(ModelInputs(SEQUENCES, MASK)).detach(),
        Actor(theirs)(ModelInputs(SEQUENCES, MASK)).detach(),
    )


def test_training_on_a_reward_model_starts_with_its_head(reward_folder, llama_folder):
    reward = get_llm_for_sequence_regression(
        str(llama_folder), "reward", init_value_head=True, lora_path=str(reward_folder)
    )
    merged = get_llm_for_sequence_regression(str(reward_folder), "reward")
    same(
        reward(ModelInputs(SEQUENCES, MASK)).detach(), merged(ModelInputs(SEQUENCES, MASK)).detach()
    )
    assert sum("score" in name for name in trainable(reward)) == 1


def test_rank_alpha_and_targets_are_those_of_the_adapters(llama_folder, tmp_path):
    made = Actor(str(llama_folder), lora_rank=3, lora_alpha=5, target_modules=("v_proj", "q_proj"))
    saved(made, tmp_path)
    options = LoRAConfig(lora_path=str(tmp_path))
    options.validate()
    expected = (3, 5, ("q_proj", "v_proj"))
    assert (options.lora_rank, options.lora_alpha, options.target_modules) == expected
    again = LoRAConfig(**vars(options))
    again.validate()
    assert again == options, "as a run reads its own config"
    for name, value in (("lora_rank", 8), ("lora_alpha", 6), ("target_modules", ("q_proj",))):
        with pytest.raises(
            ValueError, match=f"--{name} .*: the adapters of --lora_path have .*Leave it out"
        ):
            LoRAConfig(lora_path=str(tmp_path), **{name: value}).validate()


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"peft_type": "IA3"}, "type IA3; only LoRA adapters can be trained on"),
        ({"use_dora": True}, "have use_dora, which are not trained here. Merge them"),
        ({"bias": "all"}, "have bias, which"),
        ({"init_lora_weights": "pissa_niter_4"}, "have init_lora_weights pissa_niter_4, which"),
        ({"modules_to_save": ["embed_tokens", "score"]}, "have embed_tokens, which"),
    ],
)
def test_adapters_with_other_parts_are_refused(actor_folder, edited, entries, says):
    with pytest.raises(ValueError, match=f"--lora_path .*edited: its adapters .*{says}"):
        LoRAConfig(lora_path=edited(actor_folder, **entries)).validate()


def test_adapters_of_another_place_or_task_are_refused(
    actor_folder, reward_folder, llama_folder, llama, tmp_path
):
    with pytest.raises(ValueError, match="--lora_path nowhere: no adapter_config.json is there"):
        Actor(str(llama_folder), lora_path="nowhere")
    with pytest.raises(
        ValueError, match="are of a reward model or critic, and here a language model is trained"
    ):
        Actor(str(llama_folder), lora_path=str(reward_folder))
    with pytest.raises(ValueError, match="are of a language model, and here a reward model"):
        get_llm_for_sequence_regression(str(llama_folder), "critic", lora_path=str(actor_folder))

    llama(intermediate_size=12).save_pretrained(tmp_path)
    says = r"--lora_path {} does not fit {}: .*(down|gate|up)_proj.* has the shape \(.*12.*\) in the model and"
    with pytest.raises(ValueError, match=says.format(actor_folder, "the model")):
        Actor(str(tmp_path), lora_path=str(actor_folder))
    with pytest.raises(ValueError, match=says.format(actor_folder, f"--pretrain {tmp_path}")):
        check(tmp_path, actor_folder)


def check(base, folder):
    options = LoRAConfig(lora_path=str(folder))
    config = check_model(str(base), "--pretrain")
    check_adapters(
        options,
        SingleProcess(),
        "CAUSAL_LM",
        pretrain=str(base),
        config=config,
        trust_remote_code=False,
    )


def test_another_base_model_of_the_same_shape_is_a_warning(
    actor_folder, llama_folder, llama, tmp_path, caplog
):
    check(llama_folder, actor_folder)
    assert caplog.text == ""
    llama().save_pretrained(tmp_path)
    check(tmp_path, actor_folder)
    assert f"was trained on {llama_folder}, and is put on --pretrain {tmp_path}" in caplog.text


LAYER = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("says", "change"),
    [
        ("missing", lambda weights: {name: w for name, w in weights.items() if name != LAYER}),
        ("NaN", lambda weights: {**weights, LAYER: weights[LAYER] * torch.nan}),
        (
            "no place",
            lambda weights: {**weights, "base_model.model.other.lora_A.weight": torch.ones(1)},
        ),
        ("size mismatch", lambda weights: {**weights, LAYER: weights[LAYER][:, :8]}),
    ],
)
def test_adapters_that_cannot_be_merged_are_an_error(
    actor_folder, reward_folder, edited, llama_folder, says, change
):
    headless = edited(
        reward_folder,
        lambda weights: {name: w for name, w in weights.items() if ".score." not in name},
    )
    with pytest.raises(ValueError, match="cannot be merged .*score"):
        get_llm_for_sequence_regression(headless, "critic")
    with pytest.raises(
        ValueError, match=rf"edited: its adapters cannot be merged into {llama_folder}: .*{says}"
    ):
        Actor(edited(actor_folder, change))


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_adapters_of_a_resized_model_name_a_remedy_that_works(options, llama, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    resized = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    resized.resize_token_embeddings(42)
    adapted = get_peft_model(
        resized, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    )
    folder = tmp_path / "adapters"
    adapted.save_pretrained(folder)
    says = "they are for 42 embeddings, and it has 40. Resize it with .*, save it, and name that folder"
    with pytest.raises(
        ValueError,
        match=f"adapters: its adapters cannot be merged into .*base: {says}: .*--pretrain",
    ):
        Actor(str(folder))
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    other.resize_token_embeddings(42)
    other.save_pretrained(tmp_path / "base")
    ids = torch.tensor([[3, 41, 5]])
    same(Actor(str(folder)).model.eval()(ids).logits, adapted.eval()(ids).logits)


def test_adapters_of_another_kind_are_an_error(tmp_path, llama_folder):
    prompt_tuning = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(llama_folder), prompt_tuning
    ).save_pretrained(tmp_path / "p")
    with pytest.raises(ValueError, match="only LoRA adapters"):
        Actor(str(tmp_path / "p"))


def test_a_peft_folder_is_checked_together_with_its_base_model(actor_folder, edited):
    assert check_model(str(actor_folder), "--pretrain").model_type == "llama"
    for base, says in (
        ("/nowhere/at/all", "its base model /nowhere/at/all: no such local folder"),
        (None, "names no base model"),
        (str(actor_folder), "is a PEFT folder too"),
    ):
        folder = edited(actor_folder, base_model_name_or_path=base)
        with pytest.raises(ValueError, match=f"^--pretrain {folder}.*{says}"):
            check_model(folder, "--pretrain")
    Path(folder, "adapter_config.json").write_text("{")
    with pytest.raises(
        ValueError, match=f"^--pretrain {folder}: its adapter_config.json cannot be read"
    ):
        check_model(folder, "--pretrain")


def test_what_the_model_itself_says_beside_its_adapters_counts(reward_folder, edited):
    folder = Path(edited(reward_folder))
    config = check_model(str(folder), "--reward_pretrain")
    config.pad_token_id, config.mean = 7, 0.5
    config.to_json_file(folder / "model_config.json")
    loaded = get_llm_for_sequence_regression(str(folder), "reward").model.config
    assert (loaded.pad_token_id, loaded.mean, loaded.num_labels) == (7, 0.5, 1)


def test_a_tokenizer_beside_adapters_is_used_else_that_of_the_base_model(
    actor_folder, llama, edited, tmp_path, make_tokenizer
):
    llama().save_pretrained(tmp_path / "base")
    folder = edited(actor_folder, base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(ValueError, match="--pretrain .*its tokenizer cannot be loaded"):
        load_tokenizer(folder, "--pretrain")
    for place, eos in ((tmp_path / "base", "<eos>"), (folder, "<end>")):
        make_tokenizer(eos=eos).save_pretrained(place)
        assert load_tokenizer(folder, "--pretrain").eos_token == eos
