"""What ranks that share one vLLM submit and cancel, in its terms."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from openppo.media import Media, item_places
from openppo.models.sampled_ids import SampledIds
from openppo.types import SamplingParams

IMAGE_FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl")
"""Types of models whose images tests/vllm compares with transformers."""


class VLLMRequest(NamedTuple):
    """One of any rank that shares a vLLM."""

    name: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    media: Media


class VLLMRequests:
    """Requests of ``n_ranks`` ranks with following numbers, which share the one vLLM of this process.

    The vLLM of each must get the same requests in the same order, so what is new or cancelled is exchanged before each
    step. ``own`` are the numbers of this rank's that have not ended, by name; ``under_way`` has all those in vLLM.
    """

    def __init__(self, n_ranks: int) -> None:
        self.n_ranks, self._group = n_ranks, None
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
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        media: Media = (),
    ) -> None:
        """For the next exchange."""
        request = VLLMRequest(self._name(number), list(prompt_ids), params, seed=seed, media=media)
        self._new.append(request)
        self.own[request.name] = number

    def cancel(self, number: int) -> None:
        """At the next exchange; nothing happens if it has ended."""
        if self.own.pop(self._name(number), None) is not None:
            self._cancelled.append(self._name(number))

    def exchange(self) -> Iterator[tuple[list[VLLMRequest], list[str]]]:
        """What is new, and the names of what is cancelled, rank by rank."""
        given = (self._new, self._cancelled)
        self._new = []
        self._cancelled = []
        everyones: list[Any] = [given] * self.n_ranks
        if self.n_ranks > 1:
            dist.all_gather_object(everyones, given, group=self._group)
        for new, cancelled in everyones:
            self.under_way |= {request.name: request.params for request in new}
            yield new, [name for name in cancelled if self.under_way.pop(name, None) is not None]

    def any_rank(self, flag: bool) -> bool:
        """True on all of them if ``flag`` is on one."""
        result = torch.tensor(int(flag))
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self._group)
        return bool(result)

    def clear(self) -> None:
        """Forget all, on all of them together."""
        for requests in (self.own, self.under_way, self._new, self._cancelled):
            requests.clear()

    def _name(self, number: int) -> str:
        return f"{self._place}/{number}"


def add_request(llm: Any, request: VLLMRequest, eos_token_ids: Sequence[int]) -> None:
    """Give it to vLLM, which ends a response with one of ``eos_token_ids``."""
    if request.media:
        prompt = _with_images(llm.renderer.get_mm_processor(), request)
    else:
        [prompt] = llm.renderer.render_cmpl([{"prompt_token_ids": request.prompt_ids}])
    params = _params(request.params, request.seed, eos_token_ids)
    llm.llm_engine.add_request(request.name, prompt, params)


def masking(ids: SampledIds) -> type:
    """A logits processor of vLLM that leaves out what is not among ``ids``, of all requests at once.

    It runs before temperature, top-k and top-p. A bias for each request would be copied to the GPU for each of them.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Masking(LogitsProcessor):
        def __init__(self, *_: Any) -> None:
            """Nothing of vLLM's options matters."""

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            """Nothing depends on the batch."""

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            return ids.mask(logits)

    return Masking


def _with_images(processor: Any, request: VLLMRequest) -> Any:
    """A prompt with the inputs that our processor made; that of vLLM knows their dimensions, and is not run."""
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    inputs = list[Any]()
    keys = list[str]()
    ranges = list[PlaceholderRange]()
    for item, places in item_places(request.prompt_ids, request.media):
        given = BatchFeature(item.inputs)
        inputs += MultiModalKwargsItems.from_hf_inputs(
            given, processor._get_mm_fields_config(given, {})
        )["image"]
        keys.append(str(item.key))
        is_embed = torch.zeros(
            places[-1] + 1 - places[0], dtype=torch.bool
        )  # Pixtral's images have marks in between
        is_embed[torch.tensor(places) - places[0]] = True
        ranges.append(PlaceholderRange(places[0], len(is_embed), is_embed))
    return mm_input(
        request.prompt_ids,
        MultiModalKwargsItems({"image": inputs}),
        {"image": keys},
        {"image": ranges},
    )


def _params(params: SamplingParams, seed: int, eos_token_ids: Sequence[int]) -> Any:
    """vLLM's ``SamplingParams`` for ours."""
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or 0,  # 0: all tokens
        seed=seed,
        logprobs=0,  # of the sampled token
        stop_token_ids=sorted({*eos_token_ids, *params.stop_token_ids}),
        min_tokens=params.min_new_tokens,
        ignore_eos=True,  # vLLM's own, of which it knows one
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if params.stop else RequestOutputKind.FINAL_ONLY,
    )
