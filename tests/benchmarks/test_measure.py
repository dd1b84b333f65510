"""Which iterations of a benchmark count, and what its tables say of them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

MEASURE = Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "measure.py"


def load() -> ModuleType:
    """The module of a script's folder, which is no package."""
    spec = importlib.util.spec_from_file_location("benchmarks_measure", MEASURE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


measure = load()


def iteration(total: float, stall: float = 0.0, share: float = 0.5, others: float = 0.9) -> dict[str, float]:
    """One whose generation takes ``share``, experience nothing to speak of, and training the rest."""
    times = {"generation": share * total, "experience": 0.001, "training": (1 - share) * total}
    return {"total": total, "stall": stall, "others": others, "tokens": 1000.0, **times}


def summary(name: str, total: float, stall: float = 0.0, peak_mb: float = 1000.0, share: float = 0.5):
    """Of a single iteration."""
    return measure.summarize(name, [iteration(total, stall, share)], peak_mb)


def rows(lines: list[str]) -> dict[str, list[str]]:
    """The cells of a markdown table by the first one."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line]
    return {row[0]: row[1:] for row in cells}


def test_disturbed_iterations_do_not_count() -> None:
    iterations = [
        iteration(10.0),
        iteration(90.0, stall=0.8),
        iteration(12.0),
        iteration(11.0),
        iteration(80.0, stall=0.5),
    ]
    found = measure.summarize("OpenPPO", iterations, 1.0)
    assert (found.medians["total"], found.n_kept, found.n_discarded) == (11.0, 3, 2)
    assert not found.disturbed


def test_an_iteration_at_the_bound_counts() -> None:
    at, above = iteration(1.0, measure.STALL_BOUND), iteration(1.0, measure.STALL_BOUND + 1e-6)
    assert measure.undisturbed([at, above]) == [at]


def test_threads_that_wait_for_their_own_process_do_not_disturb() -> None:
    own, foreign = iteration(1.0, stall=0.5, others=0.01), iteration(1.0, stall=0.5, others=0.5)
    assert measure.undisturbed([own, foreign]) == [own]


def test_numbers_of_a_run_without_a_quiet_iteration_are_marked_and_reach_no_target() -> None:
    noisy, quiet = summary("OpenPPO", 10.0, stall=0.9), summary("TRL 1.12.0", 100.0)
    assert noisy.disturbed
    table = rows(measure.speed_table([noisy, quiet]))
    assert table["OpenPPO"][0] == "(10.00)"
    assert table["TRL 1.12.0"][0] == "100.00"
    assert rows(measure.ratio_table("W1 float32", [noisy, quiet]))["TRL 1.12.0 / OpenPPO"][-1] == "disturbed"


def test_no_iteration_is_an_error() -> None:
    with pytest.raises(ValueError, match="OpenPPO has no iteration"):
        measure.summarize("OpenPPO", [], 1.0)


def test_ratios_are_the_peers_time_over_ours() -> None:
    ours, theirs = summary("OpenPPO", 10.0, share=0.2), summary("TRL 1.12.0", 13.0, share=0.6)
    cells = rows(measure.ratio_table("W1 float32", [ours, theirs]))["TRL 1.12.0 / OpenPPO"]
    # 13 / 10; generation 7.8 / 2; experience 0.001 / 0.001; training 5.2 / 8
    assert cells == ["1.30", "3.90", "1.00", "0.65", ">= 1.3", "yes"]


@pytest.mark.parametrize(("name", "said"), [("OpenPPO", "yes"), ("OpenPPO --compile", "no")])
def test_compiled_training_has_a_target_of_its_own(name: str, said: str) -> None:
    table = rows(measure.ratio_table("W1 float32", [summary(name, 10.0), summary("TRL 1.12.0", 13.5)]))
    assert table[f"TRL 1.12.0 / {name}"][-1] == said  # 1.3 eager, 1.4 compiled


def test_the_faster_of_a_peers_settings_counts_unless_it_was_disturbed() -> None:
    by_eight, whole = summary("TRL 1.12.0 (rollout 8)", 14.0), summary("TRL 1.12.0", 16.0)
    assert measure.best([whole, by_eight], "TRL") is by_eight
    noisy = summary("TRL 1.12.0 (rollout 8)", 14.0, stall=0.9)
    assert measure.best([whole, noisy], "TRL") is whole
    assert measure.best([whole], "OpenRLHF") is None


@pytest.mark.parametrize(("peak_mb", "said"), [(749.0, "yes"), (751.0, "no")])
def test_memory_is_our_peak_over_the_peers(peak_mb: float, said: str) -> None:
    table = measure.ratio_table("W2 float32", [summary("OpenPPO", 1.0, peak_mb=peak_mb), summary("TRL 1.12.0", 9.0)])
    assert rows(table)["OpenPPO / TRL 1.12.0"] == ["0.75", "<= 0.75", said]


def test_every_cell_has_targets_for_both_peers() -> None:
    cells = {cell for cell, _ in measure.TARGETS}
    assert {(cell, peer) for cell in cells for peer in measure.MEMORY_TARGETS} == measure.TARGETS.keys()


def test_decoding_is_compared_in_tokens_per_second() -> None:
    cells = {
        "W1 float32": [summary("OpenPPO", 2.0), summary("vLLM 0.32.0", 1.0)],  # 500 and 1000 tokens/s
        "W1 bf16": [summary("OpenPPO", 1.0)],
    }
    table = rows(measure.decode_table(cells))
    assert table["W1 float32"] == ["500", "1000", "0.50", ">= 1", "no"]
    assert table["W1 bf16"] == ["1000", "-", "-", "-", "-"]
