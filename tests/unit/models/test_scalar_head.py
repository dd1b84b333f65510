"""Critics, reward models and process reward models against the plain transformer and Hugging Face's classifier."""

import logging

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from openppo.models import get_llm_for_sequence_regression
from openppo.models.scalar_head import ProcessRewardModel
from openppo.types import ModelInputs

END = 2  # end of sequence, and what padding is filled with
ROWS = [[5, 9, END, 17, 30, 8, END], [11, END, END], [7, 21, 38, 4]]
WIDTH = 7
SEQUENCES = torch.tensor([row + [END] * (WIDTH - len(row)) for row in ROWS])
MASK = torch.tensor([[t < len(row) for t in range(WIDTH)] for row in ROWS])
ROLES = ("critic", "reward")
EACH_ROLE = pytest.mark.parametrize("role", ROLES)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
}


def classifier(num_labels=1):
    torch.manual_seed(7)
    config = LlamaConfig(num_labels=num_labels, initializer_range=0.2, pad_token_id=None, **SIZES)
    return LlamaForSequenceClassification(config)


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A standard sequence-classification checkpoint with one label."""
    folder = tmp_path_factory.mktemp("reward")
    classifier().save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def head_outputs(model, row):
    """The head on the hidden state of each token of one row, in plain steps."""
    hidden = model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0]
    return [
        sum((h * w).item() for h, w in zip(state, model.score.weight[0], strict=True))
        for state in hidden
    ]


def test_values_are_the_head_at_the_token_before_and_scores_at_the_last(reward_folder):
    critic, reward = (get_llm_for_sequence_regression(reward_folder, role) for role in ROLES)
    theirs = AutoModelForSequenceClassification.from_pretrained(reward_folder).eval()
    # padding holds anything
    inputs = ModelInputs(torch.cat([SEQUENCES, torch.full((3, 5), 19)], 1), F.pad(MASK, (0, 5)))
    values, scores, plain = critic(inputs), reward(inputs), classifier().eval()
    assert (values.shape, scores.shape) == (inputs.sequences.shape, (3,))
    for b, row in enumerate(ROWS):
        outputs = head_outputs(plain, row)
        assert values[b, : len(row)].tolist() == pytest.approx([0.0, *outputs[:-1]], abs=2e-6)
        assert scores[b].item() == pytest.approx(outputs[-1], abs=2e-6)  # also where it equals PAD
        assert scores[b].item() == pytest.approx(
            theirs(input_ids=torch.tensor([row])).logits.item(), abs=2e-6
        )


@EACH_ROLE
def test_a_standard_checkpoint_keeps_its_weights_bit_for_bit(reward_folder, role, caplog):
    with caplog.at_level(logging.INFO, logger="openppo"):
        loaded = get_llm_for_sequence_regression(reward_folder, role).model.state_dict()
    assert "fresh" not in caplog.text
    saved = load_file(f"{reward_folder}/model.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    in_bf16 = get_llm_for_sequence_regression(reward_folder, role, bf16=True)
    assert {p.dtype for p in in_bf16.parameters()} == {torch.bfloat16}
    assert in_bf16(ModelInputs(SEQUENCES, MASK)).dtype == torch.float32


def test_a_causal_model_gets_a_fresh_head_only_where_one_is_allowed(llama_folder, tmp_path, caplog):
    for role, options, says in (
        ("reward", {}, r"no scalar head 'score.weight'.*train_rm.*value_head_prefix"),
        ("critic", {"init_value_head": False}, "no scalar head"),
    ):
        with pytest.raises(ValueError, match=says):
            get_llm_for_sequence_regression(str(llama_folder), role, **options)
    reward = get_llm_for_sequence_regression(str(llama_folder), "reward", init_value_head=True)
    assert reward(ModelInputs(SEQUENCES, MASK)).shape == (3,)
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="openppo"):
        weight = (
            get_llm_for_sequence_regression(str(tmp_path), "critic")
            .model.score.weight.detach()
            .double()
        )
    expected, n = 1 / 1025**0.5, 1024
    assert weight.shape == (1, n)
    assert (
        abs(weight.std().item() - expected) < 4 * expected / (2 * n) ** 0.5
    )  # four standard errors
    assert abs(weight.mean().item()) < 4 * expected / n**0.5
    assert "fresh scalar head for the critic" in caplog.text


@pytest.mark.parametrize("prefix", ["v_head.summary", "head+"])
def test_a_head_under_another_name_is_found_by_its_prefix(reward_folder, edited, prefix):
    folder = edited(
        reward_folder,
        lambda weights: {name.replace("score", prefix): w for name, w in weights.items()},
    )
    model = get_llm_for_sequence_regression(folder, "reward", value_head_prefix=prefix)
    assert torch.equal(model.model.score.weight, classifier().score.weight)
    with pytest.raises(ValueError, match=r"no scalar head 'score.weight'"):
        get_llm_for_sequence_regression(folder, "reward")


@EACH_ROLE
def test_checkpoints_that_do_not_fit_are_refused(role, reward_folder, edited, tmp_path):
    bert = BertForSequenceClassification(BertConfig(num_labels=1, **SIZES))
    classifier(num_labels=2).save_pretrained(tmp_path / "two")
    bert.save_pretrained(tmp_path / "bert")
    lost = "model.layers.1.mlp.up_proj.weight"
    without = edited(
        reward_folder, lambda weights: {name: w for name, w in weights.items() if name != lost}
    )
    for folder, says in (
        (tmp_path / "two", r"several labels.*num_labels=1.*openppo.cli.train_rm"),
        (tmp_path / "bert", r"BertForSequenceClassification.*no linear head named 'score'.*causal"),
        (without, f"weights missing.*{lost}"),
    ):
        with pytest.raises(ValueError, match=says):
            get_llm_for_sequence_regression(str(folder), role)
    with pytest.raises(ValueError, match=r"another shape.*embed_tokens"):
        get_llm_for_sequence_regression(edited(reward_folder, vocab_size=50), role)


def test_a_process_reward_model_gives_logits_at_places_only(any_causal):
    places = torch.zeros(3, WIDTH, dtype=torch.bool)
    places[0, [2, 5]] = places[2, 1:4] = True
    model, widths = any_causal().eval(), []
    plain = [
        model(input_ids=SEQUENCES[:1]).logits[0, [2, 5]],
        model(input_ids=SEQUENCES[2:, :4]).logits[0, 1:],
    ]
    model.get_output_embeddings().register_forward_hook(
        lambda _, inputs, __: widths.append(inputs[0].shape[1])
    )
    torch.testing.assert_close(
        ProcessRewardModel(model)(ModelInputs(SEQUENCES, MASK), places),
        torch.cat(plain),
        rtol=0,
        atol=1e-5,
    )
    assert widths == [4]  # columns 1, 2, 3 and 5 of 7
    logits = ProcessRewardModel(model)(ModelInputs(SEQUENCES, MASK), torch.zeros_like(places))
    assert logits.shape == (0, model.config.vocab_size)
    logits.sum().backward()  # without a place the model runs all the same
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
