"""Decoding as a participant: vLLM's CPU build 0.32.0, for the same 64 prompts."""

import json
import os

import turns


def main() -> None:
    """Load, then decode at each turn."""
    arguments = turns.options(__doc__).parse_args()
    clock = turns.Turns()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault(
        "VLLM_CPU_OMP_THREADS_BIND", f"0-{int(os.environ['OMP_NUM_THREADS']) - 1}"
    )

    import torch
    import vllm

    dtype = "float32" if arguments.dtype == "float32" else "bfloat16"
    policy = arguments.assets / arguments.workload / "policy"
    model = vllm.LLM(
        model=str(policy), dtype=dtype, max_model_len=512, max_num_seqs=turns.BATCH, seed=0
    )
    limit = turns.NEW_TOKENS[arguments.workload]
    params = vllm.SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_tokens=limit, logprobs=0, detokenize=False
    )  # logprobs=0: those of the sampled tokens
    with open(arguments.assets / "prompts.jsonl", encoding="utf-8") as file:
        prompts = [{"prompt_token_ids": json.loads(next(file))["ids"]} for _ in range(turns.BATCH)]
    clock.ready(vllm=vllm.__version__, torch=torch.__version__)
    for _ in clock:
        outputs = model.generate(prompts, params, use_tqdm=False)
        clock.report(tokens=sum(len(output.outputs[0].token_ids) for output in outputs))


if __name__ == "__main__":
    main()
