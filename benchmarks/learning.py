"""Learning beside TRL 1.12.0 and OpenRLHF 0.6.1: rewards by samples and by seconds, on two CPU cores.

    bash benchmarks/peers/setup.sh               # the peers' environments, once
    python benchmarks/learning.py --quick        # one seed, four rollouts
    python benchmarks/learning.py --write        # the full run, kept in benchmarks/results and docs/images

Tasks: the quickstart's letters (SFT start and reward model by its own commands), and stories260K with the word list of
vaderSentiment; OPENPPO_ASSETS is the folder with its models/stories260K. PPO of the three libraries, GRPO of OpenPPO
and TRL. Two runs at a time, each a process with one thread. Runs that ended stay in ``--runs`` and are not repeated.

Equal (benchmarks/peers/learn.py) are start, critic's start, prompts, batches, mini-batches, epochs, rates and their
cosine to a tenth, Adam, clipping of gradients, KL, gamma, lambda, clip ranges, whitened advantages of PPO; rewards are
not clipped, and nothing is subtracted for a missing EOS. Not equal: OpenRLHF takes means over sequences of the means of
their tokens, writes EOS over the last token of a response that was cut, and lets no response be empty. TRL's PPO adds
the score to the reward one token after EOS, and its rates fall once per rollout, without warm-up. TRL's GRPO adds 1e-4
to the standard deviation of a group. Each library draws prompts and samples by itself.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers import curves, learn
from peers.interleave import (
    CACHE,
    REPOSITORY,
    Entry,
    Participant,
    describe_machine,
    say,
    write_results,
)

GRPO = ("--algorithm", "grpo")
PARTICIPANTS = {
    "openppo-ppo": Entry("OpenPPO PPO", "openppo_learn.py", threads=1),
    "trl-ppo": Entry("TRL PPO", "trl_learn.py", (), "trl", threads=1),
    "openrlhf-ppo": Entry("OpenRLHF PPO", "openrlhf_learn.py", (), "openrlhf", threads=1),
    "openppo-grpo": Entry("OpenPPO GRPO", "openppo_learn.py", GRPO, threads=1),
    "trl-grpo": Entry("TRL GRPO", "trl_learn.py", GRPO, "trl", threads=1),
}
EVALUATED = {"sort": (500, 1), "stories": (64, 8)}  # held-out prompts, and responses to each
ONE_AT_A_TIME = threading.Lock()


def prepare(task: str, assets: Path) -> None:
    """Write a task's policy, critic, prompts and held-out prompts on first use."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    folder = assets / task
    if folder.exists():
        return
    say(f"preparing {task}")
    made = assets / f"{task}.{os.getpid()}"
    made.mkdir(parents=True)
    if task == "sort":  # steps 1 to 3 of the quickstart
        script = (REPOSITORY / "examples/scripts/quickstart.sh").read_text(encoding="utf-8")
        steps = script[script.index('echo "1/4') : script.index('echo "4/4')]
        given = f'set -e; seed=1 run="{made}" launch="{sys.executable} -m torch.distributed.run --nproc_per_node 2"\n'
        subprocess.run(
            ["bash", "-c", given + steps], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
        )
        for stage, name in (("sft", "policy"), ("rm", "critic")):
            shutil.copytree(
                made / stage, made / name, ignore=shutil.ignore_patterns("logs", "checkpoints*")
            )
    else:
        source = Path(os.environ["OPENPPO_ASSETS"]) / "models" / "stories260K"
        subprocess.run(
            [sys.executable, REPOSITORY / "examples/stories.py", "make", "--out", made / "data"],
            check=True,
        )
        model = AutoModelForCausalLM.from_pretrained(source)
        give_own_bos(model, source, made / "policy")
        torch.manual_seed(0)
        critic = AutoModelForSequenceClassification.from_pretrained(made / "policy", num_labels=1)
        critic.save_pretrained(made / "critic")
    settings = (
        made / "policy" / "tokenizer_config.json"
    )  # OpenRLHF's transformers knows no newer name
    written = json.loads(settings.read_text(encoding="utf-8")) | {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }
    settings.write_text(json.dumps(written), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(made / "policy")
    tokenizer.save_pretrained(made / "critic")
    n = learn.TASKS[task].rollouts * learn.TASKS[task].samples
    write_rows(
        made / "data" / ("prompts.jsonl" if task == "sort" else "train.jsonl"),
        made / "prompts.jsonl",
        n,
        tokenizer,
    )
    write_rows(
        made / "data" / "heldout.jsonl", made / "heldout.jsonl", EVALUATED[task][0], tokenizer
    )
    made.rename(folder)


def write_rows(source: Path, target: Path, n: int, tokenizer: Any) -> None:
    """Write ``n`` prompts, cycling through ``source``: text, ids, and text with BOS in it."""
    texts = [json.loads(line)["input"] for line in source.read_text(encoding="utf-8").splitlines()]
    with open(target, "w", encoding="utf-8") as file:
        for text in itertools.islice(itertools.cycle(texts), n):
            row = {
                "input": text,
                "with_bos": tokenizer.bos_token + text,
                "ids": tokenizer(text).input_ids,
            }
            assert tokenizer(row["with_bos"], add_special_tokens=False).input_ids == row["ids"], row
            file.write(json.dumps(row) + "\n")


def give_own_bos(model: Any, source: Path, folder: Path) -> None:
    """Save stories260K with <unk> as BOS, read as its <s> was, since OpenRLHF takes EOS in a prompt for padding."""
    import torch

    embeddings = model.get_input_embeddings().weight
    model.lm_head.weight = torch.nn.Parameter(embeddings.detach().clone())
    model.config.tie_word_embeddings = False
    with torch.no_grad():
        embeddings[0] = embeddings[1]
    for config in (model.config, model.generation_config):
        config.bos_token_id = 0
    model.save_pretrained(folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    post = (
        json.dumps(tokenizer["post_processor"])
        .replace("<s>", "<unk>")
        .replace('"ids": [1]', '"ids": [0]')
    )
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer | {"post_processor": json.loads(post)})
    )
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<unk>"}))


def train(
    task: str, participant: str, seed: int, rollouts: int, arguments: argparse.Namespace
) -> curves.Run:
    """One run in a process of its own, and its held-out reward."""
    running = Participant(PARTICIPANTS[participant])
    given = [
        "--assets",
        arguments.assets.resolve(),
        "--task",
        task,
        "--rollouts",
        rollouts,
        "--seed",
        seed,
    ]
    try:
        running.start(arguments.environments, list(map(str, given)))
        (process,) = running.processes
        curve = [json.loads(line) for line in process.communicate()[0].decode().splitlines()]
        if process.returncode or len(curve) != rollouts:
            raise RuntimeError(
                f"{task} {participant} {seed}: {len(curve)} steps{running.last_lines()}"
            )
        with ONE_AT_A_TIME:
            heldout = evaluate(task, arguments.assets / task, f"{running.run_folder.name}/policy")
    finally:
        running.stop()
    run = {
        "task": task,
        "participant": participant,
        "seed": seed,
        "curve": curve,
        "heldout": heldout,
    }
    say(f"  {task} {participant} {seed}: {curve[-1]} {heldout}")
    return run


def evaluate(task: str, folder: Path, policy: str) -> dict[str, float]:
    """Mean reward of sampled responses to held-out prompts, and their KL to the start in nats per response."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        logging,
    )

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n, n_each = EVALUATED[task]
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy", padding_side="left")
    model, start = (
        AutoModelForCausalLM.from_pretrained(name).eval() for name in (policy, folder / "policy")
    )
    texts = [
        row["input"] for row in learn.prompts(folder / "heldout.jsonl", n) for _ in range(n_each)
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    width, eos = batch["input_ids"].shape[1], tokenizer.eos_token_id
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    special = {"eos_token_id": eos, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        tokens = model.generate(
            **batch, max_new_tokens=learn.TASKS[task].new_tokens, **sampling, **special
        )
        ended = (tokens[:, width:] == eos).int().cumsum(-1)
        real = (
            torch.nn.functional.pad(ended, (1, 0))[:, :-1] == 0
        )  # up to and including the first EOS
        mask = torch.cat([batch["attention_mask"].bool(), real], dim=1)
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        gap = torch.zeros(real.shape)
        for sign, scored in ((1, model), (-1, start)):
            logits = scored(tokens, attention_mask=mask.long(), position_ids=positions).logits[
                :, width - 1 : -1
            ]
            gap += sign * logits.log_softmax(-1).gather(-1, tokens[:, width:, None])[..., 0]
    if task == "sort":
        judge = AutoModelForSequenceClassification.from_pretrained(folder / "critic").eval()
        rewards = learn.scores(
            judge, [ids[kept].tolist() for ids, kept in zip(tokens, mask, strict=True)]
        )
    else:
        from reward_sentiment import reward_fn

        rewards = reward_fn(
            [], tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True), []
        )
    return {"reward": statistics.mean(rewards), "kl": float((gap * real).sum(-1).mean())}


def main() -> None:
    """Parse the command line, run, print and perhaps write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="four rollouts of the first seed")
    parser.add_argument("--tasks", nargs="+", choices=list(learn.TASKS), default=list(learn.TASKS))
    parser.add_argument("--only", nargs="+", choices=list(PARTICIPANTS), default=list(PARTICIPANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--environments", type=Path, default=CACHE, help="the folder given to peers/setup.sh"
    )
    parser.add_argument(
        "--assets",
        type=Path,
        default=CACHE / "learning",
        help="starts and prompts, made on first use",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=CACHE / "learning.jsonl",
        help="runs that ended (not of --quick)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the table in benchmarks/results, the curves in docs",
    )
    arguments = parser.parse_args()
    for task in arguments.tasks:
        prepare(task, arguments.assets)
    seeds, file = arguments.seeds[:1] if arguments.quick else arguments.seeds, arguments.runs
    kept = (
        file.read_text(encoding="utf-8").splitlines()
        if file.exists() and not arguments.quick
        else []
    )
    runs = {(run["task"], run["participant"], run["seed"]): run for run in map(json.loads, kept)}
    wanted = list(itertools.product(arguments.tasks, arguments.only, seeds))

    def one(key: tuple[str, str, int]) -> None:
        runs[key] = train(*key, 4 if arguments.quick else learn.TASKS[key[0]].rollouts, arguments)
        if not arguments.quick:
            with ONE_AT_A_TIME, open(file, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(runs[key]) + "\n")

    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                one, sorted((key for key in wanted if key not in runs), key=lambda key: key[2])
            )
        )  # by seed
    by_task = {
        task: {
            PARTICIPANTS[name].name: [runs[task, name, seed] for seed in seeds]
            for name in arguments.only
        }
        for task in arguments.tasks
    }
    lines = [
        line
        for task, found in by_task.items()
        for line in [f"## {task}", "", *curves.table(found), ""]
    ]
    lines += describe_machine(
        {"OpenPPO": {name: version(name) for name in ("torch", "transformers", "deepspeed")}}
    )
    say("\n" + "\n".join(lines))
    if arguments.write:
        write_results("learning", "Learning beside TRL 1.12.0 and OpenRLHF 0.6.1", lines)
        (REPOSITORY / "docs" / "images" / "learning.svg").write_text(
            curves.draw(by_task), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
