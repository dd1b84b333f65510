"""What iterations say: which of them count, medians, ratios, and whether the targets are reached. Pure functions."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

STALL_BOUND = 0.05
"""Share of an iteration in which threads waited for a CPU, or the host took one away, above which it is discarded. On a
quiet machine it is 0.01; another process that gave 0.07 made an iteration 12 % longer, and one that ran all the time
gave 0.5 to 0.8 and made it several times as long."""

OTHERS_BOUND = 0.05
"""CPU time of other processes as a share of an iteration, up to which a stall is a participant's own doing: vLLM's
processes wait for each other for half of the time."""

PHASES = ("generation", "experience", "training")

Iteration = Mapping[str, float]
"""``total``, the phases in seconds, ``tokens`` of the responses, and ``stall`` and ``others``, shares of the total."""


@dataclass(frozen=True)
class Target:
    """Bounds of the ratio of a peer's median iteration to OpenPPO's."""

    eager: float
    compiled: float


TARGETS: dict[tuple[str, str], Target] = {
    ("W1 float32", "TRL"): Target(1.3, 1.4),
    ("W1 float32", "OpenRLHF"): Target(1.8, 1.8),
    ("W1 bf16", "TRL"): Target(1.4, 1.5),
    ("W1 bf16", "OpenRLHF"): Target(2.3, 2.3),
    ("W2 float32", "TRL"): Target(3.0, 3.0),
    ("W2 float32", "OpenRLHF"): Target(2.1, 2.1),
    **{
        (f"W3 {kind}", "TRL"): Target(bound, bound)
        for kind, bound in (("float32", 2.6), ("bf16", 2.6), ("float32-kl", 2.6))
    },
    **{(f"W4 {kind}", "TRL"): Target(1.8, 1.8) for kind in ("float32", "bf16", "float32-kl")},
    ("W5 float32", "TRL"): Target(3.4, 3.4),
    ("W5 bf16", "TRL"): Target(3.5, 3.5),
}
MEMORY_TARGETS = {"TRL": 0.75, "OpenRLHF": 1.0}
"""Upper bounds of OpenPPO's peak over a peer's, in float32."""


@dataclass(frozen=True)
class Summary:
    """Medians of a participant. ``disturbed``: no iteration was quiet, so they are of the disturbed ones."""

    name: str
    medians: dict[str, float]
    n_kept: int
    n_discarded: int
    peak_mb: float
    first: Iteration = field(default_factory=dict)
    """Its first measured iteration, which is of the same samples for each that runs OpenPPO."""

    @property
    def disturbed(self) -> bool:
        """Whether these numbers mean nothing."""
        return self.n_kept == 0

    @property
    def tokens_per_s(self) -> float:
        """Response tokens of the median iteration per second of it."""
        return self.medians["tokens"] / self.medians["total"]


def undisturbed(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Those in which nothing had to wait for a CPU because of other processes."""
    return [i for i in iterations if i["stall"] <= STALL_BOUND or i["others"] <= OTHERS_BOUND]


def summarize(name: str, iterations: Sequence[Iteration], peak_mb: float) -> Summary:
    """Medians of the undisturbed iterations, or of all if there is none. ``ValueError`` without iterations."""
    if not iterations:
        raise ValueError(f"{name} has no iteration to summarize")
    kept = undisturbed(iterations)
    used = kept or iterations
    medians = {key: statistics.median(iteration[key] for iteration in used) for key in used[0]}
    return Summary(name, medians, len(kept), len(iterations) - len(kept), peak_mb, iterations[0])


def best(summaries: Sequence[Summary], peer: str) -> Summary | None:
    """The fastest of ``peer``'s settings; an undisturbed one goes before a disturbed one."""
    mine = [summary for summary in summaries if summary.name.split()[0] == peer]
    return min(
        mine, key=lambda summary: (summary.disturbed, summary.medians["total"]), default=None
    )


def speed_table(summaries: Sequence[Summary]) -> list[str]:
    """A row for each participant: medians in seconds; in brackets where every iteration was disturbed."""
    keys = [key for key in ("total", *PHASES, "tokens") if all(key in s.medians for s in summaries)]
    titles = ["iteration s" if key == "total" else key for key in keys]
    titles += ["tokens/s", "peak MB", "kept", "discarded"]
    lines = [f"| | {' | '.join(titles)} |", "| --- " * (len(titles) + 1) + "|"]
    for summary in summaries:
        cells = [f"{summary.medians[key]:.{0 if key == 'tokens' else 2}f}" for key in keys]
        cells.append(f"{summary.tokens_per_s:.0f}")
        if summary.disturbed:
            cells = [f"({cell})" for cell in cells]
        cells += [f"{summary.peak_mb:.0f}", str(summary.n_kept), str(summary.n_discarded)]
        lines.append(f"| {summary.name} | {' | '.join(cells)} |")
    return lines


def ratio_table(cell: str, summaries: Sequence[Summary]) -> list[str]:
    """Peer / OpenPPO of the median iteration and of each phase, beside the target; then the peaks of memory."""
    lines = [
        f"| peer / OpenPPO | iteration | {' | '.join(PHASES)} | target | reached |",
        "| --- " * 7 + "|",
    ]
    memory: list[str] = []
    for ours in (summary for summary in summaries if summary.name.split()[0] == "OpenPPO"):
        for peer in MEMORY_TARGETS:
            theirs = best(summaries, peer)
            if theirs is None:
                continue
            ratios = {key: theirs.medians[key] / ours.medians[key] for key in ("total", *PHASES)}
            target = TARGETS[cell, peer]
            bound = target.compiled if "compile" in ours.name else target.eager
            said = verdict(ratios["total"] >= bound, ours, theirs)
            cells = [f"{ratio:.2f}" for ratio in ratios.values()]
            lines.append(
                f"| {theirs.name} / {ours.name} | {' | '.join(cells)} | >= {bound} | {said} |"
            )
            if (
                "float32" in cell
                and ours.n_kept + ours.n_discarded
                and ours.peak_mb
                and theirs.peak_mb
            ):
                share, most = ours.peak_mb / theirs.peak_mb, MEMORY_TARGETS[peer]
                reached = "yes" if share <= most else "no"
                memory.append(
                    f"| {ours.name} / {theirs.name} | {share:.2f} | <= {most} | {reached} |"
                )
    if memory:
        lines += [
            "",
            "| peak memory | share | target | reached |",
            "| --- | --- | --- | --- |",
            *memory,
        ]
    return lines


def same_numbers(summaries: Sequence[Summary]) -> list[str]:
    """How far numbers named ``same_...`` of OpenPPO are from those of its other settings, where both are there."""
    first = {summary.name: summary.first for summary in summaries}
    ours = first.pop("OpenPPO", {})

    lines: list[str] = []
    for name, other in first.items():
        gaps = [
            f"{key.removeprefix('same_')} {abs(ours[key] - other[key]) / max(1.0, abs(other[key])):.1e}"
            for key in sorted(ours.keys() & other.keys())
            if key.startswith("same_")
        ]
        if gaps:
            lines += [
                f"OpenPPO and {name}, first step, differ by: {', '.join(gaps)} (relative above 1; updates of Adam).",
                "",
            ]
    return lines


def decode_table(decoded: Mapping[str, Sequence[Summary]]) -> list[str]:
    """Tokens per second by cell; OpenPPO over vLLM has the target 1 in float32."""
    names = list(
        dict.fromkeys(summary.name for summaries in decoded.values() for summary in summaries)
    )
    lines = [
        f"| tokens/s, 64 rows | {' | '.join(names)} | OpenPPO / vLLM | target | reached |",
        "| --- " * (len(names) + 4) + "|",
    ]
    for cell, summaries in decoded.items():
        by_name = {summary.name: summary for summary in summaries}
        rates = [_rate(by_name.get(name)) for name in names]
        ours, theirs = by_name.get("OpenPPO"), best(summaries, "vLLM")
        ratio = target = said = "-"
        if ours is not None and theirs is not None:
            share = ours.tokens_per_s / theirs.tokens_per_s
            ratio = f"{share:.2f}"
            if "float32" in cell:
                target, said = ">= 1", verdict(share >= 1, ours, theirs)
        lines.append(f"| {cell} | {' | '.join(rates)} | {ratio} | {target} | {said} |")
    return lines


def _rate(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    return f"({summary.tokens_per_s:.0f})" if summary.disturbed else f"{summary.tokens_per_s:.0f}"


def verdict(reached: bool, *measured: Summary) -> str:
    """Whether a target is reached, unless a side was never undisturbed."""
    if any(summary.disturbed for summary in measured):
        return "disturbed"
    return "yes" if reached else "no"


@dataclass(frozen=True)
class ModelSize:
    """What the work of a Llama-shaped model depends on."""

    layers: int
    hidden: int
    heads_width: int
    """Heads times their width."""
    kv_width: int
    """Key-value heads times their width."""
    intermediate: int
    vocabulary: int

    @property
    def body(self) -> int:
        """Entries of the layers' matrices."""
        attention = 2 * self.hidden * (self.heads_width + self.kv_width)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Entries of the output matrix."""
        return self.vocabulary * self.hidden


def training_flops(
    size: ModelSize, prompt: int, response: int, adapters: int = 0, has_head: bool = True
) -> float:
    """Floating-point operations of a forward and backward over one sequence, without any that are done twice.

    6 x entries of the layers' matrices x tokens, 6 x entries of the output matrix x response tokens (others need no
    logits), and 6 x layers x heads' width x tokens^2 for causal attention, of which half the pairs are not needed.
    With ``adapters`` (entries of LoRA's matrices) frozen matrices have no gradient: 4 instead of 6.
    """
    tokens, factor = prompt + response, 4 if adapters else 6
    matrices = (
        factor * (size.body * tokens + (size.head * response if has_head else 0))
        + 6 * adapters * tokens
    )
    return matrices + 6.0 * size.layers * size.heads_width * tokens**2


def decode_bytes(
    size: ModelSize, rows: int, prompt: int, response: int, adapters: int = 0
) -> float:
    """Bytes read by the decode steps after the prompts are read, in bf16: all matrices once in each step, and the keys
    and values of all tokens before."""
    steps = response - 1  # the first token comes from reading the prompt
    weights = 2.0 * (size.body + size.head + adapters)
    cached_tokens = rows * sum(prompt + t for t in range(1, response))
    return steps * weights + cached_tokens * 2 * 2.0 * size.layers * size.kv_width
