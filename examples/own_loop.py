"""A PPO loop of one's own: sample, score by hand, train, evaluate, save.

    python examples/sort_letters.py make --out DATA
    python examples/own_loop.py --model MODEL --data DATA --save_path TRAINED

MODEL may be DATA/model or, better, one that has seen the task: quickstart/sft of examples/scripts/quickstart.sh. All
ranks run the same lines, so torchrun --nproc_per_node 2 in place of python shares the work between two.
"""

import argparse
from itertools import islice

from openppo.config import TrainPPOConfig, from_options
from openppo.trainer import build_ppo_trainer, quiet_libraries
from openppo.types import Sample


def right_places(label: str, response: str) -> float:
    """Return the share of letters that stand where they should: partial credit that exact match does not give."""
    return sum(a == b for a, b in zip(label, response, strict=False)) / max(
        len(label), len(response)
    )


def train(model: str, data: str, save_path: str, steps: int) -> None:
    """Train on our own scores; held-out prompts are judged by the built-in exact match."""
    quiet_libraries()
    config = from_options(
        TrainPPOConfig,
        pretrain=model,
        prompt_data=f"{data}/prompts.jsonl",
        label_key="label",
        verifiable_reward=("exact_match",),
        eval_data=f"{data}/heldout.jsonl",
        rollout_batch_size=256,
        micro_rollout_batch_size=128,
        train_batch_size=128,
        micro_train_batch_size=64,
        max_epochs=2,
        actor_learning_rate=3e-4,
        critic_learning_rate=1e-3,
        generate_max_len=16,
        save_path=save_path,
    )
    trainer = build_ppo_trainer(config)

    def say(text: str) -> None:
        if trainer.comm.rank == 0:
            print(text, flush=True)

    def rewarded(sample: Sample) -> Sample:
        ids = sample.last.response_ids
        response = trainer.components.tokenizer.decode(ids, skip_special_tokens=True)
        return sample.with_scores({"right_places": right_places(sample.prompt.label, response)})

    say(f"exact match before {trainer.evaluate()['eval_pass@1']:.3f}")
    for prompts in islice(trainer.prompt_batches(), steps):
        samples = trainer.rollout(prompts)  # this rank's share, scored by --verifiable_reward
        metrics = trainer.train_on(samples.map(rewarded))
        trainer.report(metrics)  # logs; evaluates at the end of an episode
        say(f"step {trainer.global_step}: reward {metrics['reward']:.3f}, KL {metrics['kl']:.4f}")
    say(f"exact match after {trainer.evaluate()['eval_pass@1']:.3f}")
    trainer.save()
    trainer.close()


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the model to train")
    parser.add_argument("--data", required=True, help="the folder that sort_letters.py wrote")
    parser.add_argument("--save_path", required=True, help="the folder for the trained model")
    parser.add_argument("--steps", type=int, default=30, help="global steps")
    args = parser.parse_args()
    train(args.model, args.data, args.save_path, args.steps)


if __name__ == "__main__":
    main()
