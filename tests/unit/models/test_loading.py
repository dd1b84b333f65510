"""What a user can get wrong when naming a model is said at once, and ids of a model are all found."""

import logging
from email.message import Message
from urllib.error import HTTPError, URLError

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    PhimoeForCausalLM,
    PreTrainedTokenizerFast,
    XLNetConfig,
)

from openppo.models import pretrained
from openppo.models.loading import disable_dropout
from openppo.models.pretrained import check_model, check_token_ids, context_length, known_eos_token_ids, load_tokenizer
from tests.architectures import tiny_config

FLAG = "--pretrain"
VOCAB = {"<eos>": 0, "<pad>": 1, "a": 2, "<unk>": 3}


def tokenizer(**special):
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(VOCAB, unk_token="<unk>")), **special)


@pytest.fixture
def no_network(monkeypatch):
    """Lets every connection fail and lists the addresses that were tried."""
    tried: list[str] = []

    def fail(url, timeout):
        tried.append(url)
        raise URLError("no route to host")

    monkeypatch.setattr(pretrained, "urlopen", fail)
    monkeypatch.setattr(pretrained, "HF_HUB_OFFLINE", False)
    return tried


def test_the_config_of_a_folder_is_read_without_its_weights(llama_folder, no_network):
    assert check_model(str(llama_folder), FLAG).model_type == "llama"
    assert no_network == []


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./nowhere", "../nowhere", "~/nowhere", "models/of/mine", "sft/", "my model", "a--b"]
)
def test_a_path_that_does_not_exist_is_an_error_without_asking_the_hub(name, no_network):
    with pytest.raises(ValueError, match=rf"{FLAG} {name}: no such local folder.*Check the path"):
        check_model(name, FLAG)
    assert no_network == []


def test_a_file_is_an_error_that_asks_for_its_folder(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(ValueError, match=rf"{FLAG} .*this is a file; give the folder"):
        check_model(str(tmp_path / "model.safetensors"), FLAG)


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=rf"{FLAG} .*has no config.json"):
        check_model(str(tmp_path), FLAG)


@pytest.mark.parametrize("text", ["{", '{"model_type": "no_such_architecture"}', "{}"])
def test_a_config_that_cannot_be_read_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{FLAG} .*its config cannot be read"):
        check_model(str(tmp_path), FLAG)


def test_a_hub_name_with_an_unreachable_hub_is_an_error_after_one_try(no_network):
    with pytest.raises(ValueError, match=rf"{FLAG} nobody/nothing: .*hub cannot be reached .*no route to host"):
        check_model("nobody/nothing", FLAG)
    assert len(no_network) == 1


def test_a_hub_name_offline_is_an_error_that_names_the_variable(no_network, monkeypatch):
    monkeypatch.setattr(pretrained, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=rf"{FLAG} nobody/nothing: .*HF_HUB_OFFLINE is set"):
        check_model("nobody/nothing", FLAG)
    assert no_network == []


def test_a_hub_that_answers_leaves_the_verdict_to_transformers(monkeypatch):
    def refuse(url, timeout):
        raise HTTPError(url, 403, "Forbidden", Message(), None)

    def missing(name, **_):
        raise OSError(f"{name} is not a valid model identifier")

    monkeypatch.setattr(pretrained, "urlopen", refuse)
    monkeypatch.setattr(pretrained, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pretrained.AutoConfig, "from_pretrained", missing)
    with pytest.raises(ValueError, match=rf"{FLAG} nobody/nothing: .*not a valid model identifier"):
        check_model("nobody/nothing", FLAG)


def test_a_cached_model_needs_no_connection(no_network, monkeypatch):
    monkeypatch.setattr(pretrained, "try_to_load_from_cache", lambda name, file: "/cache/config.json")
    monkeypatch.setattr(pretrained.AutoConfig, "from_pretrained", lambda name, **_: f"config of {name}")
    assert check_model("owner/model", FLAG) == "config of owner/model"
    assert no_network == []


def test_a_missing_tokenizer_is_an_error_that_names_the_flag(llama_folder):
    with pytest.raises(ValueError, match=rf"{FLAG} .*tokenizer cannot be loaded"):
        load_tokenizer(str(llama_folder), FLAG)


def test_no_tokenizer_is_made_up_for_a_folder_without_one(gpt2, tmp_path):
    gpt2().save_pretrained(tmp_path)  # transformers makes one of no tokens
    with pytest.raises(ValueError, match=r"no tokenizer files, such as tokenizer.json. Copy those.*$"):
        load_tokenizer(str(tmp_path), FLAG)


def test_a_token_without_embedding_is_refused_where_it_occurs(llama):
    known = tokenizer(pad_token="<pad>")
    config = llama(vocab_size=len(known) - 1).config  # as Gemma 3 of 1B
    check_token_ids(config, f"{FLAG} m", known, [[0, 1], [], [len(known) - 2]])
    last = known.convert_ids_to_tokens(len(known) - 1)
    with pytest.raises(
        ValueError, match=rf"^{FLAG} m: token '{last}' has the id {len(known) - 1}, .* knows {len(known)}"
    ):
        check_token_ids(config, f"{FLAG} m", known, [[0], [len(known) - 1, 1]])
    known.pad_token = last
    with pytest.raises(ValueError, match=f"embeddings of {len(known) - 1} ids"):
        check_token_ids(config, f"{FLAG} m", known, [[0]])


def test_end_of_sequence_ids_outside_the_vocabulary_are_named(gpt2, caplog):
    model = gpt2(eos_token_id=50256)
    with caplog.at_level(logging.WARNING, logger="openppo"):
        assert known_eos_token_ids(model, tokenizer(eos_token="a")) == [2]
    assert "outside the model's vocabulary of 40 tokens: 50256." in caplog.text
    caplog.clear()
    assert known_eos_token_ids(gpt2(eos_token_id=5), tokenizer(eos_token="a")) == [2, 5]
    assert caplog.text == ""


def test_dropout_is_removed_from_modules_and_from_plain_attributes():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.attention_dropout = 0.3
            self.attn_pdrop = 0.2
            self.layerdrop = 0.2
            self.jitter_noise = 0.2
            self.eps = 0.1

    model = nn.Sequential(Layer(), nn.Dropout(0.2))
    disable_dropout(model)
    layer = model[0]
    assert (layer.drop.p, layer.attention_dropout, layer.attn_pdrop, model[1].p, layer.eps) == (0.0, 0.0, 0.0, 0.0, 0.1)
    assert (layer.layerdrop, layer.jitter_noise) == (0.0, 0.0)
    ones = torch.ones(100)
    assert torch.equal(model[1].train()(ones), ones)


@torch.no_grad()
def test_routers_that_draw_experts_choose_as_in_evaluation_mode():
    torch.manual_seed(3)
    model = PhimoeForCausalLM(tiny_config("phimoe", router_jitter_noise=0.3)).eval()  # near ties share their weight
    ids = torch.randint(0, 64, (4, 12))
    published = model(ids).logits
    assert not torch.allclose(model.train()(ids).logits, published)
    disable_dropout(model)
    assert torch.equal(model.train()(ids).logits, published)
    assert torch.equal(model.eval()(ids).logits, published)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=96), 96),
        (GPT2Config(n_positions=96), 96),
        (MptConfig(max_seq_len=96), 96),
        (BloomConfig(seq_length=96), None),  # the length of its training, not of its positions
        (XLNetConfig(), None),
    ],
)
def test_the_context_is_found_by_each_of_its_names(config, length):
    assert context_length(config) == length
