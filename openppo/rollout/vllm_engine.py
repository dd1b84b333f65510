"""Generation with vLLM inside the trainer's process: weights of its own, handed over before each rollout."""

import gc
import importlib.util
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from openppo import logger
from openppo.config import TrainPPOConfig
from openppo.media import Media
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.rollout.engine import Engine, WeightSource
from openppo.rollout.sampling import completed_stop
from openppo.rollout.vllm_requests import VLLMRequests, add_request, masking
from openppo.types import Completion, FinishReason, SamplingParams, StopCheck

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PROBE = 4  # tokens
_TOWER = "vision_tower.vision_model."


def check_vllm() -> None:
    """``ValueError`` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "--rollout_engine vllm needs the package vllm, which is not installed: pip install openppo[vllm] (see "
            "docs/vllm.md), or omit the flag to sample with the actor's own module."
        )


class VLLMEngine(Engine):
    """``Engine`` over a copy of the policy in vLLM.

    Each rank has one and decodes alone; or ``vllm_tensor_parallel_size`` ranks have one in pieces
    and decode in lockstep.

    ``name`` is a folder or hub name with the config of the policy, and of one that ``reads_images`` tokenizer and
    processor; its weights are not read. A prompt and its response
    have ``max_tokens`` at most. Weights come through ``with_weights`` only, so requests are submitted and decoded
    inside it. Outside it, from the first time on, the copy takes no GPU memory. A sampled id in ``eos_token_ids`` ends
    a response and belongs to it. Each request has a random stream of its own, but vLLM's arithmetic may depend on the
    batch, and with it the last digits of probabilities. All ranks make their engines together, in a process group that
    has begun.
    """

    def __init__(
        self,
        name: str,
        config: TrainPPOConfig,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        show_progress: bool = False,
        stop: StopCheck | None = None,
        reads_images: bool = False,
        sampled_ids: SampledIds = ALL_IDS,
    ) -> None:
        super().__init__(show_progress, stop)
        check_vllm()
        self.eos_token_ids, self.sampled_ids = sorted(eos_token_ids), sampled_ids
        self.max_tokens = max_tokens
        self._sleeps = torch.cuda.is_available()  # vLLM's sleep mode is one of its CUDA allocator
        self._sleep_level: int | None = None  # until the first weights have come
        self._asleep = self._awake = False
        self._llm = _start(
            name,
            config,
            max_tokens,
            sleeps=self._sleeps,
            reads_images=reads_images,
            ids=sampled_ids,
        )
        self._requests = VLLMRequests(config.generation.vllm_tensor_parallel_size)
        if self._requests.n_ranks > 1:
            self.any_rank = self._requests.any_rank

    @property
    def busy(self) -> bool:
        return bool(self._requests.own)

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        park: bool = False,
        continue_from: int | None = None,
        media: Media = (),
    ) -> int:
        """Queue a request and return its number. ``ValueError`` if prompt and response may not fit.

        vLLM finds kept keys and values itself: ``park`` and ``continue_from`` have no effect.
        """
        if not prompt_ids:
            raise ValueError("a prompt needs at least one token")
        if (
            len(prompt_ids) + params.max_new_tokens > self.max_tokens
        ):  # vLLM would end such a response early
            raise ValueError(
                f"A prompt of {len(prompt_ids)} tokens and a response of up to {params.max_new_tokens} exceed the "
                f"{self.max_tokens} that vLLM was started for, --prompt_max_len plus --generate_max_len or the model's "
                "context: raise --prompt_max_len, or shorten the prompt."
            )
        assert self._awake, "the engine has no weights outside of with_weights()"
        number = next(self._numbers)
        self._requests.submit(number, prompt_ids, params, seed=seed, media=media)
        return number

    def cancel(self, number: int) -> None:
        """Drop a request; the next step frees its row. Nothing happens if it has ended."""
        self._requests.cancel(number)

    def step(self) -> None:
        """One forward pass of vLLM: decode one token per row, prefill waiting requests, or both."""
        engine, under_way = self._llm.llm_engine, self._requests.under_way
        for new, cancelled in self._requests.exchange():
            for request in new:
                add_request(self._llm, request, self.eos_token_ids)
            engine.abort_request(cancelled)
        for output in engine.step() if under_way else ():
            if output.request_id not in under_way:
                continue  # it was cancelled
            [answer], params = output.outputs, under_way[output.request_id]
            ids = list(answer.token_ids)
            stopped = (
                completed_stop(ids, params, self.decode) is not None
            )  # vLLM has no tokenizer for it
            if not (stopped or output.finished):
                continue
            if not output.finished:
                engine.abort_request([output.request_id])
            del under_way[output.request_id]
            if (number := self._requests.own.pop(output.request_id, None)) is None:
                continue  # it is another rank's
            self.read_tokens += len(output.prompt_token_ids)
            self.reused_tokens += output.num_cached_tokens or 0
            reason = (
                FinishReason.LENGTH
                if answer.finish_reason == "length" and not stopped
                else FinishReason.STOP
            )
            greedy = params.temperature == 0  # then the choice is certain, as with HFEngine
            chosen = zip(answer.logprobs, ids, strict=True)
            log_probs = [0.0 if greedy else entry[token].logprob for entry, token in chosen]
            self._ended[number] = Completion(
                ids, log_probs, [self.version] * len(ids), finish_reason=reason
            )

    @contextmanager
    def with_weights(self, weights: WeightSource) -> Iterator[None]:
        """Inside, requests can be decoded, with the weights of now; those still under way at its end are dropped.

        All ranks enter together.
        """
        try:
            self._hand_over(weights)
            if self._sleeps and self._sleep_level is None:
                self._sleep_level = self._check_sleep(weights)
            yield
        finally:
            self._llm.llm_engine.abort_request(list(self._requests.under_way))
            self._requests.clear()
            self._awake = False
            if self._sleeps:
                self._sleep(self._sleep_level or 1)

    def _hand_over(self, weights: WeightSource) -> None:
        if self._asleep:
            self._wake_up(
                "weights"
            )  # the cache later: memory may not hold both beside gathered weights
        self._llm.collective_rpc(_take_in, args=(weights.merged(),))
        if self._asleep:
            self._wake_up("kv_cache")
        self._llm.reset_prefix_cache()  # keys and values of the old weights
        self._llm.llm_engine.reset_encoder_cache()  # and features of images
        self._asleep, self._awake = False, True

    def _sleep(self, level: int) -> None:
        self._llm.sleep(level=level)
        self._asleep = True

    def _check_sleep(self, weights: WeightSource) -> int:
        """Sleep level 2, which takes no host memory, if a completion is the same after it; else 1.

        Level 2 has returned gibberish (vllm#29341): it drops all tensors, and only weights are handed over. All ranks
        hand over equally often, whatever they find.
        """
        [kept], before = self._llm.collective_rpc(_copy_other_tensors), self._greedy_ids()
        self._sleep(2)
        self._hand_over(weights)
        if not self._anywhere(self._greedy_ids() != before):
            return 2
        for (module, name), copy in kept.items():
            getattr(module, name).copy_(copy)
        self._llm.reset_prefix_cache()
        if self._anywhere(self._greedy_ids() != before):
            raise ValueError(
                "--rollout_engine vllm: after vLLM's sleep level 2 a greedy completion differs, and restoring all but "
                "weights does not mend it. Use --rollout_engine hf, or another release of vLLM."
            )
        logger.warning(
            "vLLM's sleep level 2 changes completions: level 1 is used, which keeps weights in host memory"
        )
        return 1

    def _greedy_ids(self) -> list[int]:
        probe = self.sampled_ids.first(_PROBE)
        n_new = min(16, self.max_tokens - len(probe))
        number = self.submit(probe, SamplingParams(n_new, temperature=0.0), seed=0)
        while self._anywhere(self.busy):
            self.step()
        return self._ended.pop(number).token_ids

    def _wake_up(self, tag: str) -> None:
        """vLLM allocates outside of torch's pool, which holds on to what training has left free."""
        gc.collect()
        torch.cuda.empty_cache()
        self._llm.wake_up(tags=[tag])

    def _drop_all(self) -> None:
        for number in list(self._requests.own.values()):
            self._requests.cancel(number)


def _start(
    name: str,
    config: TrainPPOConfig,
    max_tokens: int,
    sleeps: bool,
    reads_images: bool,
    ids: SampledIds = ALL_IDS,
) -> Any:
    """An ``LLM`` in this process and process group. ``ValueError`` for what vLLM finds wrong with model and options."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before the import, like all of these
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    memory_share = config.generation.vllm_gpu_memory_utilization
    arguments: dict[str, Any] = {
        "dtype": "bfloat16" if config.deepspeed.bf16 else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": not reads_images,  # a processor of vLLM needs it
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": max_tokens,
        "gpu_memory_utilization": memory_share,
        "seed": config.deepspeed.seed,
        "distributed_executor_backend": "external_launcher",  # takes the process group that is there
        "tensor_parallel_size": config.generation.vllm_tensor_parallel_size,
        "generation_config": "vllm",  # not the model's: OpenPPO's options are all that counts
        "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
        "enforce_eager": not torch.cuda.is_available(),  # without CUDA graphs compiling gains little
        "enable_sleep_mode": sleeps,
        "enable_prefix_caching": True,  # the turns of a conversation begin with those before
        "max_num_seqs": config.generation.max_num_seqs,  # None: vLLM's own default
    }
    if ids.left_out:
        arguments["logits_processors"] = [masking(ids)]
    if reads_images:  # OpenPPO's processor has scaled pixels, and keeps them
        arguments |= {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0}
    try:
        with _leaving_the_process_alone():
            llm = LLM(model=name, **arguments)
    except (ImportError, ValueError) as error:
        what = f"--rollout_engine vllm with --vllm_gpu_memory_utilization {memory_share}"
        raise ValueError(f"{what}: vLLM cannot start on {name}: {error}") from error
    for value in vars(llm.llm_engine.engine_core).values():
        if isinstance(
            value, weakref.finalize
        ):  # it would destroy the trainer's process group, at the latest at exit
            value.detach()
    gc.unfreeze()  # vLLM exempts all that is there from garbage collection, the trainer's objects too
    return llm


@contextmanager
def _leaving_the_process_alone() -> Iterator[None]:
    """vLLM reads torchrun's ``RANK``, if need be from here, and sets torch's number of threads, on a CPU for good.

    It must not meet torchrun's store: that serves the launch, of which rollout ranks are a part.
    """
    set_threads = torch.set_num_threads
    n_threads = torch.get_num_threads()
    before = dict(os.environ)
    os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
    os.environ.pop(_AGENT_STORE, None)
    try:
        yield
    finally:
        for name in ("RANK", _AGENT_STORE):
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}
        torch.set_num_threads = set_threads
        torch.set_num_threads(n_threads)


def _copy_other_tensors(worker: Any) -> dict[tuple[Any, str], Tensor]:
    """Runs in vLLM's worker: copies of all tensors of modules but parameters, by module and attribute."""
    tensors = {
        (module, name): value
        for module in worker.get_model().modules()
        for name, value in {**module._buffers, **vars(module)}.items()
        if isinstance(value, Tensor)
    }
    return {place: tensor.to("cpu", copy=True) for place, tensor in tensors.items()}


def _take_in(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker. ``ValueError`` if its model has a weight that is not among ``weights``, or the reverse."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.get_model()
    wanted = {name for name, _ in model.named_parameters()}  # of tied weights one
    if any(
        name.startswith(_TOWER) for name in wanted
    ):  # of CLIP and SigLIP, as transformers named it before 5
        weights = (
            (re.sub(r"vision_tower\.(vision_model\.)?", _TOWER, name), weight)
            for name, weight in weights
        )
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, worker.model_config)
        for head in (
            model.modules()
        ):  # on CPUs a head has a packed copy, which vLLM leaves stale where weights are tied
            if isinstance(head, ParallelLMHead) and head.weight.device.type == "cpu":
                head.quant_method.process_weights_after_loading(head)
    missing = sorted(wanted - loaded)
    if missing:
        raise ValueError(
            f"--rollout_engine vllm: {type(model).__name__} of vLLM has weights that the actor has not, under these "
            f"names: {', '.join(missing[:5])}. Use --rollout_engine hf for this model."
        )
