"""Check of an errand: models read who wrote each token, GPT-2 as ``token_type_ids``.

Experience and a micro-batch of the buffer have the log-probs of one plain forward of each row, which has them by hand.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from openppo.config import TrainPPOConfig, from_options
from openppo.experience import ExperienceMaker
from openppo.experience.replay_buffer import join_rows
from openppo.models import Actor
from openppo.tracking import Metrics
from openppo.types import Completion, FinishReason, Prompt, Sample, SingleProcess

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=12, n_positions=16, n_embd=8, n_layer=1, n_head=2))
actor = Actor(model.eval())
samples = []
for response in ([9, 8, 1], [7]):
    log_probs, versions = [0.0] * len(response), [0] * len(response)
    completion = Completion(response, log_probs, versions, finish_reason=FinishReason.STOP)
    sample = Sample.of_response(Prompt("", [5, 6]), completion, group=0)
    samples.append(sample.with_scores({"reward": 1.0}))

config = from_options(
    TrainPPOConfig,
    pretrain="none",
    reward_fn="reward.py",
    advantage_estimator="reinforce",
    init_kl_coef=0.0,
    old_log_probs="recompute",
)
maker = ExperienceMaker(
    actor=actor,
    critic=None,
    reference=None,
    config=config,
    comm=SingleProcess(),
    device=torch.device("cpu"),
    pad_token_id=0,
)
rows = maker.make(samples, Metrics())

batch = join_rows(rows)
with torch.no_grad():
    trained = actor(batch.inputs, batch.action_mask)
for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
    segment = sample.last
    ids = torch.tensor([segment.token_ids])
    authors = torch.tensor([segment.action_mask]).long()
    with torch.no_grad():
        logits = model(input_ids=ids, token_type_ids=authors).logits
        without = model(input_ids=ids).logits
    assert not torch.allclose(logits, without)

    by_hand = logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
    by_hand = torch.where(authors[0, 1:].bool(), by_hand, 0.0)
    assert torch.allclose(row.log_probs[0, 1:], by_hand, atol=1e-5)
    assert torch.allclose(trained[number, 1 : ids.shape[1]], by_hand, atol=1e-5)
