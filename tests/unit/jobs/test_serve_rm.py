"""The job of serve_rm: how texts become token ids of the reward model."""

import time

import pytest

from openppo.config import ServeRMConfig
from openppo.jobs.serve_rm import build_server, encode_conversation
from openppo.models.scalar_head import get_llm_for_sequence_regression
from tests.conftest import save_tokenizer
from tests.images import llava


def test_a_text_with_the_token_of_an_image_is_refused(tmp_path):
    """Or the model would score it without the image."""
    tokenizer, model = save_tokenizer(tmp_path, "ab", ["<image>"]), llava()
    model.config.image_token_id = model.config.image_token_index = tokenizer.convert_tokens_to_ids(
        "<image>"
    )
    model.save_pretrained(tmp_path)
    get_llm_for_sequence_regression(str(tmp_path), "critic").model.save_pretrained(tmp_path)
    server = build_server(ServeRMConfig(str(tmp_path), port=0))
    assert server.encode("ab")[-1] == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="serve_rm reads no images.*use --reward_pretrain"):
        server.encode("a<image>b")
    server.listener.close()


@pytest.mark.parametrize(
    ("text", "ids", "pad"),
    [
        ("ab<eos><eos><pad>", [4, 5, 1], "<pad>"),
        ("<pad><pad>ab<eos>\n", [4, 5, 1], "<pad>"),
        ("a<eos>b", [4, 1, 5, 1], "<pad>"),
        ("a<pad>b", [4, 0, 5, 1], "<pad>"),
        ("abcdefgh", [8, 9, 10, 11, 1], "<pad>"),
        ("<eos>ab<eos><eos>", [4, 5, 1], "<eos>"),
        ("ab<eos>", [4, 5, 1], None),
        ("a" + "<eos>" * 2000 + "abc", [1, 4, 5, 6, 1], "<eos>"),
    ],
)
def test_a_conversation_ends_with_one_eos_and_has_no_padding(text, ids, pad, make_tokenizer):
    """Also of a text that was made to take long: some regular expressions took twice as long for each EOS more."""
    assert encode_conversation(make_tokenizer(pad=pad), text, max_len=5) == ids


@pytest.mark.parametrize(
    ("text", "token"),
    [("ab{}", "<pad>"), ("{}ab", "<pad>"), ("ab{}", "<eos>"), ("ab{} ", "<eos>\n")],
)
def test_the_time_for_padding_is_linear(text, token, make_tokenizer):
    tokenizer, seconds = make_tokenizer(), []
    for n in (20_000, 160_000):  # quadratic: 64 times as long
        start = time.process_time()
        assert encode_conversation(tokenizer, text.format(token * n), max_len=5) == [4, 5, 1]
        seconds.append(time.process_time() - start)
    assert seconds[1] < 30 * max(seconds[0], 0.01), seconds
