"""Groups are played in one place: players and sessions request completions, and nothing else does."""

import ast

from tests.rules.test_staircase import TREES

REQUESTERS = {
    "rollout/players.py",  # a single response
    "agents/session.py",  # a turn of an episode
}
CORRIDOR = {"sources/groups.py"}


def requests_completions(node: ast.AST) -> bool:
    """True for a call of an engine's or a driver's ``generate``."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "generate"
    )


def tries_again(node: ast.AST) -> bool:
    """True for a loop over the attempts at a sample."""
    return isinstance(node, ast.For) and "attempts" in ast.unparse(node.iter)


def test_completions_are_requested_by_players_and_sessions() -> None:
    files = {
        str(path)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if requests_completions(node)
    }
    assert files == REQUESTERS


def test_attempts_at_a_sample_are_made_in_the_corridor() -> None:
    files = {
        str(path) for path, tree in TREES.items() for node in ast.walk(tree) if tries_again(node)
    }
    assert files == CORRIDOR


def test_the_rule_finds_what_it_forbids() -> None:
    tree = ast.parse("for attempt in range(task.attempts): engine.generate(prompts, params, seeds)")
    nodes = list(ast.walk(tree))
    assert any(map(requests_completions, nodes)) and any(map(tries_again, nodes))
