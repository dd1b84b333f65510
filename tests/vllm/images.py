"""``images.py FOLDER FAMILY...`` samples with vLLM from ``FOLDER/<family>``, a policy that reads images.

Completions are written to ``FOLDER/<family>.json``, and weights that changed in between to ``FOLDER/<family>-changed``.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch

from openppo.media import TokenIds
from openppo.models import Actor
from openppo.models.sampled_ids import SampledIds
from openppo.models.vision_models import placeholders
from openppo.rollout.vllm_engine import VLLMEngine
from openppo.strategy.comm import init_process_group
from openppo.types import SamplingParams
from tests.images import load, pictures, processor_of
from tests.vllm.run import CONFIG, Weights, change, plain

PARAMS = SamplingParams(8)


def prompts(family):
    """With 1, 0, 3 and 2 images, some of them twice."""
    images = pictures(4)
    rows = [{"input": "<image>a", "images": images[:1]}, {"input": "ab", "images": []}]
    rows.append({"input": "a<image>b<image><image>", "images": images[1:]})
    rows.append({"input": "<image>a<image>", "images": images[:2]})
    return load(processor_of(family), rows)


def sampled(engine, weights, given):
    """Completions of all prompts together, and of each prompt with its response and the first prompt after it."""
    with engine.with_weights(weights):
        ids, media = [p.token_ids for p in given], [p.media for p in given]
        first = engine.generate(given, PARAMS, range(len(ids)))
        longer = [[*i, *c.token_ids, *ids[0]] for i, c in zip(ids, first, strict=True)]
        prompts = [
            TokenIds(row, (*items, *media[0])) for row, items in zip(longer, media, strict=True)
        ]
        more = engine.generate(prompts, PARAMS, range(len(ids)))
    return plain(first), longer, plain(more)


def main(folder, *families):
    """Every family, before and after a change of all weights."""
    init_process_group(timedelta(seconds=100))
    for family in families:
        torch.manual_seed(3)
        model, given = Actor(str(folder / family)).model, prompts(family)
        ids = SampledIds(
            tuple(range(token_id, token_id + 1) for token_id in sorted(placeholders(model.config)))
        )
        engine = VLLMEngine(
            str(folder / family), CONFIG, 200, [], reads_images=True, sampled_ids=ids
        )
        result = [sampled(engine, Weights(model), given)]
        with torch.no_grad():
            change(model.requires_grad_(), 1)
        model.save_pretrained(folder / f"{family}-changed")
        result.append(sampled(engine, Weights(model), given))
        (folder / f"{family}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
