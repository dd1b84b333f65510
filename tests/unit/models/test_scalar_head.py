"""Critic and reward model against the plain transformer with its head, and Hugging Face's own classifier."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from openppo.models import ScalarHeadModel, get_llm_for_sequence_regression

END = 2  # end of sequence, and what padding is filled with
ROWS = [[5, 9, END, 17, 30, 8, END], [11, END, END], [7, 21, 38, 4]]
WIDTH = 7
SEQUENCES = torch.tensor([row + [END] * (WIDTH - len(row)) for row in ROWS])
MASK = torch.tensor([[t < len(row) for t in range(WIDTH)] for row in ROWS])


def classifier(num_labels=1, **changes):
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"vocab_size": 40, "initializer_range": 0.2, "pad_token_id": None, **sizes, **changes}
    return LlamaForSequenceClassification(LlamaConfig(num_labels=num_labels, **options))


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A standard sequence-classification checkpoint with one label."""
    folder = tmp_path_factory.mktemp("reward")
    classifier().save_pretrained(folder)
    return folder


@pytest.fixture
def edited(tmp_path):
    """Copies a checkpoint and changes the weights in the copy."""

    def edit(source, change):
        folder = tmp_path / "edited"
        shutil.copytree(source, folder)
        weights = change(load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return edit


def head_outputs(model, row):
    """The head on the hidden state of each token of one row, in plain steps."""
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0]
        return [sum((h * w).item() for h, w in zip(state, model.score.weight[0], strict=True)) for state in hidden]


def test_the_value_of_a_token_is_the_head_at_the_token_before(reward_folder):
    critic = get_llm_for_sequence_regression(str(reward_folder), "critic")
    values = critic(SEQUENCES, MASK)
    plain = classifier().eval()
    assert values.shape == SEQUENCES.shape
    for b, row in enumerate(ROWS):
        expected = [0.0, *head_outputs(plain, row)[:-1]]
        assert values[b, : len(row)].tolist() == pytest.approx(expected, abs=2e-6)


def test_the_score_is_read_at_the_last_real_token_even_if_it_equals_pad(reward_folder):
    reward = get_llm_for_sequence_regression(str(reward_folder), "reward")
    scores = reward(SEQUENCES, MASK)
    plain = classifier().eval()
    assert scores.shape == (3,)
    assert scores.tolist() == pytest.approx([head_outputs(plain, row)[-1] for row in ROWS], abs=2e-6)


def test_the_score_equals_that_of_hugging_face_for_a_single_row(reward_folder):
    reward = get_llm_for_sequence_regression(str(reward_folder), "reward")
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    with torch.no_grad():
        expected = [theirs(input_ids=torch.tensor([row])).logits.item() for row in ROWS]
    assert reward(SEQUENCES, MASK).tolist() == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("role", ["critic", "reward"])
def test_extra_padding_changes_nothing_whatever_it_holds(role):
    model = ScalarHeadModel(classifier().double(), role)
    wide = torch.cat([SEQUENCES, torch.full((3, 5), 19)], dim=1)
    wide_mask = torch.cat([MASK, torch.zeros(3, 5, dtype=torch.bool)], dim=1)
    narrow, found = model(SEQUENCES, MASK), model(wide, wide_mask)
    if role == "critic":
        narrow, found = torch.where(MASK, narrow, 0), torch.where(MASK, found[:, :WIDTH], 0)
    torch.testing.assert_close(found, narrow, rtol=0, atol=1e-6)


def test_a_standard_checkpoint_keeps_its_weights_bit_for_bit(reward_folder):
    saved = load_file(reward_folder / "model.safetensors")
    for role in ("critic", "reward"):
        loaded = get_llm_for_sequence_regression(str(reward_folder), role).model.state_dict()
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_bfloat16_weights_give_float32_values(reward_folder):
    for role in ("critic", "reward"):
        model = get_llm_for_sequence_regression(str(reward_folder), role, bf16=True)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert model(SEQUENCES, MASK).dtype == torch.float32


def test_a_head_of_two_labels_is_refused(tmp_path):
    classifier(num_labels=2).save_pretrained(tmp_path)
    for role in ("critic", "reward"):
        with pytest.raises(ValueError, match=r"several labels.*num_labels=1"):
            get_llm_for_sequence_regression(str(tmp_path), role)


def test_a_causal_model_is_refused_as_reward_model_with_a_remedy(llama_folder):
    with pytest.raises(ValueError, match=r"no scalar head 'score.weight'.*train_rm.*--value_head_prefix"):
        get_llm_for_sequence_regression(str(llama_folder), "reward")


def test_a_causal_model_as_critic_gets_a_fresh_head_and_the_log_says_so(tmp_path, caplog):
    config = LlamaConfig(
        vocab_size=8, hidden_size=1024, intermediate_size=8, num_hidden_layers=1, num_attention_heads=16
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="openppo"):
        critic = get_llm_for_sequence_regression(str(tmp_path), "critic")
    weight = critic.model.score.weight.detach().double()
    expected, n = 1 / 1025**0.5, 1024
    assert weight.shape == (1, n)
    assert abs(weight.std().item() - expected) < 4 * expected / (2 * n) ** 0.5  # four standard errors
    assert abs(weight.mean().item()) < 4 * expected / n**0.5
    assert any("fresh scalar head for the critic" in record.message for record in caplog.records)


def test_a_checkpoint_with_a_head_is_loaded_without_a_word_about_a_fresh_one(reward_folder, caplog):
    with caplog.at_level(logging.INFO, logger="openppo"):
        get_llm_for_sequence_regression(str(reward_folder), "critic")
    assert not any("fresh" in record.message for record in caplog.records)


def test_whether_a_fresh_head_is_allowed_can_be_said(llama_folder):
    reward = get_llm_for_sequence_regression(str(llama_folder), "reward", init_value_head=True)
    assert reward(SEQUENCES, MASK).shape == (3,)
    with pytest.raises(ValueError, match="no scalar head"):
        get_llm_for_sequence_regression(str(llama_folder), "critic", init_value_head=False)


@pytest.mark.parametrize("prefix", ["value_head", "v_head.summary", "head+"])
def test_a_head_under_another_name_is_found_by_its_prefix(reward_folder, edited, prefix):
    def rename(weights):
        return {f"{prefix}.weight" if name == "score.weight" else name: w for name, w in weights.items()}

    folder = edited(reward_folder, rename)
    model = get_llm_for_sequence_regression(str(folder), "reward", value_head_prefix=prefix)
    assert torch.equal(model.model.score.weight, classifier().score.weight)
    with pytest.raises(ValueError, match=r"no scalar head 'score.weight'"):
        get_llm_for_sequence_regression(str(folder), "reward")


def test_an_encoder_is_refused(tmp_path):
    config = BertConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=1
    )
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"BertForSequenceClassification.*no linear head named 'score'.*causal"):
        get_llm_for_sequence_regression(str(tmp_path), "reward")


def test_missing_weights_of_the_transformer_are_an_error(reward_folder, edited):
    lost = "model.layers.1.mlp.up_proj.weight"
    folder = edited(reward_folder, lambda weights: {n: w for n, w in weights.items() if n != lost})
    with pytest.raises(ValueError, match=rf"weights missing.*{lost}"):
        get_llm_for_sequence_regression(str(folder), "reward")


def test_weights_of_another_shape_than_the_config_says_are_an_error(reward_folder, edited):
    folder = edited(reward_folder, lambda weights: weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 50}))
    with pytest.raises(ValueError, match=r"another shape.*embed_tokens"):
        get_llm_for_sequence_regression(str(folder), "reward")


def test_any_causal_architecture_can_be_a_critic_without_dropout(any_causal, tmp_path):
    any_causal().save_pretrained(tmp_path)
    critic = get_llm_for_sequence_regression(str(tmp_path), "critic").train()
    first, second = (critic(SEQUENCES, MASK) for _ in range(2))
    assert torch.equal(first, second)
    expected = [0.0, *head_outputs(critic.model.eval(), ROWS[0])[:-1]]
    assert first[0].tolist() == pytest.approx(expected, abs=1e-5)
