"""A model from elsewhere runs no code here: not its own without the flag, and none that hides in a pickle."""

import json
import os
import pickle
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.pretrained import UntrustedModelError, check_model, load_tokenizer
from openppo.models.scalar_head import get_llm_for_sequence_regression

SIZES = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = LlamaConfig(vocab_size=40, max_position_embeddings=64, num_labels=1, **SIZES)


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path):
    """What code that runs would make."""
    return tmp_path / "executed"


def load_policy(folder):
    """As the commands do."""
    with model_error_context("--pretrain", str(folder)):
        return Actor(str(folder))


def load_reward_model(folder):
    """As the commands do."""
    with model_error_context("--reward_pretrain", str(folder)):
        return get_llm_for_sequence_regression(str(folder), "reward")


def test_the_pickles_of_these_tests_do_run_code(mark, tmp_path):
    torch.save({"a": Evil(mark)}, tmp_path / "evil.bin")
    torch.load(tmp_path / "evil.bin", weights_only=False)
    assert mark.exists()


@pytest.mark.parametrize(
    ("load", "flag", "kind"),
    [
        (load_policy, "--pretrain", LlamaForCausalLM),
        (load_reward_model, "--reward_pretrain", LlamaForSequenceClassification),
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "plain pickle"])
def test_a_pickle_with_code_is_refused_with_flag_and_reason(load, flag, kind, zipped, mark, tmp_path):
    folder = tmp_path / "model"
    CONFIG.save_pretrained(folder)
    content = {**kind(CONFIG).state_dict(), "extra": Evil(mark)}
    if zipped:
        torch.save(content, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(ValueError, match=f"^{flag} {folder}: its weights are a pickle file .* Use weights in"):
        load(folder)
    assert not mark.exists()


@pytest.mark.parametrize("load", [load_policy, load_reward_model])
def test_adapters_in_a_pickle_with_code_are_refused(load, mark, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapters"
    kind, task = (LlamaForCausalLM, "CAUSAL_LM") if load is load_policy else (LlamaForSequenceClassification, "SEQ_CLS")
    model = kind(CONFIG)
    model.save_pretrained(base)
    get_peft_model(model, LoraConfig(task_type=task, target_modules="all-linear")).save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    load(folder)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a": Evil(mark)}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=f"pretrain {folder}: its weights are a pickle file"):
        load(folder)
    assert not mark.exists()


def test_a_pickle_of_tensors_alone_is_read(tmp_path):
    model = LlamaForCausalLM(CONFIG)
    CONFIG.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    loaded = load_policy(tmp_path / "model").model.state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(loaded[name], weight)


def test_safetensors_are_preferred_to_a_pickle_beside_them(mark, tmp_path):
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "model")
    torch.save({"a": Evil(mark)}, tmp_path / "model" / "pytorch_model.bin")
    load_policy(tmp_path / "model")
    assert not mark.exists()


@pytest.mark.parametrize("n_bytes", [0, 10, 1000])
def test_a_pickle_that_is_cut_off_is_an_error_with_its_flag(n_bytes, tmp_path):
    folder = tmp_path / "model"
    CONFIG.save_pretrained(folder)
    torch.save(LlamaForCausalLM(CONFIG).state_dict(), folder / "pytorch_model.bin")
    (folder / "pytorch_model.bin").write_bytes((folder / "pytorch_model.bin").read_bytes()[:n_bytes])
    with pytest.raises(ValueError, match=f"^--pretrain {folder}: "):
        load_policy(folder)


# Code of its own

CODE = """
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers import PreTrainedTokenizerFast


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnTransformer(LlamaModel):
    config_class = OwnConfig


AutoModel.register(OwnConfig, OwnTransformer, exist_ok=True)  # the classifier makes its transformer so


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig


class OwnClassifier(LlamaForSequenceClassification):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN = {
    "AutoConfig": "own.OwnConfig",
    "AutoModelForCausalLM": "own.OwnModel",
    "AutoModelForSequenceClassification": "own.OwnClassifier",
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of a model with code of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own_model"
    LlamaForSequenceClassification(CONFIG).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": OWN}))
    (folder / "own.py").write_text(CODE)
    return folder


def never_asks(prompt=""):
    pytest.fail(f"it asks {prompt}")


def test_code_of_a_model_runs_with_the_flag_only(own, monkeypatch):
    monkeypatch.setattr("builtins.input", never_asks)
    message = f"{own}: it brings Python code of its own .* if you trust it, pass --trust_remote_code"
    for load in (
        lambda trust: check_model(str(own), "--pretrain", trust),
        lambda trust: get_llm_for_sequence_regression(str(own), "reward", trust_remote_code=trust),
    ):
        with pytest.raises(ValueError, match=message):
            load(False)
        assert "Own" in str(load(True))


def test_a_policy_with_code_of_its_own_is_loaded_with_the_flag(own):
    shutil.rmtree(own)
    LlamaForCausalLM(CONFIG).save_pretrained(own)
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": OWN}))
    (own / "own.py").write_text(CODE)
    with pytest.raises(UntrustedModelError, match=f"^{own}: it brings Python code of its own"):
        Actor(str(own))
    assert type(Actor(str(own), trust_remote_code=True).model).__name__ == "OwnModel"


def test_code_of_a_tokenizer_runs_with_the_flag_only(own, monkeypatch):
    monkeypatch.setattr("builtins.input", never_asks)
    core = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?").save_pretrained(own)
    config = json.loads((own / "tokenizer_config.json").read_text())
    changes = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    (own / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UntrustedModelError, match=f"^--pretrain {own}: it brings Python code of its own"):
        load_tokenizer(str(own), "--pretrain")
    assert type(load_tokenizer(str(own), "--pretrain", trust_remote_code=True)).__name__ == "OwnTokenizer"
