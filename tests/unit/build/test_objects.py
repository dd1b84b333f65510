"""The caller's own objects: what cannot work is refused with its remedy, prompts are what they are by name."""

import copy
import logging
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from openppo.build.checks.models import check_models
from openppo.build.objects import GIVEN, OwnObjects
from openppo.config import RewardConfig, TrainPPOConfig, from_options
from openppo.models import Actor
from openppo.models.batching import MicroBatchSize
from openppo.models.scalar_head import ScalarHeadModel
from openppo.rewards.build import ScorerSetup
from openppo.types import Completion, FinishReason, Prompt, Sample, SingleProcess
from tests.unit.trainer.conftest import SIZES, OneOf


def config_of(**options):
    return from_options(TrainPPOConfig, **{"pretrain": "m"} | options)


@pytest.fixture
def actor():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@pytest.fixture
def critic():
    return LlamaForSequenceClassification(LlamaConfig(num_labels=1, pad_token_id=None, **SIZES))


def named(options=None, comm=None, samples=True, are_tasks=False, **objects):
    return OwnObjects(**objects).named(
        config_of(**options or {}), comm or SingleProcess(), samples, are_tasks
    )


def test_what_is_given_has_a_name_in_the_config_and_nothing_else_changes(actor, critic):
    objects = {
        "actor": actor,
        "critic": critic,
        "reference": copy.deepcopy(actor),
        "prompts": [],
        "reward_fn": print,
    }
    names = dict.fromkeys(("critic_pretrain", "ref_pretrain", "prompt_data", "reward_fn"), GIVEN)
    assert named(**objects) == config_of(**names)
    assert named() == config_of()
    with pytest.raises(TypeError, match="acter"):
        named(acter=actor)


REFUSED = [
    (
        lambda *_: {"prompts": []},
        {"prompt_data": "d"},
        "prompts: --prompt_data names one too; leave one of them out",
    ),
    (
        lambda *_: {"reward_fn": print},
        {"reward_fn": "f.py"},
        "reward_fn: --reward_fn names one too",
    ),
    (
        lambda _, critic: {"critic": critic},
        {"critic_pretrain": "c"},
        "critic: --critic_pretrain names one too",
    ),
    (
        lambda actor, _: {"reference": actor},
        {"ref_pretrain": "r"},
        "reference: --ref_pretrain names one too",
    ),
    (
        lambda *_: {"prompts": [], "reward_fn": print},
        {"rollout_ranks": 1},
        "prompts, reward_fn: --rollout_ranks know",
    ),
    (
        lambda actor, _: {"actor": actor},
        {"rollout_engine": "vllm"},
        "actor: vLLM loads .* use --rollout_engine hf",
    ),
    (
        lambda _, critic: {"critic": critic},
        {"advantage_estimator": "group_norm"},
        "critic: --adv.* group_norm has none",
    ),
    (
        lambda actor, _: {"reference": actor},
        {"init_kl_coef": 0},
        "reference: --init_kl_coef 0 uses none; leave it out",
    ),
    (
        lambda actor, _: {"actor": actor},
        {"load_in_4bit": True},
        "--load_in_4bit: .* leave it out, or actor and critic",
    ),
    (
        lambda actor, _: {"actor": actor},
        {"flash_attn": True},
        "actor: --flash_attn .* attn_implementation='flash_att",
    ),
    (
        lambda *_: {"tokenizer": "name"},
        {},
        "tokenizer: str is none of transformers; give one of AutoTokenizer",
    ),
    (
        lambda *_: {"tokenizer": "t"},
        {"chat_template": "c"},
        "--chat_template is for a tokenizer .* read by name",
    ),
    (lambda *_: {"reward_fn": "f.py"}, {}, "reward_fn: it cannot be called; give a function"),
    (lambda *_: {"prompts": "p.jsonl"}, {}, "prompts: give a list or generator of Prompt or texts"),
    (
        lambda _, critic: {"actor": critic},
        {},
        "actor: LlamaForSequenceClassification lacks the head",
    ),
    (
        lambda actor, _: {"critic": actor},
        {},
        r"critic: .* lacks .* get_llm_for_sequence_regression\(NAME, .critic.\)",
    ),
    (
        lambda _, critic: {"critic": ScalarHeadModel(critic, "reward")},
        {},
        "critic: .* lacks the head",
    ),
    (
        lambda *_: {"actor": torch.nn.Linear(2, 2)},
        {},
        "actor: Linear is neither a model of .* nor Actor around one",
    ),
    (
        lambda actor, _: {"actor": Actor(actor, lora_rank=2)},
        {},
        "actor: Actor is neither .* --lora_rank for adapters",
    ),
    (
        lambda actor, _: {"actor": actor.bfloat16()},
        {},
        "actor: its weights are torch.bfloat16, and the run's torch.f",
    ),
    (
        lambda actor, _: {"actor": actor.requires_grad_(False)},
        {},
        "actor: none of its weights has requires_grad",
    ),
    (
        lambda actor, _: {"actor": Actor(actor)},
        {"lora_rank": 2},
        "actor: --lora_rank .* give Actor's .model",
    ),
    (
        lambda actor, _: {"actor": Actor(actor)},
        {"temperature": 0.7},
        "actor: its temperature is 1.0, and --temperature",
    ),
    (
        lambda actor, _: {"actor": actor, "reference": Actor(actor)},
        {},
        "actor and reference share .*copy.deepcopy",
    ),
]


@pytest.mark.parametrize(
    ("objects", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED]
)
def test_an_object_that_cannot_work_is_refused_with_a_remedy(
    objects, options, message, actor, critic
):
    with pytest.raises(ValueError, match=message):
        named(options, **objects(actor, critic))


def test_a_source_and_tasks_bring_their_own_prompts_and_rewards():
    for name, value in (("prompts", []), ("reward_fn", print)):
        with pytest.raises(ValueError, match=f"{name}: the source gives it; leave it out"):
            named(samples=False, **{name: value})
        with pytest.raises(
            ValueError, match=f"{name}: --tasks names those of each task; leave it out"
        ):
            named(are_tasks=True, **{name: value})


def test_a_model_that_was_trained_or_partitioned_is_refused(actor):
    OwnObjects(actor=actor).module("actor", 1.0, config_of().lora)
    with pytest.raises(ValueError, match="actor: an earlier trainer has it; make it anew"):
        named(actor=actor)
    partitioned = copy.deepcopy(actor)
    next(partitioned.parameters()).ds_id = 0
    with pytest.raises(
        ValueError, match="actor: DeepSpeed has partitioned its weights already; make it whole"
    ):
        named(actor=partitioned)


def test_ranks_with_other_weights_are_an_error(actor):
    class Other(OneOf):
        def all_gather_object(self, value):
            return [value, b"other" if isinstance(value, bytes) and self.differs() else value]

    seen = []
    other = Other(0, 2)
    other.differs = lambda: (
        len(seen.append(1) or seen) > 1
    )  # what is given is alike, weights are not
    with pytest.raises(
        ValueError, match="actor holds something else on rank 1 .* make it alike on all ranks"
    ):
        named(comm=other, actor=actor)


def test_a_fingerprint_is_of_every_tensor(actor):
    prints = OwnObjects(actor=actor, reference=copy.deepcopy(actor)).fingerprints()
    assert prints["actor"] == prints["reference"]
    for parameter in actor.parameters():
        with torch.no_grad():
            parameter.flatten()[0] += 1
        changed = OwnObjects(actor=actor).fingerprints()["actor"]
        assert changed != prints["actor"]
        prints["actor"] = changed


def test_what_the_actor_cannot_give_is_looked_for_before_weights_are_loaded(
    actor, critic, make_tokenizer
):
    """The names that are left must lead somewhere, and an object must know all tokens."""
    run = SimpleNamespace(comm=SingleProcess(), device=torch.device("cpu"))
    tokenizer = make_tokenizer()
    small = LlamaForSequenceClassification(LlamaConfig(num_labels=1, **SIZES | {"vocab_size": 5}))
    for objects, message in (
        ({"critic": critic}, "--pretrain ./m"),
        ({"reference": copy.deepcopy(actor)}, "--pretrain ./m"),
    ):
        config = named({"pretrain": "./m"}, actor=actor, **objects)
        with pytest.raises(ValueError, match=message):
            check_models(
                config, run, objects=OwnObjects(actor=actor, tokenizer=tokenizer, **objects)
            )
    own = OwnObjects(actor=actor, critic=small, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"critic \(given in Python\): token .* has the id"):
        check_models(named({"init_kl_coef": 0}, **vars(own)), run, objects=own)
    whole = OwnObjects(actor=actor, critic=critic, tokenizer=tokenizer)
    assert check_models(named({"init_kl_coef": 0}, **vars(whole)), run, objects=whole) == (
        tokenizer,
        actor.config,
    )


def read(prompts, tokenizer, empty=False, **options):
    return OwnObjects(prompts=prompts).read_prompts(tokenizer, config_of(**options).data, empty)


def test_prompts_are_texts_or_prompts_from_a_list_a_generator_or_a_function(make_tokenizer, caplog):
    tokenizer = make_tokenizer()
    mine = Prompt("b", [4, 3], label="l", row={"a": 1})
    assert read(["ab", mine], tokenizer) == [Prompt("ab", tokenizer("ab").input_ids), mine]
    assert read(lambda given: [given] and iter([mine]), tokenizer) == [mine]
    assert read((mine for _ in count()), tokenizer, max_samples=3) == [mine] * 3
    assert read([mine, Prompt("long", [3] * 9)], tokenizer, prompt_max_len=2) == [mine]
    assert "prompts: dropped 1 of 2" in caplog.text
    assert read([Prompt("", [3, 4, 5])], tokenizer, prompt_max_len=2, prompt_truncation="left")[
        0
    ].token_ids == [4, 5]
    assert read([Prompt("", [])], tokenizer, empty=True) == [Prompt("", [])]
    state = torch.get_rng_state()
    assert len(read(lambda _: [Prompt("", [int(torch.randint(5, 9, (1,)))])], tokenizer)) == 1
    assert torch.equal(torch.get_rng_state(), state), (
        "it draws nothing from the run's random numbers"
    )


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([Prompt("a", [3]), 7], "prompts, item 2: "),
        (
            [Prompt("a", torch.tensor([3]))],
            "prompts, item 1: token_ids must be a list of ints, as tensor.tolist",
        ),
        ([Prompt("a", [3, -1])], "prompts, item 1: token_ids must be a list of ints"),
        ([Prompt("a", [])], "prompts, item 1: token_ids is empty"),
        (
            [Prompt("a", [3], task="t")],
            "prompts, item 1: task is for runs with --tasks: leave it empty",
        ),
        ([Prompt("a", [3] * 2000)], "prompts: 1 are given, none of at most --prompt_max_len 1024"),
        ([], "prompts: 0 are given"),
    ],
)
def test_what_is_no_prompt_is_an_error_that_names_it(prompts, message, make_tokenizer):
    with pytest.raises(ValueError, match=message):
        read(prompts, make_tokenizer())


def test_a_function_that_is_given_stays_in_the_process(make_tokenizer, caplog):
    def here(response):
        return float(len(called.append(response) or called))

    called, source = [], RewardConfig(reward_fn=GIVEN, reward_workers=2)
    run = SimpleNamespace(comm=SingleProcess())
    with caplog.at_level(logging.INFO, "openppo"):
        scorer = ScorerSetup(
            source, make_tokenizer(), run, [], "m", MicroBatchSize(2), {}, function=here
        ).build()
    completion = Completion([5, 1], [0.0, 0.0], [0, 0], finish_reason=FinishReason.STOP)
    sample = Sample.of_response(Prompt("a", [4]), completion, group=0)
    assert (
        "reward_fn stays in this process: --reward_workers are for functions in files"
        in caplog.text
    )
    assert [score.rewards for score in scorer.score([sample])] == [{"reward": 1.0}]
    assert len(called) == 1
