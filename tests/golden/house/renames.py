"""Differences that are meant, each with its reason; a rename that nothing needs is an error.

``kind`` says what is renamed: a ``metric``, a ``log`` text (part of a line with its placeholders; without ``old``
or ``new`` a whole line), a ``field`` of samples, rows, weights or invariants, or a ``file``. Without ``new`` the old
one is gone, without ``old`` the new one is added. ``cases`` limits it to these; none: all.

    Rename("metric", old="reward_mean", new="reward", reason="one name in all commands")
"""

from dataclasses import dataclass

KINDS = ("metric", "log", "field", "file")


@dataclass(frozen=True)
class Rename:
    """One difference on purpose between what is recorded and what runs leave now."""

    kind: str
    old: str | None = None
    new: str | None = None
    reason: str = ""
    cases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"{self}: kind is none of {', '.join(KINDS)}"
        assert self.reason, f"{self}: say why in reason"
        assert self.old != self.new, f"{self}: old and new are the same"


_INTERVAL = "evaluations tell the 95 % interval of their means"
_CARD = "every saved model gets a card; with adapters, where peft's empty one was"
_WITH_WEIGHTS = tuple(
    """
    branches chat cispo double_sided dr_grpo dynamic_sampling ema environment function group_norm images
    kl_in_the_loss kl_in_the_reward own_loop ppo prm prm_training program ptx reinforce
    reinforce_baseline remax resume rloo rm several_rewards sft shared_prompts staleness_0 staleness_1
    tasks tools value_pretraining zero_2 zero_3
    """.split()
)
"""Cases that save whole weights; peft wrote a README.md beside adapters."""

RENAMES: tuple[Rename, ...] = (
    Rename("metric", new="eval_reward_ci95", reason=_INTERVAL),
    Rename("metric", new="eval_pass@1_ci95", reason=_INTERVAL),
    Rename("metric", new="eval_pass@2_ci95", reason=_INTERVAL),
    Rename("metric", new="eval/heldout.jsonl/pass@1_ci95", reason=_INTERVAL),
    Rename("metric", new="eval/heldout.jsonl/reward_ci95", reason=_INTERVAL),
    Rename("metric", new="eval/words.jsonl/pass@1_ci95", reason=_INTERVAL),
    Rename("metric", new="eval/words.jsonl/reward_ci95", reason=_INTERVAL),
    Rename("log", new="reward_ci95 N", reason=_INTERVAL, cases=("evaluate",)),
    Rename("log", new="pass@N_ci95 N", reason=_INTERVAL, cases=("evaluate",)),
    Rename(
        "metric",
        old="groups_without_signal",
        reason="a group of one sample is not counted, in however many segments it comes",
        cases=("branches",),
    ),
    Rename("file", new="model/README.md", reason=_CARD, cases=_WITH_WEIGHTS),
    Rename("file", new="model_critic/README.md", reason=_CARD),
    Rename("file", new="exported/README.md", reason=_CARD),
    Rename("file", new="merged/README.md", reason=_CARD),
)
