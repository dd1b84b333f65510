"""What agents cost beside the model: how busy the engine is, and what reusing keys and values saves.

    python benchmarks/agents.py [--sessions 64] [--turns 4] [--rounds 3]

Sessions of a coroutine agent with instantaneous tools over a small random Llama on two CPU cores. The first table has
the share of the rollout's time in which the engine steps; the second the time that the engine takes for the prompts of
the last turn, histories of about 1,000 tokens, with the keys and values of the turns before and without; the third the
time of a forward and backward pass over groups of four sessions of which each branches once, with beginnings shared and
in separate rows.
"""

import argparse
import statistics
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from openppo.agents import AgentPlayer
from openppo.config.agents import AgentConfig
from openppo.experience import ReplayBuffer
from openppo.experience.replay_buffer import collate
from openppo.media import TokenIds, Tokens
from openppo.models import Actor
from openppo.models.attention import use_fast_attention
from openppo.models.prefixes import share_where_exact
from openppo.rollout.driver import EngineDriver
from openppo.rollout.hf_engine import HFEngine
from openppo.rollout.players import PlayerParts
from openppo.rollout.sampling import decoder
from openppo.sources.groups import GroupPlayer, play_together
from openppo.sources.held_out import held_out_group
from openppo.tracking import Metrics
from openppo.types import (
    Completion,
    Prompt,
    Sample,
    SamplingParams,
    SingleProcess,
    segments_of,
)

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SIZES = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TASK, SAMPLED, SAID = 480, 32, 100
"""Characters of a task, a token each, tokens that are sampled in a turn, and characters of what a tool answers."""
LIMITS = 90.0, 3.0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a chat template."""
    special = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(
        WordLevel({t: i for i, t in enumerate([*special, *string.printable])}, unk_token="<unk>")
    )
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **names)


@dataclass
class Timed:
    """Seconds of an engine's steps, and how many there were."""

    seconds: float = 0.0
    steps: int = 0
    journal: list[tuple[list[int], int | None]] = field(default_factory=list)
    """Prompts in the order in which they were submitted, and the handle of what each continues."""


def timed(engine: Any) -> Timed:
    """Time the steps of an engine from now on."""
    times = Timed()
    step = engine.step
    submit = engine.submit

    def timed_step() -> None:
        began = time.perf_counter()
        step()
        times.seconds += time.perf_counter() - began
        times.steps += 1

    def recorded(prompt: Tokens, *arguments: Any, continue_from: int | None, **options: Any) -> int:
        times.journal.append((list(prompt.token_ids), continue_from))
        return submit(prompt, *arguments, continue_from=continue_from, **options)

    engine.step = timed_step
    engine.submit = recorded
    return times


def agent(turns: int, branches: bool = False) -> Callable[..., Any]:
    """An agent that asks so many times; its tools answer at once. It may try its last turn twice."""

    async def solve(task: Any, session: Any) -> float:
        messages = list(task.messages)
        for turn in range(turns):
            answer = await session.chat(messages)
            result = f"{task['number']:03d} {turn} " + "the tool says a lot " * SAID
            messages += [answer.message, {"role": "user", "content": result[:SAID]}]
        if branches:
            await session.chat([*messages[:-3], {"role": "user", "content": result[:SAID].upper()}])
        return 1.0

    return solve


def make_player(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, turns: int, branches: bool = False
) -> GroupPlayer:
    """A player of its own, with an engine that never meets EOS."""
    engine = HFEngine(model, [], tokenizer.pad_token_id, decode=decoder(tokenizer))
    source = AgentPlayer(agent(turns, branches), AgentConfig(check_rendering="off"))
    driver = EngineDriver(engine)
    parts = PlayerParts(driver, tokenizer, [tokenizer.eos_token_id], SingleProcess(), longest=4000)
    return GroupPlayer({"": source.make(parts)}, driver)


def played(player: GroupPlayer, prompts: Sequence[Prompt], n_samples: int) -> list[Sample]:
    """Play a group of samples for each prompt."""
    groups = [
        held_out_group(prompt, number, SamplingParams(SAMPLED), n_samples=n_samples, seed=1)
        for number, prompt in enumerate(prompts)
    ]
    played_groups = play_together(player, groups, SingleProcess(), metrics=Metrics())
    return [sample for group in played_groups for sample in group.samples]


def rollout(player: GroupPlayer, sessions: int) -> tuple[float, Timed, float]:
    """Play all sessions; seconds of the whole and of the engine's steps, and the share of prompt tokens reused."""
    engine: Any = player.driver.engine
    prompts = [
        Prompt((f"{i:03d} solve the task " * TASK)[:TASK], [5], row={"number": i})
        for i in range(sessions)
    ]
    steps, began = timed(engine), time.perf_counter()
    played(player, prompts, n_samples=1)
    return time.perf_counter() - began, steps, engine.reused_tokens / engine.read_tokens


def read(
    engine: HFEngine, prompts: Sequence[tuple[list[int], int | None]]
) -> tuple[float, list[Completion]]:
    """Seconds until the first token of each prompt is sampled."""
    one, began = SamplingParams(1), time.perf_counter()
    numbers = [
        engine.submit(TokenIds(ids), one, i, park=False, continue_from=handle)
        for i, (ids, handle) in enumerate(prompts)
    ]
    done: dict[int, Completion] = {}
    while engine.busy:
        engine.step()
        done |= engine.collect()
    return time.perf_counter() - began, [done[number] for number in numbers]


def train(model: LlamaForCausalLM, samples: Sequence[Sample], rounds: int) -> list[str]:
    """Rows of a table: passes over micro-batches of eight segments, in separate rows and with beginnings shared."""
    use_fast_attention(model)
    actor = Actor(model)
    seconds: list[tuple[float, int]] = []
    tokens: list[int] = []
    gradients: list[torch.Tensor] = []
    share_where_exact(actor, actor, torch.device("cpu"), "actor")
    assert actor.shares_prompts
    model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, __: tokens.append(inputs[0].numel())
    )
    n_segments = len(segments_of(samples))
    passes = []
    for shares in (False, True):
        buffer = ReplayBuffer(shares_prompts=shares)
        buffer.append(collate(samples, 0))
        [step] = buffer.mini_batches(n_segments, 8, epochs=1, seed=1)
        passes.append((shares, step.micro_batches))
    for _ in range(rounds + 1):
        for shares, micros in passes:
            actor.zero_grad()
            tokens.clear()
            actor.use_sharing(shares)
            began = time.perf_counter()
            for micro in micros:
                actor(micro.inputs, micro.action_mask).sum().backward()
            seconds.append((time.perf_counter() - began, sum(tokens)))
            gradients.append(
                torch.cat([p.grad.flatten() for p in actor.parameters() if p.grad is not None])
            )
    (apart, n_apart), (together, n_together) = (
        (statistics.median(took for took, _ in seconds[2 + i :: 2]), seconds[i][1]) for i in (0, 1)
    )
    gap = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    return [
        "| segments | separate rows: tokens | s | shared: tokens | s | times faster | gradients differ by |",
        "| --- " * 7 + "|",
        f"| {n_segments} | {n_apart} | {apart:.2f} | {n_together} | {together:.2f} | {apart / together:.1f} "
        f"| {gap:.0e} |",
    ]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="measured ones, after one to warm up")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **SIZES, **HEADS)).eval()
    shares, seconds, with_reuse, without = [], [], [], []
    for i in range(arguments.rounds + 1):
        player = make_player(model, tokenizer, arguments.turns)
        whole, steps, reuse = rollout(player, arguments.sessions)
        share, n_steps = 100 * steps.seconds / whole, steps.steps
        last = steps.journal[-arguments.sessions :]
        engine: Any = player.driver.engine
        took, sampled = read(engine, last)
        took_whole, expected = read(HFEngine(model, [], 0), [(ids, None) for ids, _ in last])
        assert [each.token_ids for each in sampled] == [each.token_ids for each in expected]
        player.close()
        if i > 0:
            shares.append(share)
            seconds.append(whole)
            with_reuse.append(took)
            without.append(took_whole)
    share, ratio = (
        statistics.median(shares),
        statistics.median(map(float.__truediv__, without, with_reuse)),
    )
    tokens = statistics.mean(len(ids) for ids, _ in last)
    verdicts = [
        "yes" if value >= limit else "no"
        for value, limit in zip((share, ratio), LIMITS, strict=True)
    ]
    print(
        f"{arguments.sessions} sessions of {arguments.turns} turns, medians of {arguments.rounds} rounds\n\n"
        "| rollout, s | engine steps | engine busy, % | prompt tokens reused, % | at least 90 % busy |\n"
        "| --- | --- | --- | --- | --- |\n"
        f"| {statistics.median(seconds):.2f} | {n_steps} | {share:.1f} | {100 * reuse:.1f} | {verdicts[0]} |\n\n"
        f"Prompts of turn {arguments.turns}, of {tokens:.0f} tokens:\n\n"
        "| read whole, s | resumed, s | times cheaper | at least 3 times |\n"
        "| --- | --- | --- | --- |\n"
        f"| {statistics.median(without):.3f} | {statistics.median(with_reuse):.3f} | {ratio:.1f} | {verdicts[1]} |"
    )
    branching = make_player(model, tokenizer, arguments.turns, branches=True)
    prompts = [
        Prompt((f"{i:03d} solve the task " * TASK)[:TASK], [5], row={"number": i}) for i in range(8)
    ]
    samples = played(branching, prompts, n_samples=4)
    branching.close()
    print("\nTraining on 8 groups of 4 sessions, of which each tries its last turn twice:\n")
    print("\n".join(train(model.train(), samples, arguments.rounds)))


if __name__ == "__main__":
    main()
