"""Process rewards: p(good) at each placeholder, put where the step ends in the response or made into one number."""

from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from openppo.config import ProcessConfig, RewardConfig, RowsConfig, SupervisedConfig
from openppo.datasets import load_process_examples, number_rows, render_prompt
from openppo.models.batching import MicroBatchSize
from openppo.models.equal_batches import equal_batches
from openppo.models.scalar_head import ProcessRewardModel
from openppo.rewards.build import ScorerSetup
from openppo.rewards.process import ProcessScorer
from openppo.strategy.comm import InferenceStrategy
from openppo.types import Prompt, SingleProcess
from tests.conftest import save_tokenizer

PLACEHOLDER, GOOD, BAD, STEP = 20, 21, 22, 15  # the ids of q, r, s and l; "l" separates steps
RESPONSES = ["ablcldefla", "a", "", "ll", "bcld", "eeelfff"]
STEPS = [["ab", "c", "def", "a"], ["a"], [], [], ["bc", "d"], ["eee", "fff"]]
ENDS = [[1, 3, 7, 9], [0], [], [], [1, 3], [2, 6]]


@pytest.fixture
def sample_of(make_sample, make_tokenizer):
    """A response to "hi", ended by EOS."""
    encode = make_tokenizer()
    return lambda text: make_sample(
        encode("hi")["input_ids"], [*encode(text)["input_ids"], 1], text="hi"
    )


def scorer_of(model, tokenizer, micro=2, context=None, **options):
    """Reads "hi", then each step and "q" after it, without separators."""

    def render(prompt, steps):
        ids, places = tokenizer(prompt.text)["input_ids"], []
        for step in steps:
            ids = [*ids, *tokenizer(step.removeprefix("l"))["input_ids"], PLACEHOLDER]
            places.append(len(ids) - 1)
        return ids, places

    read = (
        render,
        tokenizer,
        (GOOD, BAD),
        RewardConfig(prm_pretrain="judge", step_separator="l", **options),
    )
    where, run = (
        ("--prm_pretrain judge", context, 0),
        (MicroBatchSize(micro), SingleProcess(), torch.device("cpu")),
    )
    return ProcessScorer(model, *read, *where, *run)


@pytest.mark.parametrize("micro", [1, 2, 9])
def test_a_step_is_worth_the_probability_of_good_at_its_placeholder(
    models, make_tokenizer, micro, sample_of
):
    tokenizer, model = make_tokenizer(), models["llama"]
    samples = [sample_of(response) for response in RESPONSES]
    scorer = scorer_of(ProcessRewardModel(model), tokenizer, micro, reward_weights=("prm=2",))
    for sample, score, steps, ends in zip(samples, scorer.score(samples), STEPS, ENDS, strict=True):
        expected = [0.0] * len(sample.last.token_ids)
        read = "hi"
        for step, end in zip(steps, ends, strict=True):
            read += step + "q"
            logits = model(torch.tensor([tokenizer(read)["input_ids"]])).logits[0, -1]
            expected[len("hi") + end] = (
                2 * (logits[GOOD].exp() / (logits[GOOD].exp() + logits[BAD].exp())).item()
            )
        assert score.rewards == {}
        assert score.token_rewards == pytest.approx(expected, abs=1e-5)


def says(probabilities):
    """A model that gives the steps of a single response these probabilities of being good."""

    def model(inputs, places):
        logits = torch.zeros(len(probabilities), 24)
        logits[:, GOOD] = torch.tensor(probabilities).logit()
        return logits

    return model


@pytest.mark.parametrize(
    ("aggregate", "reward"), [("min", 0.2), ("mean", 0.5), ("last", 0.4), ("product", 0.072)]
)
def test_steps_become_one_reward_and_no_number_is_an_error(
    make_tokenizer, aggregate, reward, sample_of
):
    tokenizer = make_tokenizer()
    scorer = scorer_of(says([0.9, 0.2, 0.4]), tokenizer, prm_aggregate=aggregate)
    [score] = scorer.score([sample_of("ablcld")])
    assert score.token_rewards is None
    assert score.rewards == {"prm": pytest.approx(reward)}
    [blank] = scorer_of(says([]), tokenizer, prm_aggregate=aggregate).score([sample_of("ll")])
    assert blank.rewards == {"prm": 0.0}
    with pytest.raises(ValueError, match="--prm_pretrain judge returned nan for prompt 'hi'"):
        scorer_of(says([float("nan")]), tokenizer).score([sample_of("a")])


def test_steps_before_the_context_of_the_model_are_not_judged(make_tokenizer, caplog, sample_of):
    tokenizer = make_tokenizer()
    scorer = scorer_of(says([0.25, 0.75]), tokenizer, context=4)  # of "hiabqcqdq"
    [score] = scorer.score([sample_of("ablcld")])
    assert score.token_rewards == pytest.approx([0, 0, 0, 0, 0, 0.25, 0, 0.75, 0])
    assert score.step_ends == [False, False, False, False, False, True, False, True, False]
    assert "--prm_pretrain judge reads 4 tokens, but prompt 'hi' has 9 of its tokens" in caplog.text


def test_steps_lie_within_the_spans_of_actions(game, make_tokenizer):
    scorer, rendered = scorer_of(lambda sequences, places: torch.zeros(3, 30), make_tokenizer()), []
    scorer.options = RewardConfig(step_separator="z")
    scorer.render = lambda _, steps: rendered.append(steps) or ([1] * 9, [2, 5, 8])
    assert scorer.score([game])[0].token_rewards == [0, 0, 0, 0.5, 0, 0, 0.5, 0, 0.5, 0]
    assert rendered == [["cd", "zc", "zd"]]


def test_batches_hold_no_more_tokens_than_the_budget_and_are_as_many_on_every_rank():
    class Other(SingleProcess):
        def all_reduce(self, tensor, op="sum"):
            return tensor.clamp(min={"max": 4}[op])

    assert equal_batches([3, 0, 7, 7, 0], MicroBatchSize(2), Other()) == [[2, 3], [0], [], []]
    assert equal_batches([], MicroBatchSize(2), SingleProcess()) == []
    assert equal_batches([30, 9, 10, 0, 8], MicroBatchSize(8, 30), SingleProcess()) == [
        [0],
        [2, 1, 4],
    ]


LETTERS = "abcdefghijklmnopqrstuvwxyz#+-\n "
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
QUESTION, STEPS_OF_TEXT = "what", ["one", "and two", "three"]


@pytest.fixture
def judge(tmp_path):
    save_tokenizer(tmp_path, LETTERS, chat_template=CHAT)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=3 + len(LETTERS), **sizes)).save_pretrained(tmp_path)
    return tmp_path


def built_scorer(judge, policy, prompts=(), template=None, **options):
    source = RewardConfig(prm_pretrain=str(judge), prm_placeholder_token="#", **options)
    loading = {"bf16": False, "flash_attn": False, "trust_remote_code": False}
    run = InferenceStrategy(False), prompts, "policy", MicroBatchSize(2), loading
    return ScorerSetup(source, policy, *run, input_template=template).build()


@pytest.mark.parametrize(
    ("template", "policy_chats", "judge_chats"),
    list(product([None, "q {} a "], *[[False, True]] * 2)),
)
def test_scoring_reads_what_training_reads(
    judge, tmp_path, template, policy_chats, judge_chats, make_sample
):
    own = PreTrainedTokenizerFast.from_pretrained(judge)
    policy = save_tokenizer(
        tmp_path / "policy", LETTERS[::-1], chat_template=CHAT.replace("[0]", "[:2]")
    )
    prompt = render_prompt(
        QUESTION, policy, RowsConfig(input_template=template, apply_chat_template=policy_chats)
    )
    content = template.replace("{}", QUESTION) if template else QUESTION
    messages = [{"role": "user", "content": content}] if policy_chats else None
    written = [*policy("\n\n".join(STEPS_OF_TEXT))["input_ids"], policy.eos_token_id]
    response = make_sample(prompt.token_ids, written, text=prompt.text, messages=messages)
    scorer = built_scorer(
        judge, policy, [response.prompt], template, prm_apply_chat_template=judge_chats
    )
    assert isinstance(scorer, ProcessScorer)
    read = scorer.read(response)
    supervised = SupervisedConfig(
        "model", "data", input_template=template, apply_chat_template=judge_chats
    )
    rows = number_rows(
        [{"question": QUESTION, "steps": STEPS_OF_TEXT, "labels": [True, False, True]}]
    )
    [example] = load_process_examples(rows, own, supervised, ProcessConfig(placeholder_token="#"))
    assert read.token_ids == example.token_ids
    assert read.places == [t for t, label in enumerate(example.labels) if label != -100]
    assert read.ends == [len(prompt.token_ids) + end for end in (2, 11, 18)]
    assert set(scorer.score([response])[0].rewards) == set()


def test_a_chat_template_that_the_judge_lacks_or_that_refuses_chats_is_named_before_the_run(judge):
    (judge / "chat_template.jinja").write_text(
        "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}"
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(judge)
    asked = [{"role": "system", "content": "be"}, {"role": "user", "content": "ask"}]
    message = f"--prm_pretrain {judge}: the chat template refuses messages with the roles system, user: no system"
    with pytest.raises(ValueError, match=message):
        built_scorer(
            judge, tokenizer, [Prompt("ask", [2], messages=asked)], prm_apply_chat_template=True
        )
    (judge / "chat_template.jinja").unlink()
    with pytest.raises(
        ValueError,
        match="prm_apply_chat_template: the tokenizer of --prm_pretrain .* no chat templ",
    ):
        built_scorer(judge, tokenizer, prm_apply_chat_template=True)
