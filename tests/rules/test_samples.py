"""A sample holds its segments: who plays it, restores it or copies it makes it, and nobody joins it again."""

import ast

from tests.rules.test_staircase import TREES

MAKERS = {
    "sample.py",  # a single response
    "agents/episodes.py",  # the player of episodes
    "agents/compat.py",  # verl's interface, in which turns come one by one
    "rollout/kept.py",  # from a checkpoint
}
SAMPLE_NOUNS = {"sample", "samples", "segment", "segments", "episode", "greedy"}


def makes_a_sample(node: ast.AST) -> bool:
    """True for a call of ``Sample``."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("Sample", "types.Sample")


def sorts_segments(node: ast.AST) -> bool:
    """True for an annotation of segments by a number or in lists of lists, which somebody would have to join."""
    if not isinstance(node, ast.Subscript):
        return False
    text = ast.unparse(node)
    is_nested = text.startswith(("dict[", "defaultdict[", "list[list[", "list[tuple["))
    return is_nested and "[Segment]" in text


def tells_by_identity(node: ast.AST) -> bool:
    """True for ``id(...)`` of a sample, a segment or a part of one."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "id"):
        return False
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    names |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return bool(names & SAMPLE_NOUNS)


def test_samples_are_made_where_they_are_played_or_restored() -> None:
    makers = {
        str(path) for path, tree in TREES.items() for node in ast.walk(tree) if makes_a_sample(node)
    }
    assert makers <= MAKERS


def test_no_function_joins_segments_by_a_number() -> None:
    joins = [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if sorts_segments(node) or tells_by_identity(node)
    ]
    assert joins == [], "Sample.segments holds them"


def test_the_rule_finds_what_it_forbids() -> None:
    statements = ast.parse("parts: dict[int, list[Segment]] = {}; key = id(segment.episode)")
    hits = [sorts_segments(node) or tells_by_identity(node) for node in ast.walk(statements)]
    assert sum(hits) == 2
