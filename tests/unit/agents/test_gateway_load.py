"""A thousand programs at once: none of their turns is lost, doubled or mixed up, and nothing of them stays."""

import runpy
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "agents_gateway.py"


def test_1024_sessions_of_4_turns_are_the_engines_journal():
    measured = runpy.run_path(str(BENCHMARK))["measure"](
        n_sessions=1024, n_turns=4, step_seconds=0.0
    )
    assert (measured.client["turns"], measured.client["errors"]) == (4096, 0)
    turns = [turn for session in measured.sessions for turn in session.turns]
    assert sorted((turn.prompt_ids, turn.completion.token_ids) for turn in turns) == sorted(
        measured.journal
    )
    assert measured.client["tokens"] == sum(len(ids) for _, ids in measured.journal)
    assert {
        (len(session.turns), session.counts["bridged_turns"]) for session in measured.sessions
    } == {(4, 3)}
    left = [now - before for now, before in zip(measured.after, measured.before, strict=True)]
    assert max(left) <= 0, f"tasks and open files beyond those before: {left}"
