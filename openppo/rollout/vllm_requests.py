"""Requests of ranks that share one vLLM, and their conversion to its types."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from openppo.media import TokenIds, Tokens, item_places
from openppo.models.sampled_ids import SampledIds
from openppo.types import SamplingParams

IMAGE_FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl")
"""Model types whose images tests/vllm compares with transformers."""


class VLLMRequest(NamedTuple):
    """A request of any rank that shares a vLLM."""

    name: str
    prompt: Tokens
    params: SamplingParams
    seed: int


class VLLMRequests:
    """Requests of ``n_ranks`` consecutive ranks, which share the vLLM of this process.

    The vLLM of each rank must get the same requests in the same order, so new requests and cancellations are exchanged
    before each step. ``own`` are the numbers of this rank's unfinished requests, by name; ``under_way`` are the
    parameters of all requests in vLLM.
    """

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._group = None
        if n_ranks > 1:
            from vllm.distributed import get_tp_group

            self._group = get_tp_group().cpu_group
        self._place = dist.get_rank() % n_ranks
        self.own: dict[str, int] = {}
        self.under_way: dict[str, SamplingParams] = {}
        self._new: list[VLLMRequest] = []
        self._cancelled: list[str] = []

    def submit(
        self,
        number: int,
        prompt: Tokens,
        params: SamplingParams,
        seed: int,
    ) -> None:
        """Submit a request at the next exchange."""
        ids = TokenIds(
            list(prompt.token_ids), prompt.media
        )  # without rows of data, which are large
        request = VLLMRequest(self._name(number), ids, params, seed=seed)
        self._new.append(request)
        self.own[request.name] = number

    def cancel(self, number: int) -> None:
        """Cancel a request at the next exchange; nothing happens if it has ended."""
        name = self._name(number)
        if self.own.pop(name, None) is not None:
            self._cancelled.append(name)

    def exchange(self) -> Iterator[tuple[list[VLLMRequest], list[str]]]:
        """Yield new requests and the names of cancelled ones, rank by rank."""
        changes = (self._new, self._cancelled)
        self._new = []
        self._cancelled = []
        by_rank: list[Any] = [changes] * self.n_ranks
        if self.n_ranks > 1:
            dist.all_gather_object(by_rank, changes, group=self._group)

        for new, cancelled in by_rank:
            self.under_way |= {request.name: request.params for request in new}
            yield new, [name for name in cancelled if self.under_way.pop(name, None) is not None]

    def any_rank(self, flag: bool) -> bool:
        """True on all ranks that share the vLLM if ``flag`` is true on one."""
        result = torch.tensor(int(flag))
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self._group)
        return bool(result)

    def clear(self) -> None:
        """Forget all requests, on all ranks together."""
        for requests in (self.own, self.under_way, self._new, self._cancelled):
            requests.clear()

    def _name(self, number: int) -> str:
        return f"{self._place}/{number}"


def add_request(llm: Any, request: VLLMRequest, eos_token_ids: Sequence[int]) -> None:
    """Add a request to vLLM, whose response ends with one of ``eos_token_ids``."""
    if request.prompt.media:
        prompt = _with_images(llm.renderer.get_mm_processor(), request)
    else:
        [prompt] = llm.renderer.render_cmpl([{"prompt_token_ids": list(request.prompt.token_ids)}])
    params = _params(request.params, request.seed, eos_token_ids)
    llm.llm_engine.add_request(request.name, prompt, params)


def masking(ids: SampledIds) -> type:
    """Return a logits processor of vLLM that masks all but ``ids``.

    It masks the logits of all requests at once, and runs before temperature, top-k and top-p. A logit bias would be
    copied to the GPU for each request.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Masking(LogitsProcessor):
        def __init__(self, *_: Any) -> None:
            """Ignore vLLM's options."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Do nothing: the mask does not depend on the batch."""

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return ids.mask(logits)

    return Masking


def _with_images(processor: Any, request: VLLMRequest) -> Any:
    """Return a prompt with the inputs of OpenPPO's processor; vLLM's only tells their dimensions."""
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    inputs: list[Any] = []
    keys: list[str] = []
    ranges: list[PlaceholderRange] = []
    for item, places in item_places(request.prompt):
        features = BatchFeature(item.inputs)
        fields = processor._get_mm_fields_config(features, {})
        inputs += MultiModalKwargsItems.from_hf_inputs(features, fields)["image"]
        keys.append(str(item.key))

        # Images of Pixtral have marks between their placeholders.
        n_places = places[-1] + 1 - places[0]
        is_placeholder = torch.zeros(n_places, dtype=torch.bool)
        is_placeholder[torch.tensor(places) - places[0]] = True
        ranges.append(PlaceholderRange(places[0], n_places, is_placeholder))

    return mm_input(
        list(request.prompt.token_ids),
        MultiModalKwargsItems({"image": inputs}),
        {"image": keys},
        {"image": ranges},
    )


def _params(params: SamplingParams, seed: int, eos_token_ids: Sequence[int]) -> Any:
    """Convert ``params`` to vLLM's ``SamplingParams``."""
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or 0,  # 0: all tokens
        seed=seed,
        logprobs=0,  # only of the sampled token
        stop_token_ids=sorted({*eos_token_ids, *params.stop_token_ids}),
        min_tokens=params.min_new_tokens,
        ignore_eos=True,  # vLLM knows only one EOS
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if params.stop else RequestOutputKind.FINAL_ONLY,
    )
