"""A model from elsewhere runs no code here: not its own without the flag, and none that hides in a pickle."""

import json
import os
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.models.actor import Actor
from openppo.models.loading import model_error_context
from openppo.models.pretrained import check_model, load_tokenizer
from openppo.models.scalar_head import get_llm_for_sequence_regression

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
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


@pytest.fixture
def folder(tmp_path):
    """A folder with a config and without weights."""
    CONFIG.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(kind, folder, **options):
    """As the commands do."""
    with model_error_context("--pretrain", str(folder)):
        if kind is LlamaForCausalLM:
            return Actor(str(folder), **options)
        return get_llm_for_sequence_regression(str(folder), "reward", **options)


TASKS = {LlamaForCausalLM: "CAUSAL_LM", LlamaForSequenceClassification: "SEQ_CLS"}
BOTH = pytest.mark.parametrize("kind", TASKS)


@BOTH
def test_a_pickle_with_code_is_refused_with_flag_and_reason(kind, mark, folder):
    file = folder / "pytorch_model.bin"
    for content in (pickle.dumps(Evil(mark)), {**kind(CONFIG).state_dict(), "extra": Evil(mark)}):
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
        with pytest.raises(
            ValueError,
            match=f"^--pretrain {folder}: its weights are a pickle file .* Use weights in",
        ):
            load(kind, folder)
        assert not mark.exists()
    torch.load(file, weights_only=False)
    assert mark.exists(), "else this test claims nothing"


@BOTH
def test_adapters_in_a_pickle_with_code_are_refused(kind, mark, tmp_path):
    base, folder = tmp_path / "base", tmp_path / "adapters"
    kind(CONFIG).save_pretrained(base)
    options = LoraConfig(task_type=TASKS[kind], target_modules="all-linear")
    get_peft_model(kind.from_pretrained(base), options).save_pretrained(folder)
    load(kind, folder)
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"a": Evil(mark)}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=f"pretrain {folder}: its weights are a pickle file"):
        load(kind, folder)
    assert not mark.exists()


def test_a_pickle_of_tensors_is_read_unless_it_is_cut_off_or_safetensors_are_there(folder, mark):
    file, model = folder / "pytorch_model.bin", LlamaForCausalLM(CONFIG)
    torch.save(model.state_dict(), file)
    loaded = load(LlamaForCausalLM, folder).model.state_dict()
    assert all(loaded[name].equal(weight) for name, weight in model.state_dict().items())
    whole = file.read_bytes()
    for n_bytes in (0, 10, 1000):
        file.write_bytes(whole[:n_bytes])
        with pytest.raises(ValueError, match=f"^--pretrain {folder}: "):
            load(LlamaForCausalLM, folder)
    torch.save({"a": Evil(mark)}, file)
    model.save_pretrained(folder)
    load(LlamaForCausalLM, folder)
    assert not mark.exists()


CODE = """
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel
from transformers import PreTrainedTokenizerFast


class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnTransformer(LlamaModel):
    config_class = OwnConfig

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig

class OwnClassifier(LlamaForSequenceClassification):
    config_class = OwnConfig

AutoModel.register(OwnConfig, OwnTransformer, exist_ok=True)  # the classifier makes its transformer so

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
OWN = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
OWN["AutoModelForSequenceClassification"] = "own.OwnClassifier"


def change(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@BOTH
def test_code_of_a_model_or_tokenizer_runs_with_the_flag_only(
    kind, make_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail(f"it asks {prompt}"))
    folder = tmp_path / "own_model"
    kind(CONFIG).save_pretrained(folder)
    change(folder / "config.json", model_type="own", auto_map=OWN)
    (folder / "own.py").write_text(CODE)
    make_tokenizer().save_pretrained(folder)
    auto_map = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=auto_map)
    for read in (
        lambda trust: check_model(str(folder), "--pretrain", trust),
        lambda trust: load_tokenizer(str(folder), "--pretrain", trust_remote_code=trust),
        lambda trust: load(kind, folder, trust_remote_code=trust),
    ):
        message = f"^--pretrain {folder}: it brings Python code of its own .* if you trust it, pass --trust_remote_code"
        with pytest.raises(ValueError, match=message):
            read(False)
        loaded = read(True)
        assert "Own" in f"{type(loaded).__name__} {loaded}"
