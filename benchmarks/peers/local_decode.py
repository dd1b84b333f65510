"""Decoding as a participant: OpenPPO's engine, or plain ``generate`` of transformers, for the same 64 prompts."""

import json
from collections.abc import Callable
from typing import Any

import turns


def engine_decoder(model: Any, rows: list[list[int]], new_tokens: int) -> Callable[[int], int]:
    """A function that decodes all rows with OpenPPO's engine and returns how many tokens came out."""
    from openppo.media import TokenIds
    from openppo.rollout.hf_engine import HFEngine
    from openppo.types import SamplingParams

    engine = HFEngine(
        model, [model.config.eos_token_id], model.config.pad_token_id, max_batch_size=len(rows)
    )
    params = SamplingParams(new_tokens, 1.0, 1.0, None)

    prompts = [TokenIds(row) for row in rows]

    def decode(turn: int) -> int:
        first = turn * len(rows)
        completions = engine.generate(prompts, params, list(range(first, first + len(rows))))
        return sum(len(completion.token_ids) for completion in completions)

    return decode


def transformers_decoder(
    model: Any, rows: list[list[int]], new_tokens: int
) -> Callable[[int], int]:
    """The same with ``model.generate``."""
    import torch
    from transformers import GenerationConfig

    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])  # (B, width)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        eos_token_id=eos,
        pad_token_id=pad,
    )

    @torch.no_grad()
    def decode(turn: int) -> int:
        torch.manual_seed(turn)
        ended = (
            model.generate(input_ids=ids, attention_mask=mask, generation_config=options)[:, width:]
            == eos
        )
        whole = torch.tensor(ended.shape[1])
        return int(torch.where(ended.any(1), ended.int().argmax(1) + 1, whole).sum())

    return decode


def main() -> None:
    """Load, then decode at each turn."""
    parser = turns.options(__doc__)
    parser.add_argument("--engine", choices=["openppo", "transformers"], default="openppo")
    arguments = parser.parse_args()
    clock = turns.Turns()

    import torch
    import transformers

    turns.use_threads()
    dtype = torch.float32 if arguments.dtype == "float32" else torch.bfloat16
    policy = arguments.assets / arguments.workload / "policy"
    if arguments.engine == "openppo":
        from openppo.models.loading import load_causal_lm, load_options

        model = load_causal_lm(
            str(policy), **load_options(dtype is torch.bfloat16, flash_attn=False)
        ).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=dtype).eval()
    with open(arguments.assets / "prompts.jsonl", encoding="utf-8") as file:
        rows = [json.loads(next(file))["ids"] for _ in range(turns.BATCH)]
    make = engine_decoder if arguments.engine == "openppo" else transformers_decoder
    decode = make(model, rows, turns.NEW_TOKENS[arguments.workload])
    clock.ready(torch=torch.__version__, transformers=transformers.__version__)
    for turn in clock:
        clock.report(tokens=decode(turn))


if __name__ == "__main__":
    main()
