"""A process reward model scores exactly the token ids that train_prm would train it on."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from openppo.config import ProcessConfig, RewardConfig, SupervisedConfig
from openppo.datasets import load_process_examples, number_rows, render_prompt
from openppo.models.padding import MicroBatchSize
from openppo.rewards.build import ScorerSetup, build_scorer
from openppo.rewards.process import ProcessScorer
from openppo.types import FinishReason, Prompt, SingleProcess, Trajectory

LETTERS = "abcdefghijklmnopqrstuvwxyz#+-\n "
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
QUESTION, STEPS = "what", ["one", "and two", "three"]


def tokenizer_of(folder, letters, chat_template):
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(["<unk>", "<eos>", *letters])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<eos>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
    made.chat_template = chat_template
    made.save_pretrained(folder)
    return made


@pytest.fixture
def judge(tmp_path):
    tokenizer_of(tmp_path, LETTERS, CHAT)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=2 + len(LETTERS), **sizes)).save_pretrained(tmp_path)
    return tmp_path


def scorer_of(judge, policy, prompts=(), template=None, **options):
    source = RewardConfig(prm_pretrain=str(judge), prm_placeholder_token="#", **options)
    setup = ScorerSetup(
        SingleProcess(),
        torch.device("cpu"),
        lambda m: m,
        prompts,
        "policy",
        size=MicroBatchSize(2),
        input_template=template,
    )
    return build_scorer(source, policy, setup)


@pytest.mark.parametrize("template", [None, "q {} a "])
@pytest.mark.parametrize("policy_chats", [False, True])
@pytest.mark.parametrize("judge_chats", [False, True])
def test_scoring_reads_what_training_reads(judge, tmp_path, template, policy_chats, judge_chats):
    own = PreTrainedTokenizerFast.from_pretrained(judge)
    policy = tokenizer_of(tmp_path / "policy", LETTERS[::-1], CHAT.replace("[0]", "[:2]"))  # ids of its own
    text, ids = render_prompt(QUESTION, policy, input_template=template, apply_chat_template=policy_chats)
    content = template.replace("{}", QUESTION) if template else QUESTION
    prompt = Prompt(text, ids, messages=[{"role": "user", "content": content}] if policy_chats else None)
    ids = [*ids, *policy("\n\n".join(STEPS))["input_ids"], policy.eos_token_id]
    mask = [place >= len(prompt.token_ids) for place in range(len(ids))]
    rest: Any = (mask, [0.0] * len(ids), [0] * len(ids))
    response = Trajectory(ids, *rest, FinishReason.STOP, prompt, group=0)

    scorer = scorer_of(judge, policy, [prompt], template, prm_apply_chat_template=judge_chats)
    assert isinstance(scorer, ProcessScorer)
    read = scorer.text(response)
    supervised = SupervisedConfig("model", "data", input_template=template, apply_chat_template=judge_chats)
    rows = number_rows([{"question": QUESTION, "steps": STEPS, "labels": [True, False, True]}])
    [example], _ = load_process_examples(rows, own, supervised, ProcessConfig(placeholder_token="#"))
    assert read.token_ids == example.token_ids
    assert read.places == [t for t, label in enumerate(example.labels) if label != -100]
    assert read.ends == [len(prompt.token_ids) + end for end in (2, 11, 18)]
    assert set(scorer.score([response])[0].rewards) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"prm_reward_tokens": ("good", "-")},
            "--prm_reward_tokens 'good' is 4 tokens of the tokenizer of --prm_pretrain",
        ),
        (
            {"prm_apply_chat_template": True},
            "--prm_apply_chat_template: the tokenizer of --prm_pretrain .* no chat template",
        ),
    ],
)
def test_what_the_judge_lacks_is_named(judge, options, message):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(judge)
    (judge / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=message):
        scorer_of(judge, tokenizer, **options)


def test_a_chat_that_the_judge_cannot_render_is_found_before_the_run(judge):
    (judge / "chat_template.jinja").write_text("{{ raise_exception('no system') if messages[0]['role'] == 'system' }}")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(judge)
    asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "ask"}]
    message = f"--prm_pretrain {judge}: the chat template refuses messages with the roles system, user: no system"
    with pytest.raises(ValueError, match=message):
        scorer_of(judge, tokenizer, [Prompt("ask", [2], messages=asked)], prm_apply_chat_template=True)
