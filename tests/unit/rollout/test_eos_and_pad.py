"""Where other libraries went wrong: PAD = EOS, several EOS ids, no PAD, cut and empty responses, from end to end.

A scripted model samples what each case wants; then sample, tensors, score, token rewards and GAE are compared
with numbers worked out by hand.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma3Config

from openppo.experience import compute_reward, get_advantages_and_returns
from openppo.experience.replay_buffer import collate
from openppo.models.batching import MicroBatchSize
from openppo.models.pretrained import eos_token_ids, pad_token_id
from openppo.rewards import FunctionScorer, ModelScorer, RewardFunction
from openppo.rollout.hf_engine import HFEngine
from openppo.types import FinishReason, Prompt, SamplingParams, SingleProcess
from tests.playing import sample_responses

PAD, EOS, END, A, B, C = 0, 1, 2, 4, 5, 6
VOCAB = 30


class ScriptedModel(nn.Module):
    """A language model that, after a sequence of n real tokens, is sure of the token that its script has at n.

    ``script`` maps a prompt's first token to the whole sequence. Its keys are the token ids themselves, so that it
    knows of a sequence what the engine's cache gives back.
    """

    def __init__(self, scripts):
        super().__init__()
        self.scripts = scripts
        self.weight = nn.Parameter(torch.zeros(1))
        text_config = SimpleNamespace(num_hidden_layers=1)
        self.config = SimpleNamespace(
            eos_token_id=None, _attn_implementation="sdpa", get_text_config=lambda: text_config
        )

    def forward(self, input_ids, attention_mask, past_key_values, **_):
        """Logits (B, 1, V) of the next token."""
        new = input_ids[:, None, :, None]  # (B, heads, tokens, width)
        keys, values = past_key_values.update(new, new, 0)
        assert keys.equal(values)
        logits = torch.full((len(input_ids), 1, VOCAB), -1e4)
        for row, (ids, mask) in enumerate(zip(keys[:, 0, :, 0], attention_mask, strict=True)):
            so_far = ids[mask].tolist()
            script = self.scripts[so_far[0]]
            assert so_far == script[: len(so_far)]
            logits[row, 0, script[len(so_far)]] = 1e4
        return SimpleNamespace(logits=logits)


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
UP, DOWN = [-1, 0, 1, 2], [-6, -5, -4, -3]  # returns of four tokens, the most that are sampled
USUAL, PAD_IS_EOS = {"pad": "<pad>", "eos": "<eos>"}, {"pad": "<eos>", "eos": "<eos>"}
NEITHER = {"pad": None, "eos": None}
# Tokenizer and EOS ids; of two prompts their lengths, all that the model would say, why it ends, the text that a reward
# function sees, and the return of each action: scores 3 and -2 at the end, and a penalty of 1 for each token.
CASES = {
    "PAD is EOS, and an EOS in a prompt is a token like any other": (
        *(PAD_IS_EOS, [EOS], [1, 3], [[A, B, C, EOS, A], [B, EOS, A, B, C, A, A]]),
        *([STOP, LENGTH], ["bc", "bcaa"], [[0, 1, 2], DOWN]),
    ),
    "several EOS ids": (
        *(USUAL, [EOS, END], [1, 1], [[A, B, END, C, C], [B, C, EOS, A, A]]),
        *([STOP, STOP], ["b", "c"], [[1, 2], [-4, -3]]),
    ),
    "neither PAD nor EOS token": (
        *(NEITHER, [], [1, 2], [[A, PAD, EOS, PAD, END, A], [B, C, C, C, C, C, A]]),
        *([LENGTH, LENGTH], ["<pad><eos><pad><end>", "cccc"], [UP, DOWN]),
    ),
    "cut by length, with EOS one token later and at the last place": (
        *(USUAL, [EOS], [1, 2], [[A, B, C, B, C, EOS], [B, A, B, C, A, EOS]]),
        *([LENGTH, STOP], ["bcbc", "bca"], [UP, DOWN]),
    ),
    "EOS at once": (
        *(PAD_IS_EOS, [EOS], [1, 2], [[A, EOS, B], [B, C, A, EOS, B]]),
        *([STOP, STOP], ["", "a"], [[2], [-4, -3]]),
    ),
    "PAD sampled as an ordinary token": (
        *(USUAL, [EOS], [1, 1], [[A, PAD, B, PAD, EOS], [B, PAD, PAD, PAD, PAD, A]]),
        *([STOP, LENGTH], ["<pad>b", ""], [UP, DOWN]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_masks_texts_scores_and_returns_are_those_worked_out_by_hand(name, make_tokenizer):
    roles, eos, n_prompts, scripts, reasons, texts, expected_returns = CASES[name]
    tokenizer = make_tokenizer(**roles)
    pad = pad_token_id(tokenizer)
    model: Any = ScriptedModel({script[0]: script for script in scripts})
    prompts = [Prompt("", script[:n]) for script, n in zip(scripts, n_prompts, strict=True)]
    engine = HFEngine(model, eos, pad, max_batch_size=8)
    samples = sample_responses(
        engine, prompts, SamplingParams(4), n_samples=1, seed=0, first_group=0
    )
    ends = [n + len(returns) for n, returns in zip(n_prompts, expected_returns, strict=True)]
    token_ids = [script[:end] for script, end in zip(scripts, ends, strict=True)]
    ended = [(sample.last.token_ids, sample.last.finish_reason) for sample in samples]
    assert ended == list(zip(token_ids, reasons, strict=True))

    seen: list[str] = []
    function = RewardFunction(
        lambda responses: seen.extend(responses) or [0.0, 0.0], "f.py", columns=()
    )
    FunctionScorer(function, tokenizer).score(samples)
    assert seen == texts, "without what ends or pads them"

    def place_and_token(inputs):
        last = inputs.attention_mask.sum(-1) - 1
        return last * 100.0 + inputs.sequences.gather(1, last[:, None])[:, 0]

    scorer = ModelScorer(
        place_and_token, MicroBatchSize(2), pad, SingleProcess(), torch.device("cpu")
    )
    read = [score.rewards["reward"] for score in scorer.score(samples)]
    assert read == [100.0 * (len(ids) - 1) + ids[-1] for ids in token_ids], "the last sampled token"

    batch = collate(samples, pad).with_fields(scores=torch.tensor([3.0, -2.0]))
    assert batch.truncated.tolist() == [reason is LENGTH for reason in reasons]
    kl = torch.full(
        batch.sequences.shape, 10.0
    )  # on padding and prompts too: it must not count there
    rewards = compute_reward(batch.scores, kl, batch.action_mask, kl_coef=0.1)
    values = torch.ones(batch.sequences.shape)
    _, returns = get_advantages_and_returns(
        values, rewards, batch.action_mask, gamma=1.0, lambd=1.0
    )
    one_step, _ = get_advantages_and_returns(
        values, rewards, batch.action_mask, gamma=1.0, lambd=0.0
    )
    for row, (ids, n_prompt, score) in enumerate(
        zip(token_ids, n_prompts, (3.0, -2.0), strict=True)
    ):
        n, places = len(ids) - n_prompt, range(batch.sequences.shape[1])
        assert batch.sequences[row, : len(ids)].tolist() == ids
        assert batch.attention_mask[row].tolist() == [t < len(ids) for t in places]
        assert batch.action_mask[row].tolist() == [n_prompt <= t < len(ids) for t in places]
        before, after = [0.0] * n_prompt, [0.0] * (len(places) - len(ids))
        assert rewards[row].tolist() == before + [-1.0] * (n - 1) + [score - 1.0] + after
        assert returns[row].tolist() == before + expected_returns[row] + after
        # r + V_next - V: the values are 1, and 0 after the last action
        assert one_step[row].tolist() == before + [-1.0] * (n - 1) + [score - 2.0] + after


@pytest.mark.parametrize(
    ("in_generation", "in_config", "eos", "expected"),
    [
        ([1, 2], 1, "<eos>", [1, 2]),
        ([7, 8, 9], [1], None, [1, 7, 8, 9]),
        (2, None, "<eos>", [1, 2]),
        (None, None, None, []),
        (0, None, None, [0]),
    ],
)
def test_all_eos_ids_of_generation_config_model_config_and_tokenizer_end_a_response(
    in_generation, in_config, eos, expected, make_tokenizer
):
    config = SimpleNamespace(eos_token_id=in_config, vocab_size=40, get_text_config=lambda: config)
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=in_generation), config=config
    )
    assert eos_token_ids(model, make_tokenizer(eos=eos)) == expected
    config = Gemma3Config(text_config={"eos_token_id": [1, 7]})
    of_images = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=106), config=config)
    assert eos_token_ids(of_images) == [1, 7, 106], (
        "its text part may be the only one that has them"
    )


@pytest.mark.parametrize(
    ("pad", "eos", "expected"),
    [("<pad>", "<eos>", 0), (None, "<end>", 2), (None, None, 0), ("<sep>", None, 3)],
)
def test_padding_is_filled_with_pad_else_eos_else_zero(pad, eos, expected, make_tokenizer):
    assert pad_token_id(make_tokenizer(pad=pad, eos=eos)) == expected
