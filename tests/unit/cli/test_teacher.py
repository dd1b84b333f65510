"""A teacher that the student cannot learn from is refused before its weights are loaded."""

import pytest

NONE = "ppo --reward_fn none --dry_run"


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.setattr(
        "transformers.PreTrainedModel.from_pretrained", lambda *a, **k: pytest.fail("weights")
    )


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        ("other_vocabulary", "has another vocabulary than --pretrain"),
        ("other_end", "ends responses with <unk>, which does not end those of --pretrain"),
        ("none", "no such local folder"),
    ],
)
def test_a_teacher_of_other_tokens_is_refused(teacher, says, run_line, put):
    ended = run_line(f"{NONE} --ref_pretrain M/{teacher}")
    assert ended.code == 2
    assert f"error: {put(f'--ref_pretrain M/{teacher}')}" in ended.stderr
    assert says in ended.stderr


def test_stop_token_ids_of_the_error_make_another_end_one_of_the_students(run_line):
    ended = run_line(f"{NONE} --ref_pretrain M/other_end")
    assert "Add 2 to --stop_token_ids" in ended.stderr
    ended = run_line(f"{NONE} --ref_pretrain M/other_end --stop_token_ids 2")
    assert ended.code == 0, ended.stderr


def test_a_teacher_with_padded_embeddings_is_accepted(run_line):
    ended = run_line(f"{NONE} --ref_pretrain M/padded")
    assert ended.code == 0, ended.stderr
    assert "chat template" not in ended.stderr


def test_another_chat_template_is_a_warning_where_one_renders(run_line, put):
    warning = put("--ref_pretrain M/actor has no chat template, and reads prompts as that of")
    line = f"{NONE} --pretrain M/chat --ref_pretrain M/actor"
    ended = run_line(f"{line} --apply_chat_template")
    assert (ended.code, ended.stderr.count(warning)) == (0, 1), ended.stderr
    assert warning not in run_line(line).stderr
