"""From options to sources of rewards: their names, what a reward model reads, and mistakes found before models load."""

import logging
import shutil
import string

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from openppo.config import RewardConfig
from openppo.models.batching import MicroBatchSize
from openppo.rewards import CombinedScorer, FunctionScorer, ModelScorer, VerifiableScorer
from openppo.rewards import build as module
from openppo.rewards.build import ScorerSetup
from openppo.strategy.comm import InferenceStrategy
from openppo.types import Prompt
from tests.conftest import save_tokenizer
from tests.unit.rewards.conftest import score_by_transformers

LETTERS = string.ascii_lowercase + " "
PROMPTS = [Prompt("ab", [3, 4], label="c", row={"answer": "c"})]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An actor, reward models of the same and another vocabulary, and functions."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)

    def config(n_letters, **options):
        sizes = {
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        sizes |= {"vocab_size": 3 + n_letters, "max_position_embeddings": 32}
        return LlamaConfig(initializer_range=0.5, **sizes, **options)

    LlamaForCausalLM(config(27)).save_pretrained(root / "actor")
    save_tokenizer(root / "actor", LETTERS)
    reward = LlamaForSequenceClassification(config(27, num_labels=1, mean=2.0, std=4.0))
    for name in ("same", "other"):
        reward.save_pretrained(root / name)
    save_tokenizer(root / "same", LETTERS)
    save_tokenizer(root / "other", LETTERS[::-1])
    LlamaForSequenceClassification(config(30, num_labels=1)).save_pretrained(root / "larger")
    shutil.copytree(root / "other", root / "weightless")
    (root / "weightless" / "model.safetensors").unlink()
    (root / "other" / "chat_template.jinja").write_text("{{ raise_exception('no judge') }}")
    (root / "f.py").write_text(
        "def reward_fn(response, answer):\n    return float(response == answer)\n"
    )
    (root / "dapo.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': -1.0, 'acc': False, 'pred': solution_str}\n"
    )
    (root / "openrlhf.py").write_text(
        "import torch\n"
        "def reward_func(queries, prompts, labels):\n    return torch.tensor([float(len(q)) for q in queries])\n"
    )
    return root


@pytest.fixture
def build(folder):
    """``build(prompts=..., normalize=..., **options)``, where M/ is the folder of models."""

    def run(prompts=PROMPTS, normalize=False, function_flag="--reward_fn", **options):
        placed = {
            k: v.replace("M/", f"{folder}/") if isinstance(v, str) else v
            for k, v in options.items()
        }
        source = RewardConfig(**placed)
        source.validate()
        actor = str(folder / "actor")
        loading = {"bf16": False, "flash_attn": False, "trust_remote_code": False}
        return ScorerSetup(
            source,
            AutoTokenizer.from_pretrained(actor),
            InferenceStrategy(False),
            prompts=prompts,
            actor=actor,
            size=MicroBatchSize(2),
            loading=loading,
            normalize=normalize,
            function_flag=function_flag,
        ).build()

    return run


@pytest.fixture
def sample_of(make_sample):
    """A finished response, in the actor's tokens."""
    prompt = {"text": "ab", "label": "c", "row": {"answer": "c"}}
    return lambda text: make_sample([3, 4], [*(3 + LETTERS.index(c) for c in text), 1], **prompt)


def test_a_single_source_gives_a_reward_named_reward(build, sample_of):
    for kind, options in (
        (FunctionScorer, {"reward_fn": "M/f.py"}),
        (FunctionScorer, {"remote_rm_url": "M/openrlhf.py"}),
        (VerifiableScorer, {"verifiable_reward": ("exact_match",)}),
        (ModelScorer, {"reward_pretrain": "M/same"}),
    ):
        scorer = build(**options)
        assert isinstance(scorer, kind)
        assert list(scorer.score([sample_of("c")])[0].rewards) == ["reward"]


def test_weights_decide_whether_keys_beside_a_score_are_rewards(build, sample_of, folder):
    named = {(): {"reward": -1}, ("score=2",): {"score": -1}, ("acc=2",): {"score": -1, "acc": 0}}
    for weights, rewards in named.items():
        (score,) = build(reward_fn="M/dapo.py", reward_weights=weights).score([sample_of("c")])
        assert (score.rewards, score.notes) == (rewards, {"pred": "c"})
    (score,) = build(reward_fn="M/dapo.py", verifiable_reward=("exact_match",)).score(
        [sample_of("c")]
    )
    assert score.rewards == {"reward_fn": -1, "exact_match": 1}
    scorer = build(reward_fn="M/dapo.py", function_flag="--eval_reward_fn")
    assert scorer.weighted is None, "evaluations have none"


def test_compute_score_is_found_and_runs_in_processes(build, sample_of):
    scorer = build(reward_fn="M/dapo.py", reward_workers=1)
    assert scorer.function.n_processes > 0
    assert scorer.score([sample_of("cd")])[0].notes == {"pred": "cd"}


def test_several_sources_are_named_by_their_kind(build, sample_of):
    files = {"reward_fn": "M/f.py", "remote_rm_url": "M/openrlhf.py", "reward_pretrain": "M/same"}
    scorer = build(**files, verifiable_reward=("exact_match", "length:4"))
    assert isinstance(scorer, CombinedScorer)
    assert scorer.collective
    (score,) = scorer.score([sample_of("c")])
    alone = build(reward_pretrain="M/same").score([sample_of("c")])[0].rewards["reward"]
    expected = {"reward_fn": 1.0, "remote": len("abc<eos>"), "exact_match": 1.0, "length": 0.5}
    assert score.rewards == expected | {"reward_model": pytest.approx(alone)}


@pytest.mark.parametrize(
    ("model", "ids", "log"),
    [
        ("same", [3, 4, 5, 6, 1], "reads the policy's tokens"),
        (
            "other",
            [29, 28, 27, 26, 1],
            "reads the text, written again with its own tokenizer and chat template",
        ),
    ],
)
def test_a_reward_model_reads_the_policys_ids_or_its_own(
    model, ids, log, build, folder, caplog, sample_of
):
    caplog.set_level(logging.INFO, "openppo")
    (score,) = build(reward_pretrain=f"M/{model}").score([sample_of("cd")])
    raw = score_by_transformers(
        LlamaForSequenceClassification.from_pretrained(folder / model).eval(), ids
    )
    assert score.rewards["reward"] == pytest.approx(raw, abs=1e-5)
    assert log in caplog.text
    (score,) = build(reward_pretrain=f"M/{model}", normalize=True).score([sample_of("cd")])
    assert score.rewards["reward"] == pytest.approx((raw - 2.0) / 4.0, abs=1e-5), (
        "the model's own mean and std"
    )


def test_a_sample_beyond_the_context_is_cut_at_the_front_and_logged(
    build, folder, caplog, sample_of
):
    sample = sample_of("c" * 20 + "d" * 20)
    (score,) = build(reward_pretrain="M/same").score([sample])
    model = LlamaForSequenceClassification.from_pretrained(folder / "same").eval()
    assert score.rewards["reward"] == pytest.approx(
        score_by_transformers(model, sample.last.token_ids[-32:]), abs=1e-5
    )
    assert f"--reward_pretrain {folder}/same reads 32 tokens, but prompt 'ab' has 43" in caplog.text


def test_a_sample_that_the_template_refuses_is_named(build, make_sample):
    sample = make_sample([4], [5, 1], messages=[{"role": "judge", "content": "a"}])
    with pytest.raises(
        ValueError,
        match="^--reward_pretrain .*: prompt 'ask': the chat template refuses .*: no judge",
    ):
        build(reward_pretrain="M/other").score([sample])


def test_a_functions_options_reach_it(build, folder, sample_of):
    (folder / "steps.py").write_text(
        "def reward_fn(response):\n    return [1.0] * response.count('z') if response else 1 / 0\n"
    )
    options = {"step_separator": "z", "reward_error_value": -3.0, "reward_weights": ("reward=0.5",)}
    scorer = build(reward_fn="M/steps.py", **options, reward_workers=2, reward_timeout=60.0)
    assert (scorer.function.n_processes, scorer.function._seconds) == (2, 60.0)
    first, second = scorer.score([sample_of("azbz"), sample_of("")])
    assert first.token_rewards == [*[0.0] * len(PROMPTS[0].token_ids), 0.5, 0.0, 0.5, 0.0, 0.0]
    assert (second.rewards, second.failed) == ({"reward": -3.0}, True)
    alone = build(reward_fn="M/steps.py", **options)
    assert alone.function.n_processes == 0
    assert alone.score([sample_of("azbz"), sample_of("")]) == [first, second]


CHAT = Prompt("ab", [3, 4], messages=[{"role": "user", "content": "ab"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"remote_rm_url": "M/f.py"},
            "--remote_rm_url M/f.py: M/f.py has no function 'reward_func'",
        ),
        (
            {"reward_fn": "M/openrlhf.py"},
            "M/openrlhf.py has no function 'reward_fn' or 'compute_score'. It has: rewa",
        ),
        (
            {"reward_fn": "M/dapo.py:reward_fn"},
            "M/dapo.py has no function 'reward_fn'. It has: compute_score",
        ),
        (
            {"reward_pretrain": "M/larger"},
            "--reward_pretrain M/larger: its tokenizer cannot be loaded",
        ),
        (
            {"reward_pretrain": "M/weightless", "prompts": [CHAT]},
            "the tokenizer has no chat template",
        ),
        (
            {"reward_pretrain": "M/actor", "normalize": True},
            "--normalize_reward: --reward_pretrain M/actor stores no",
        ),
    ],
    ids=str,
)
def test_what_cannot_work_is_an_error_before_any_weights_are_read(
    options, message, build, folder, monkeypatch
):
    monkeypatch.setattr(
        module, "get_llm_for_sequence_regression", lambda *_, **__: pytest.fail("weights are read")
    )
    with pytest.raises(ValueError) as error:
        build(**{"reward_pretrain": "M/same", **options})
    assert message.replace("M/", f"{folder}/") in str(error.value)
