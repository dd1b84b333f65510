"""Stop strings, stop ids and least lengths: against responses that nothing stops, cut by hand."""

import dataclasses

import pytest
import torch
from transformers import AutoTokenizer

from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.sampling import completed_stop, decoder, request_uniforms, text_before_stop
from openppo.types import FinishReason, SamplingParams

FREE = SamplingParams(max_new_tokens=24, temperature=1.3)
PIECES = ["", "a", "b", "ab", "ba", "aab", "c", "bc"] * 3  # text of each of the 24 tokens


def text_of(ids):
    return "".join(PIECES[i] for i in ids)


def sampled(model, prompts, params, eos=()):
    engine = HFEngine(model, eos, 0, 3)
    engine.decode = text_of
    return engine.generate(prompts, params, range(50, 50 + len(prompts)))


def cut_by_hand(ids, stop):
    """Tokens up to the first whose text completes a stop string."""
    n = next((n for n in range(1, len(ids) + 1) if any(text in text_of(ids[:n]) for text in stop)), len(ids))
    return ids[:n]


@pytest.mark.parametrize("stop", [("abba",), ("cab",), ("bc", "aaa"), ("no such text",)])
def test_a_stop_string_ends_a_response_where_it_is_complete(stop, models, prompts):
    free = sampled(models["llama"], prompts, FREE)
    found = sampled(models["llama"], prompts, dataclasses.replace(FREE, stop=stop))
    for whole, ours in zip(free, found, strict=True):
        assert ours.token_ids == cut_by_hand(whole.token_ids, stop)
        assert ours.log_probs == pytest.approx(whole.log_probs[: len(ours.token_ids)], abs=1e-5)
        stopped = any(text in text_of(ours.token_ids) for text in stop)
        assert ours.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    lengths = {len(ours.token_ids) for ours in found}
    assert len(lengths) > 1 or stop == ("no such text",), "else the claim would be weak"


def test_a_stop_token_ends_a_response_as_eos_does(models, prompts):
    by_eos = sampled(models["llama"], prompts, FREE, eos=[5, 9])
    by_stop = sampled(models["llama"], prompts, dataclasses.replace(FREE, stop_token_ids=(9,)), eos=[5])
    assert by_stop == by_eos
    assert FinishReason.STOP in {ours.finish_reason for ours in by_stop}


def test_nothing_ends_a_response_before_the_least_length(models):
    model, least = models["llama"], 4
    ends = [i for i, piece in enumerate(PIECES) if piece in ("", "b", "ab")]
    params = SamplingParams(8, 1.0, stop=("c",), stop_token_ids=tuple(ends[3:]), min_new_tokens=least)
    lengths = set()
    for seed in range(12):
        engine = HFEngine(model, ends[:3], 0, 1)
        engine.decode = text_of
        [ours] = engine.generate([[3, 4]], params, [seed])
        uniforms, ids = request_uniforms(seed, 8).tolist(), []
        for uniform, log_prob in zip(uniforms, ours.log_probs, strict=False):
            with torch.no_grad():
                logits = model(torch.tensor([[3, 4, *ids]])).logits[0, -1].double()
            if len(ids) < least:
                logits[ends] = -torch.inf
            distribution = logits.softmax(-1)
            ids.append(int((distribution.cumsum(-1) <= uniform).sum()))
            assert log_prob == pytest.approx(distribution[ids[-1]].log().item(), abs=1e-4)
        assert ours.token_ids == ids
        assert not set(ids[:least]) & set(ends)
        assert ids[-1] in ends or "c" in PIECES[ids[-1]] or len(ids) == 8
        lengths.add(len(ids))
    assert min(lengths) >= least
    assert len(lengths) > 2


TEXT = "Let me see: 3 * 4 = 12.\nObservation: naïve 🙂🙂\n\nThought:</code> Ende"


@pytest.mark.parametrize("name", ["gpt2", "mistral-v3", "phi3-mini", "qwen2.5"])
@pytest.mark.parametrize("stop", ["\nObservation:", "</code>", "ï", "🙂🙂", "\n\n", " ", "e"])
def test_real_tokenizers_complete_a_stop_where_their_whole_text_has_it(stop, name, assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "tokenizers" / name)
    decode, ids = decoder(tokenizer), tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    params = SamplingParams(100, stop=(stop,))
    counts = [decode(ids[:n]).count(stop) for n in range(len(ids) + 1)]
    more = [n for n in range(1, len(ids) + 1) if counts[n] > max(counts[:n])]
    assert [n for n in range(1, len(ids) + 1) if completed_stop(ids[:n], params, decode)][:1] == more[:1] != []
    first = ids[: more[0]]
    assert text_before_stop(decode(first), first, params, decode) == decode(first).partition(stop)[0]
    assert text_before_stop("", [], params, decode) == ""
    assert text_before_stop("abc", [1, 7], SamplingParams(9, stop=("ba",)), text_of) == "abc", "no stop, no cut"
