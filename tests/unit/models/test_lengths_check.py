"""Attention by lengths is used where it agrees with SDPA; on CPUs, which have no kernel for it, a loop stands in."""

import pytest
import torch

from openppo.models import lengths
from openppo.models.lengths import decide_alike, difference_from_sdpa, lengths_are_exact
from tests.varlen import VarlenLoop

CPU = torch.device("cpu")


@pytest.fixture
def operator(monkeypatch):
    """Puts a function of the exact output and the options in place of the operator."""

    def put(change=lambda output, options: output, ignored=()):
        exact = VarlenLoop()

        def attend(*inputs, **options):
            for name, value in ignored:
                options[name] = value
            return change(exact(*inputs, scale=None, **options), options)

        monkeypatch.setattr(lengths, "varlen_attn", attend)

    return put


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_exact_operator_agrees(operator, dtype):
    operator()
    assert difference_from_sdpa(CPU, dtype) is None


class WrongGradient(torch.autograd.Function):
    """The output as it is, its gradient a little larger."""

    @staticmethod
    def forward(ctx, output):
        return output.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


@pytest.mark.parametrize(
    ("change", "ignored", "difference"),
    [
        (lambda output, options: output.roll(1, 1), (), "rows with window None: wrong by"),
        (lambda output, options: output * torch.nan, (), "rows with window None: wrong by inf"),
        (
            lambda output, options: WrongGradient.apply(output),
            (),
            "rows with window None: wrong by 0.1",
        ),
        (
            lambda output, options: output,
            [("window_size", (-1, 0))],
            "rows with window 16: wrong by",
        ),
        (
            lambda output, options: (
                output if options.get("seqused_k") is None else output.roll(1, 0)
            ),
            (),
            "decoding with window None: wrong by",
        ),
    ],
    ids=["heads", "not finite", "gradients", "window", "decoding"],
)
def test_a_difference_is_named(operator, change, ignored, difference):
    operator(change, ignored)
    assert difference_from_sdpa(CPU).startswith(difference)


def test_an_operator_that_raises_is_not_used():
    """As on a CPU, where FlashAttention has no kernel."""
    assert "flash_attention" in difference_from_sdpa(CPU)


def test_a_gpu_on_which_it_differs_pads_and_says_so(operator, monkeypatch, caplog):
    operator(lambda output, options: output.roll(1, 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    check = lengths.difference_from_sdpa
    monkeypatch.setattr(lengths, "difference_from_sdpa", lambda device: check(CPU))
    lengths._difference_here.cache_clear()
    try:
        assert not lengths_are_exact() and not lengths_are_exact()
    finally:
        lengths._difference_here.cache_clear()
    [line] = caplog.messages
    assert line.startswith("samples are padded, which is slower: attention by lengths of torch")
    assert "does not agree with SDPA on NVIDIA H100 (rows with window None: wrong by" in line


def test_ranks_decide_alike(monkeypatch, caplog):
    monkeypatch.setattr(lengths, "_fails_elsewhere", False)
    monkeypatch.setattr(lengths, "_difference_here", lambda: None)
    assert lengths_are_exact()
    decide_alike([True, False])
    assert not lengths_are_exact()
    assert caplog.messages == [
        "samples are padded on all ranks: attention by lengths does not agree with SDPA on one of them."
    ]
    decide_alike([True, True])
    assert lengths_are_exact()
