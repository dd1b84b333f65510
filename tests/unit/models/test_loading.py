"""What a user can get wrong when naming a model is said at once, and ids of a model are all found."""

import pytest
import torch
from transformers import (
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    Phi3Config,
    PhimoeForCausalLM,
    XLNetConfig,
)

from openppo.models import pretrained
from openppo.models.disabling import disable_dropout
from openppo.models.pretrained import (
    check_model,
    check_token_ids,
    context_length,
    eos_token_ids,
    load_tokenizer,
)
from tests.architectures import tiny_config

FLAG = "--pretrain"
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [4.0] * 48,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./nowhere", "../nowhere", "~/nowhere", "models/of/mine"]
)
def test_a_path_that_does_not_exist_is_an_error_without_asking_the_hub(
    name, llama_folder, monkeypatch
):
    assert check_model(str(llama_folder), FLAG).model_type == "llama"
    monkeypatch.setattr(
        pretrained.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it asks")
    )
    with pytest.raises(ValueError, match=rf"{FLAG} {name}: no such local folder.*Check the path"):
        check_model(name, FLAG)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("model.safetensors", "", "no such local folder"),
        ("notes.txt", "", "its config cannot be read: .* config.json"),
        *(
            ("config.json", text, "its config cannot be read")
            for text in ("{", '{"model_type": "none"}', "{}")
        ),
    ],
)
def test_what_is_no_model_folder_is_an_error_that_names_the_flag(tmp_path, file, text, says):
    (tmp_path / file).write_text(text)
    name = tmp_path / file if file == "model.safetensors" else tmp_path
    with pytest.raises(ValueError, match=f"^{FLAG} {name}: .*{says}"):
        check_model(str(name), FLAG)


@pytest.mark.parametrize("offline", [False, True])
def test_a_missing_folder_that_looks_like_a_name_of_the_hub_is_named(
    tmp_path, monkeypatch, offline
):
    def no_network(*_, **__):
        raise OSError(
            "We couldn't connect to 'https://huggingface.co'.\nCheck your internet connection."
        )

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained.AutoConfig, "from_pretrained", no_network)
    monkeypatch.setattr(pretrained.constants, "HF_HUB_OFFLINE", offline)
    remedy = (
        "HF_HUB_OFFLINE is set: unset it, or name a folder"
        if offline
        else "Check the path, the name and the"
    )
    message = rf"^{FLAG} ckpt/nosuch: no such folder here, and no model .* \(We couldn't connect to .*\)\. {remedy}"
    with pytest.raises(ValueError, match=message) as failure:
        check_model("ckpt/nosuch", FLAG)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("make", "says"), [("llama", ""), ("gpt2", "no tokenizer files, such as .* Copy those of")]
)
def test_a_missing_tokenizer_is_an_error_that_names_the_flag(make, says, request, tmp_path):
    request.getfixturevalue(make)().save_pretrained(
        tmp_path
    )  # of GPT-2 transformers makes one of no tokens
    with pytest.raises(
        ValueError, match=rf"^{FLAG} {tmp_path}: its tokenizer cannot be loaded: .*{says}"
    ):
        load_tokenizer(str(tmp_path), FLAG)


def test_a_token_without_embedding_is_refused_where_it_occurs(llama, make_tokenizer):
    known = make_tokenizer()
    n = len(known)
    last = known.convert_ids_to_tokens(n - 1)
    config = llama(vocab_size=n - 1).config  # as Gemma 3 of 1B
    check_token_ids(config, f"{FLAG} m", known, [[0, 1], [], [n - 2]])
    with pytest.raises(
        ValueError, match=rf"^{FLAG} m: token '{last}' has the id {n - 1}, .* knows {n}"
    ):
        check_token_ids(config, f"{FLAG} m", known, [[0], [n - 1, 1]])
    known.pad_token = last
    with pytest.raises(ValueError, match=f"embeddings of {n - 1} ids"):
        check_token_ids(config, f"{FLAG} m", known, [[0]])


def test_end_of_sequence_ids_that_the_model_cannot_sample_are_left_out(gpt2, make_tokenizer):
    for configured, expected in ((50256, [1]), (5, [1, 5])):
        assert eos_token_ids(gpt2(eos_token_id=configured), make_tokenizer()) == expected


@torch.no_grad()
def test_routers_that_draw_experts_choose_as_in_evaluation_mode():
    torch.manual_seed(3)
    model = PhimoeForCausalLM(
        tiny_config("phimoe", router_jitter_noise=0.3)
    ).eval()  # near ties share their weight
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
        (LlamaConfig(max_position_embeddings=16, rope_parameters=DYNAMIC), 16),
        (
            Phi3Config(
                max_position_embeddings=64,
                original_max_position_embeddings=16,
                rope_parameters=LONG,
            ),
            16,
        ),
    ],
)
def test_the_context_is_found_by_each_of_its_names(config, length):
    assert context_length(config) == length
