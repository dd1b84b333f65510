"""Record cases of this checkout or another one, compare recordings, or this checkout with what is committed.

python -m tests.golden.house record FOLDER [--package CHECKOUT] [--times N] [CASE ...]
python -m tests.golden.house compare RECORDED NOW
python -m tests.golden.house check [CASE ...]
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.golden.house.cases import BY_NAME, Case
from tests.golden.house.compare import Recording, differences, unused
from tests.golden.house.files import load, load_all, save
from tests.golden.house.record import TIMES, recorder
from tests.golden.house.references import NoStart, Starts
from tests.golden.house.renames import RENAMES

SHOWN = 15
"""Differences of one case."""


def main() -> None:
    """Run the command that the first word names."""
    commands = {"record": record, "compare": compare, "check": check}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=commands, help="what to do")
    sys.exit(commands[parser.parse_args(sys.argv[1:2]).command](sys.argv[2:]))


def record(words: list[str]) -> int:
    """Play cases several times and write what they leave."""
    parser = argparse.ArgumentParser(prog="record", description=record.__doc__)
    parser.add_argument(
        "folder", type=Path, help="where CASE.json is written, such as tests/golden/house/recorded"
    )
    parser.add_argument(
        "--package", type=Path, help="a checkout of another commit, whose openppo is run"
    )
    parser.add_argument(
        "--times", type=int, default=TIMES, help="how often each case is played at least"
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all without one")
    args = parser.parse_intermixed_args(words)
    cases = chosen(args.cases)
    with recorder(args.package and args.package.resolve()) as played:
        for case in cases:
            start, file = time.monotonic(), args.folder / f"{case.name}.json"
            recording = played.record(case, args.times, load(file) if file.exists() else None)
            save(recording, args.folder)
            unsteady = f"close: {len(recording.close)}, free: {len(recording.free)}"
            print(f"{case.name}: {time.monotonic() - start:.1f} s; {unsteady}", flush=True)
    return 0


def compare(words: list[str]) -> int:
    """Compare two folders of recordings."""
    parser = argparse.ArgumentParser(prog="compare", description=compare.__doc__)
    parser.add_argument("recorded", type=Path, help="what should be")
    parser.add_argument("now", type=Path, help="what is")
    args = parser.parse_args(words)
    return report(load_all(args.recorded), load_all(args.now), is_whole=True)


def check(words: list[str]) -> int:
    """Play cases and compare them with the committed recordings."""
    parser = argparse.ArgumentParser(prog="check", description=check.__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="all without one")
    args = parser.parse_args(words)
    recorded, now = {}, {}
    with recorder() as played, Starts() as starts:
        for case in chosen(args.cases):
            try:
                recorded[case.name] = starts.reference(case)
            except NoStart as reason:
                sys.exit(f"{case.name}: {reason}")
            observation = played.play_as(recorded[case.name], RENAMES)
            now[case.name] = replace(
                recorded[case.name], observation=observation, inputs=played.checksum
            )
    return report(recorded, now, is_whole=not args.cases)


def chosen(names: Sequence[str]) -> list[Case]:
    """Cases of these names; all without one."""
    if unknown := [name for name in names if name not in BY_NAME]:
        sys.exit(f"no case is called {', '.join(unknown)}. The cases are {', '.join(BY_NAME)}.")
    return [BY_NAME[name] for name in names or BY_NAME]


def report(recorded: Mapping[str, Recording], now: Mapping[str, Recording], is_whole: bool) -> int:
    """Print what differs, and renames that nothing needs; the exit status."""
    both = [name for name in recorded if name in now]
    faults = [f"{name}: recorded on one side only" for name in {*recorded} ^ {*now}]
    for name in both:
        if recorded[name].kind != now[name].kind:
            faults.append(
                f"{name}: recorded on two kinds of processor or library. Record both on one."
            )
        if recorded[name].inputs != now[name].inputs:
            faults.append(
                f"{name}: the inputs differ: inputs.py was changed. Record all cases anew."
            )
        unlike = [str(each) for each in differences(recorded[name], now[name].observation, RENAMES)]
        faults += unlike[:SHOWN]
        if len(unlike) > SHOWN:
            faults.append(f"{name}: and {len(unlike) - SHOWN} more")
    if is_whole:
        of_both = [recorded[name] for name in both], [now[name].observation for name in both]
        faults += [
            f"renames.py: nothing needs {rename}: remove it" for rename in unused(RENAMES, *of_both)
        ]
    print("\n".join(faults) or f"{len(both)} cases are as they were recorded")
    return int(bool(faults))


if __name__ == "__main__":
    main()
