"""Attention in blocks on CPUs and repeated keys on GPUs are attention: the outputs and gradients of torch's own.

That attention by lengths is, test_packing.py says; here is how its operator is called, on fake tensors.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, LlamaForCausalLM

from openppo.media import TokenIds
from openppo.models import attention, causal_blocks
from openppo.models.actor import Actor
from openppo.models.attention import (
    BY_LENGTHS,
    ON_CPU,
    ON_GPU,
    ON_OLDER_GPU,
)
from openppo.models.causal_blocks import causal_attention, n_weights
from openppo.models.loading import load_causal_lm, load_options
from openppo.models.padding import pack_where_exact
from openppo.rollout.hf_engine import HFEngine
from openppo.types import ModelInputs, SamplingParams

SCALE = 0.3
H100, T4 = (9, 0), (7, 5)
IDS = torch.randint(0, 40, (3, 20), generator=torch.Generator().manual_seed(0))
GROUPED = pytest.mark.parametrize(("queries", "keys"), [(4, 4), (6, 2), (4, 1)])
BF16 = pytest.mark.parametrize("bf16", [False, True])


def heads(rows, queries, keys, length, width, dtype):
    """Queries, keys and values as models hand them over: views of (B, L, H, D)."""
    generator, sizes = torch.Generator().manual_seed(length), (queries, keys, keys)
    drawn = [
        torch.randn(rows, length, n, width, generator=generator).to(dtype).transpose(1, 2)
        for n in sizes
    ]
    return [tensor.requires_grad_() for tensor in drawn]


def outputs_and_gradients(output, inputs):
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


@pytest.mark.parametrize("scores", [causal_blocks._SCORES, 300], ids=["at once", "row by row"])
@pytest.mark.parametrize("length", [2, 31, 128, 129, 300])
@GROUPED
def test_outputs_and_gradients_are_those_of_torch(length, queries, keys, scores, monkeypatch):
    monkeypatch.setattr(causal_blocks, "_SCORES", scores * length)
    inputs = heads(3, queries, keys, length, 8, torch.float32)
    output, kept = causal_attention(*inputs, SCALE, n_weights(inputs[0]))
    plain = F.scaled_dot_product_attention(
        *inputs, is_causal=True, scale=SCALE, enable_gqa=queries != keys
    )
    expected = outputs_and_gradients(plain.transpose(1, 2), inputs)
    torch.testing.assert_close(
        outputs_and_gradients(output, inputs), expected, rtol=1e-4, atol=2e-5
    )
    assert len(kept) > len(causal_attention(*inputs, SCALE, 0)[1]) == 0, (
        "weights for the backward pass only"
    )


@pytest.fixture
def saved(llama, tmp_path, monkeypatch):
    """A Llama with grouped heads, on a machine without GPU and AMX."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(attention, "HAS_AMX", False)
    llama(num_key_value_heads=2, initializer_range=0.1).save_pretrained(tmp_path / "saved")
    return str(tmp_path / "saved")


@pytest.fixture
def calls(monkeypatch):
    """Of torch's own attention: the dtype, heads of queries and of keys, and whether it is to group them."""
    seen: list[tuple[torch.dtype, int, int, bool]] = []
    sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention

    def spy(query, key, *rest, **options):
        seen.append((query.dtype, query.shape[1], key.shape[1], options.get("enable_gqa", False)))
        return sdpa(query, key, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


def dtypes(calls):
    return [dtype for dtype, *_ in calls]


def load(saved, bf16=False):
    return load_causal_lm(saved, **load_options(bf16, flash_attn=False))


def attend(model, inputs, mask, **asked):
    """As transformers calls it."""
    attention = AttentionInterface()[model.config._attn_implementation]
    return attention(model.model.layers[0].self_attn, *inputs, mask, scaling=SCALE, **asked)[0]


def test_models_in_bfloat16_are_about_as_exact_with_it(saved, calls):
    ours, exact = load(saved, bf16=True), LlamaForCausalLM.from_pretrained(saved)
    for mine, theirs in zip(exact.parameters(), ours.parameters(), strict=True):
        mine.data.copy_(theirs.data)  # rounded to bfloat16
    gradients, outputs = [], []
    for model in (ours, LlamaForCausalLM.from_pretrained(saved, dtype=torch.bfloat16), exact):
        logits = model(input_ids=IDS).logits.float()
        logits.logsumexp(-1).sum().backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in model.parameters()]))
        outputs.append(logits.detach())
    assert dtypes(calls) == [torch.bfloat16] * 2 + [torch.float32] * 2, "not of the first model"
    for mine, other, truth in (outputs, gradients):
        assert (mine - truth).norm() <= 1.2 * (other - truth).norm()


@pytest.mark.parametrize(
    "asked", [{"is_causal": False}, {"dropout": 0.5}, {"position_bias": torch.zeros(1, 4, 1, 20)}]
)
@BF16
def test_what_more_is_asked_for_goes_to_torch(saved, calls, asked, bf16):
    query, key, value = heads(2, 4, 2, 20, 16, torch.bfloat16 if bf16 else torch.float32)
    attend(load(saved, bf16), [query if bf16 else query[:, :, :1], key, value], None, **asked)
    assert dtypes(calls) == [torch.float32]


@pytest.mark.parametrize("masked", [False, True])
@GROUPED
@BF16
def test_decode_steps_copy_no_keys_and_change_nothing(saved, calls, queries, keys, masked, bf16):
    """Over keys and values that are a part of larger buffers, as in the engine's cache."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(4, 1, queries, 8).transpose(1, 2),
        *torch.randn(2, 5, keys, 30, 8)[:, :4, :, 3:20],
    ]
    inputs = [x.bfloat16() if bf16 else x for x in inputs]
    mask = (
        torch.arange(17)[None, None, None] >= torch.tensor([0, 3, 16, 5])[:, None, None, None]
    )  # (B, 1, 1, L)
    given = mask if masked else None
    ours = attend(load(saved, bf16), inputs, given)
    folded = not bf16 or queries >= 3 * keys
    assert calls == [
        (inputs[0].dtype, keys if folded else queries, keys, not folded and queries > keys)
    ]
    copies = [x.double().repeat_interleave(queries // keys, 1) for x in inputs[1:]]
    theirs = F.scaled_dot_product_attention(
        inputs[0].double(), *copies, attn_mask=given, scale=SCALE
    )
    close = {"rtol": 2e-2, "atol": 1e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours.double(), theirs.transpose(1, 2), **close)


def test_a_model_in_float32_reads_bit_for_bit_as_with_torch(saved):
    mask = torch.ones(3, 20, dtype=torch.int64)
    mask[0, :5] = 0
    outputs = []
    for model in (load(saved), LlamaForCausalLM.from_pretrained(saved)):
        read = model(input_ids=IDS[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        decoded = model(
            input_ids=IDS[:, -1:], attention_mask=mask, past_key_values=read.past_key_values
        )
        outputs.append((read.logits[1:], decoded.logits))
    assert torch.equal(outputs[0][0], outputs[1][0])
    torch.testing.assert_close(outputs[0][1], outputs[1][1], rtol=1e-5, atol=1e-5)


@pytest.fixture
def on_gpu(saved, monkeypatch):
    """Loads the model as on a GPU of this capability; it stays on the CPU."""

    def load_there(capability, bf16=False, lengths=True):
        with monkeypatch.context() as patched:
            patched.setattr(attention, "lengths_are_exact", lambda: lengths)
            patched.setattr(torch.cuda, "is_available", lambda: True)
            patched.setattr(torch.cuda, "get_device_capability", lambda: capability)
            return load(saved, bf16)

    return load_there


def run_actor(model):
    return Actor(model)(ModelInputs(IDS, torch.ones_like(IDS).bool()))


def run_engine(model):
    """Prompts alike, which need no mask, and prompts of different lengths."""
    drawn = [
        HFEngine(model, [], 0, 4).generate([TokenIds(ids) for ids in p], SamplingParams(3), [1, 2])
        for p in ([[5, 9]] * 2, [[5, 9], [7]])
    ]
    return torch.tensor(
        [completion.log_probs for completions in drawn for completion in completions]
    )


@pytest.mark.parametrize("run", [run_actor, run_engine])
def test_no_head_shares_keys_in_float32_on_gpus(run, saved, on_gpu, calls):
    ours = run(on_gpu(H100))
    assert calls
    assert all(queries == keys and not grouped for _, queries, keys, grouped in calls)
    torch.testing.assert_close(ours, run(load(saved)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("capability", "expected"), [(H100, (2, True)), (T4, (4, False))])
def test_the_fast_kernel_of_bfloat16_keeps_its_shared_keys(on_gpu, calls, capability, expected):
    run_actor(on_gpu(capability, bf16=True))
    assert {(keys, grouped) for *_, keys, grouped in calls} == {expected}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@BF16
def test_models_compile_in_one_piece_and_save_nothing_of_it(saved, tmp_path, on_gpu, device, bf16):
    model = load(saved, bf16) if device == "cpu" else on_gpu(T4, bf16)
    assert model.config._attn_implementation == (ON_CPU if device == "cpu" else ON_OLDER_GPU)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    # compiled, transformers hands over a mask where it needs none: in bfloat16 that is another kernel
    close = {"rtol": 2e-2, "atol": 5e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(compiled(input_ids=IDS).logits, model(input_ids=IDS).logits, **close)
    model.save_pretrained(tmp_path / "again")
    assert "openppo" not in (tmp_path / "again" / "config.json").read_text()


@pytest.mark.parametrize(
    ("capability", "bf16", "lengths", "supported", "expected"),
    [
        (H100, True, True, True, BY_LENGTHS),
        (H100, True, False, True, ON_GPU),
        (H100, True, True, False, ON_GPU),
        (H100, False, True, True, ON_OLDER_GPU),
        (T4, True, True, True, ON_OLDER_GPU),
    ],
)
def test_lengths_need_bfloat16_a_newer_gpu_and_model_and_an_exact_operator(
    on_gpu, capability, bf16, lengths, supported, expected, monkeypatch, caplog
):
    monkeypatch.setattr(LlamaForCausalLM, "_supports_flash_attn", supported)
    actor = Actor(on_gpu(capability, bf16, lengths))
    assert actor.model.config._attn_implementation == expected
    if expected != BY_LENGTHS:
        with caplog.at_level("INFO", logger="openppo"):
            pack_where_exact(actor, actor, torch.device("cuda"), "critic")
        [said] = caplog.messages
        assert (
            "samples of the critic are padded" in said
            and f"is {expected}." in said
            and not actor.packs_rows
        )


class VarlenCalls(TorchDispatchMode):
    """Arguments of torch's operators over unequal lengths, by their names."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if function.namespace == "torch_attn" or name == "aten::_flash_attention_forward":
            names = [
                argument.name.replace("cum_", "cu_") for argument in function._schema.arguments
            ]
            self.seen[name] = dict(zip(names, args, strict=False)) | (kwargs or {})
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("window", "given"), [(None, -1), (128, 127)])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_operator_takes_what_a_packed_row_gives(window, given, device):
    learns = device == "cpu"  # builds without CUDA have no backward pass of fake CUDA tensors
    with FakeTensorMode(), VarlenCalls() as calls:
        like = {"device": device, "dtype": torch.bfloat16, "requires_grad": learns}
        query, key, value = (torch.empty(1, 300, n, 64, **like).transpose(1, 2) for n in (14, 2, 2))
        starts = torch.empty(6, dtype=torch.int32, device=device)
        options = {
            "scaling": SCALE,
            "sliding_window": window,
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
        }
        options |= {"max_length_q": 120, "max_length_k": 120}
        output, _ = attention._attend_by_lengths(
            None, query, key, value, None, **options, is_causal=True
        )
        if learns:
            gradients = torch.autograd.grad(output.float().sum(), (query, key, value))
            assert [tuple(g.shape) for g in gradients] == [
                (1, 14, 300, 64),
                (1, 2, 300, 64),
                (1, 2, 300, 64),
            ]
    assert (
        output.shape == (1, 300, 14, 64)
        and output.dtype is torch.bfloat16
        and output.device.type == device
    )
    forward = calls.seen["torch_attn::_varlen_attn"]
    assert [tuple(forward[name].shape) for name in ("query", "key", "value")] == [
        (300, 14, 64),
        *[(300, 2, 64)] * 2,
    ]
    assert forward["cu_seq_q"] is starts and forward["cu_seq_k"] is starts
    backward = calls.seen["torch_attn::_varlen_attn_backward"] if learns else forward
    for call in (forward, backward):
        assert (call["max_q"], call["max_k"], call["scale"], call["window_size"]) == (
            120,
            120,
            SCALE,
            [given, 0],
        )
        assert call["is_causal"] == (window is None), (
            "a window that ends at the query is causal by itself"
        )
    assert forward.get("enable_gqa", True), "torch 2.11 does not ask"
    assert forward["query"].stride() == (14 * 64, 64, 1), "no copy"


@pytest.mark.parametrize(("window", "given"), [(None, [-1, -1]), (128, [127, 0])])
def test_the_operator_takes_what_decoded_rows_give(window, given):
    """6 rows of one query, in buffers of 8 rows and 500 columns, which come before heads in memory."""
    with FakeTensorMode(), VarlenCalls() as calls:
        like = {"dtype": torch.bfloat16}
        query = torch.empty(6, 1, 14, 64, **like).transpose(1, 2)
        key, value = (torch.empty(8, 500, 2, 64, **like).transpose(1, 2)[:6] for _ in range(2))
        starts, n_keys = (torch.empty(n, dtype=torch.int32) for n in (7, 6))
        options = {
            "scaling": SCALE,
            "sliding_window": window,
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
        }
        options |= {"max_length_q": 1, "max_length_k": 400, "seqused_k": n_keys}
        output, _ = attention._attend_by_lengths(None, query, key, value, None, **options)
    assert output.shape == (6, 1, 14, 64) and output.dtype is torch.bfloat16
    [call] = calls.seen.values()
    assert [tuple(call[name].shape) for name in ("query", "key", "value")] == [
        (6, 14, 64),
        *[(3000, 2, 64)] * 2,
    ]
    called_window = call.get("window_size") or [call["window_size_left"], call["window_size_right"]]
    assert (call["max_q"], call["max_k"], called_window, call["is_causal"]) == (
        1,
        400,
        given,
        False,
    )
    assert call["seqused_k"] is n_keys and call.get("enable_gqa", True)
    assert call["key"].is_contiguous(), "no copy"


@pytest.mark.parametrize(
    ("asked", "width"),
    [({"softcap": 9.0}, 64), ({"is_causal": False}, 64), ({"s_aux": 0}, 64), ({}, 60), ({}, 256)],
)
def test_lengths_with_what_the_operator_lacks_are_refused(asked, width):
    inputs = [torch.empty(1, 2, 5, width)] * 3
    lengths = {"cu_seq_lens_q": torch.tensor([0, 5])}
    with pytest.raises(ValueError, match=f"and here for .*heads of {width}"):
        attention._attend_by_lengths(
            None, *inputs, None, **({"is_causal": True} | asked), **lengths
        )


def test_flash_attention_gets_lengths_once_and_no_mask(saved, monkeypatch):
    """transformers derives them in each layer otherwise, by a comparison that the host waits for."""
    seen = []

    def flash(query, key, value, mask, **options):
        seen.append(
            (
                mask,
                *(
                    options.get(name)
                    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
                ),
            )
        )
        return query

    monkeypatch.setattr("transformers.integrations.flash_attention._flash_attention_forward", flash)
    actor = Actor(load(saved))
    actor.model.config._attn_implementation = "flash_attention_2"
    actor.use_packing(True)
    actor(ModelInputs(IDS, torch.arange(20) < torch.tensor([20, 1, 7])[:, None]))
    (mask, starts, same, *longest), other = seen
    assert mask is None and starts is same is other[1] and longest == [20, 20]
    assert starts.tolist() == [0, 20, 21, 28] and starts.dtype is torch.int32
