"""Generation with vLLM inside the trainer's process, on a copy of the weights."""

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
from openppo.media import TokenIds, Tokens
from openppo.models.sampled_ids import ALL_IDS, SampledIds
from openppo.rollout.engine import Engine, WeightSource
from openppo.rollout.sampling import Decode, completed_stop
from openppo.rollout.vllm_requests import VLLMRequests, add_request, masking
from openppo.types import Completion, FinishReason, SamplingParams

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_PROBE = 4
"""Tokens of the prompt whose greedy completion checks a sleep level."""
_TOWER = "vision_tower.vision_model."
"""Prefix of the weights of CLIP and SigLIP in vLLM, as in transformers before version 5."""


def check_vllm() -> None:
    """Raise ``ValueError`` if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "--rollout_engine vllm needs the package vllm, which is not installed: pip install openppo[vllm] (see "
            "docs/vllm.md), or omit the flag to sample with the actor's own module."
        )


class VLLMEngine(Engine):
    """``Engine`` over a copy of the policy in vLLM.

    Each rank has a copy and decodes alone, or ``vllm_tensor_parallel_size`` ranks share one and decode in lockstep. All
    ranks make their engines together, in an initialized process group.

    ``name`` is a folder or hub name with the config of the policy, and for a policy that ``reads_images`` its tokenizer
    and processor; its weights are not read. A prompt and its response have at most ``max_tokens``. Weights come through
    ``with_weights`` only, so requests are submitted and decoded inside it. Outside it, from the first time on, the copy
    takes no GPU memory. A sampled id in ``eos_token_ids`` ends a response and belongs to it. Each request has its own
    random stream, but vLLM's arithmetic, and so the last digits of probabilities, may depend on the batch.
    """

    def __init__(
        self,
        name: str,
        config: TrainPPOConfig,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        reads_images: bool = False,
        sampled_ids: SampledIds = ALL_IDS,
        decode: Decode | None = None,
    ) -> None:
        super().__init__(sampled_ids=sampled_ids, decode=decode)
        check_vllm()
        self.eos_token_ids = sorted(eos_token_ids)
        self.max_tokens = max_tokens
        self._sleeps = torch.cuda.is_available()  # vLLM's sleep mode is one of its CUDA allocator
        self._sleep_level: int | None = None  # None before the first weights
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
        prompt: Tokens,
        params: SamplingParams,
        seed: int,
        park: bool = False,
        continue_from: int | None = None,
    ) -> int:
        """Queue a request and return its number; ``ValueError`` if prompt and response may not fit.

        vLLM finds kept keys and values itself: ``park`` and ``continue_from`` have no effect.
        """
        n_prompt = len(prompt.token_ids)
        if n_prompt == 0:
            raise ValueError("a prompt needs at least one token")
        # vLLM would end a longer response early.
        if n_prompt + params.max_new_tokens > self.max_tokens:
            raise ValueError(
                f"A prompt of {n_prompt} tokens and a response of up to {params.max_new_tokens} exceed the "
                f"{self.max_tokens} that vLLM was started for, --prompt_max_len plus --generate_max_len or the model's "
                "context: raise --prompt_max_len, or shorten the prompt."
            )
        assert self._awake, "the engine has no weights outside of with_weights()"
        number = next(self._numbers)
        self._requests.submit(number, prompt, params, seed=seed)
        return number

    def cancel(self, number: int) -> None:
        """Drop a request; the next step frees its row. Nothing happens if it has ended."""
        self._requests.cancel(number)

    def step(self) -> None:
        """Run one forward pass of vLLM: decode one token per row, prefill waiting requests, or both."""
        engine = self._llm.llm_engine
        for new, cancelled in self._requests.exchange():
            for request in new:
                add_request(self._llm, request, self.eos_token_ids)
            engine.abort_request(cancelled)

        if not self._requests.under_way:
            return
        for output in engine.step():
            if output.request_id in self._requests.under_way:
                self._record(output)

    def _record(self, output: Any) -> None:
        """Keep the completion of an output of vLLM's step if its response has ended."""
        under_way = self._requests.under_way
        name = output.request_id
        params = under_way[name]
        [answer] = output.outputs
        ids = list(answer.token_ids)
        # vLLM has no tokenizer to look for stop strings.
        is_stopped = completed_stop(ids, params, self.decode) is not None
        if not (is_stopped or output.finished):
            return
        if not output.finished:
            self._llm.llm_engine.abort_request([name])
        del under_way[name]
        number = self._requests.own.pop(name, None)
        if number is None:
            return  # another rank's request

        self.read_tokens += len(output.prompt_token_ids)
        self.reused_tokens += output.num_cached_tokens or 0
        is_cut = answer.finish_reason == "length" and not is_stopped
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        if params.temperature == 0:
            log_probs = [0.0] * len(ids)  # a greedy choice is certain, as with HFEngine
        else:
            entries = zip(answer.logprobs, ids, strict=True)
            log_probs = [entry[token].logprob for entry, token in entries]
        self._ended[number] = Completion(
            ids, log_probs, [self.version] * len(ids), finish_reason=reason
        )

    @contextmanager
    def with_weights(self, weights: WeightSource) -> Iterator[None]:
        """Load the current weights; inside, requests can be decoded.

        At the end, running requests are dropped. All ranks enter together.
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
        # Memory may not hold both weights and cache beside the gathered weights.
        if self._asleep:
            self._wake_up("weights")
        self._llm.collective_rpc(_take_in, args=(weights.merged(),))
        if self._asleep:
            self._wake_up("kv_cache")
        self._llm.reset_prefix_cache()  # keys and values of the old weights
        self._llm.llm_engine.reset_encoder_cache()  # and features of images
        self._asleep = False
        self._awake = True

    def _sleep(self, level: int) -> None:
        self._llm.sleep(level=level)
        self._asleep = True

    def _check_sleep(self, weights: WeightSource) -> int:
        """Return sleep level 2 if a completion is the same after it; otherwise 1.

        Level 2 takes no host memory, but has returned gibberish (vllm#29341): it drops all tensors, and only weights
        are handed over. All ranks hand over equally often, whatever the result.
        """
        [kept] = self._llm.collective_rpc(_copy_other_tensors)
        before = self._greedy_ids()
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
        probe = TokenIds(self.sampled_ids.first(_PROBE))
        n_new = min(16, self.max_tokens - len(probe.token_ids))
        number = self.submit(probe, SamplingParams(n_new, temperature=0.0), seed=0)
        while self._anywhere(self.busy):
            self.step()
        return self._ended.pop(number).token_ids

    def _wake_up(self, tag: str) -> None:
        """Wake up after releasing free memory of torch's pool, outside of which vLLM allocates."""
        gc.collect()
        torch.cuda.empty_cache()
        self._llm.wake_up(tags=[tag])


def _start(
    name: str,
    config: TrainPPOConfig,
    max_tokens: int,
    sleeps: bool,
    reads_images: bool,
    ids: SampledIds = ALL_IDS,
) -> Any:
    """Start an ``LLM`` in this process group; ``ValueError`` if vLLM refuses model or options."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM reads these variables at its import
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    memory_share = config.generation.vllm_gpu_memory_utilization
    arguments: dict[str, Any] = {
        "dtype": "bfloat16" if config.deepspeed.bf16 else "float32",
        "load_format": "dummy",
        "skip_tokenizer_init": not reads_images,  # vLLM's processors of images need it
        "trust_remote_code": config.model.trust_remote_code,
        "max_model_len": max_tokens,
        "gpu_memory_utilization": memory_share,
        "seed": config.deepspeed.seed,
        "distributed_executor_backend": "external_launcher",  # uses the existing process group
        "tensor_parallel_size": config.generation.vllm_tensor_parallel_size,
        "generation_config": "vllm",  # ignores the model's: only OpenPPO's options count
        "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
        "enforce_eager": not torch.cuda.is_available(),  # compiling gains little without CUDA graphs
        "enable_sleep_mode": sleeps,
        "enable_prefix_caching": True,  # a turn's prompt begins with the turns before
        "max_num_seqs": config.generation.max_num_seqs,  # None: vLLM's own default
    }
    if ids.left_out:
        arguments["logits_processors"] = [masking(ids)]
    if reads_images:  # OpenPPO's processor scales pixels and caches them
        arguments |= {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0}
    try:
        with _leaving_the_process_alone():
            llm = LLM(model=name, **arguments)
    except (ImportError, ValueError) as error:
        options = f"--rollout_engine vllm with --vllm_gpu_memory_utilization {memory_share}"
        raise ValueError(f"{options}: vLLM cannot start on {name}: {error}") from error

    # vLLM's finalizer would destroy the trainer's process group, at the latest at exit.
    for value in vars(llm.llm_engine.engine_core).values():
        if isinstance(value, weakref.finalize):
            value.detach()
    gc.unfreeze()  # vLLM exempts all existing objects from garbage collection, the trainer's too
    return llm


@contextmanager
def _leaving_the_process_alone() -> Iterator[None]:
    """Restore environment and threads of torch after vLLM's start.

    vLLM reads torchrun's ``RANK``, and sets torch's number of threads, on a CPU for good. It must not use torchrun's
    store, which serves the whole launch, rollout ranks included.
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
            if name in before:
                os.environ[name] = before[name]
        torch.set_num_threads = set_threads
        torch.set_num_threads(n_threads)


def _copy_other_tensors(worker: Any) -> dict[tuple[Any, str], Tensor]:
    """Copy all tensors of modules but parameters, by module and attribute, in vLLM's worker."""
    copies: dict[tuple[Any, str], Tensor] = {}
    for module in worker.get_model().modules():
        attributes = {**module._buffers, **vars(module)}
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                copies[module, name] = value.to("cpu", copy=True)
    return copies


def _take_in(worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Load ``weights`` in vLLM's worker; ``ValueError`` if their names differ from its model's."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.get_model()
    wanted = {name for name, _ in model.named_parameters()}  # one name of tied weights
    if any(name.startswith(_TOWER) for name in wanted):
        weights = (
            (re.sub(r"vision_tower\.(vision_model\.)?", _TOWER, name), weight)
            for name, weight in weights
        )
    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(weights)
        finalize_layerwise_reload(model, worker.model_config)
        # On CPUs a head has a packed copy, which vLLM leaves stale if weights are tied.
        for head in model.modules():
            if isinstance(head, ParallelLMHead) and head.weight.device.type == "cpu":
                head.quant_method.process_weights_after_loading(head)

    missing = sorted(wanted - loaded)
    if missing:
        raise ValueError(
            f"--rollout_engine vllm: {type(model).__name__} of vLLM has weights that the actor has not, under these "
            f"names: {', '.join(missing[:5])}. Use --rollout_engine hf for this model."
        )
