"""Plays cases and records what they leave."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.fork_server import REPO, Launcher
from tests.golden.house.cases import BY_NAME, Case
from tests.golden.house.compare import Recording, differences, split
from tests.golden.house.inputs import checksum, write_inputs
from tests.golden.house.leaves import CLOSE, FREE, classify, flatten, is_under, prefixes
from tests.golden.house.leaves import Path as Place
from tests.golden.house.observe import Observation, observe, written
from tests.golden.house.renames import Rename
from tests.golden.house.start import commit_of, kind

TIMES = 3
TIMES_IF_UNLIKE = 12
"""Where the first disagree, to see all that may."""
PLAYS_TO_AGREE = 4
"""Of a case in which the machine's load decides, such as which sample becomes stale; a change of code shows in each."""
SECONDS = 600


class Recorder:
    """Plays cases with the package of this checkout, forked, or of the checkout ``package``, in real processes."""

    def __init__(self, folder: Path, launcher: Launcher, package: Path | None = None) -> None:
        self.folder, self.launcher, self.package = folder, launcher, package
        write_inputs(folder / "inputs")
        self.checksum = checksum(folder / "inputs")
        self._n_played = 0

    def play(self, case: Case) -> Observation:
        """Run the commands of a case in a folder beside the inputs, and observe what they left."""
        self._n_played += 1
        folder = self.folder / f"{case.name}-{self._n_played}"
        folder.mkdir()
        outputs = [self._run(case, words, folder) for words in case.words]
        return written(observe(folder, outputs, self.package or REPO))

    def play_as(self, recorded: Recording, renames: Sequence[Rename]) -> Observation:
        """Play a case, and where it was not the same each time again, until it is as recorded; the last observation."""
        n_plays = PLAYS_TO_AGREE if recorded.close or recorded.free else 1
        for _ in range(n_plays):
            observation = self.play(BY_NAME[recorded.case])
            if not differences(recorded, observation, renames):
                break
        return observation

    def record(self, case: Case, times: int = TIMES, earlier: Recording | None = None) -> Recording:
        """Play a case several times, and keep the first one with what they agree on.

        What an ``earlier`` recording was unsteady in stays so: a few that agree are no proof.
        """
        leaves = [flatten(observation := self.play(case))]
        leaves += [flatten(self.play(case)) for _ in range(times - 1)]
        if any(each != leaves[0] for each in leaves) and times < TIMES_IF_UNLIKE:
            leaves += [flatten(self.play(case)) for _ in range(TIMES_IF_UNLIKE - times)]
        levels = classify(leaves)
        if earlier is not None:
            levels = loosened(levels, earlier)
        return Recording(
            case=case.name,
            commit=commit_of(self.package or REPO),
            kind=kind(),
            inputs=self.checksum,
            observation=observation,
            close=prefixes(levels, CLOSE),
            free=prefixes(levels, FREE),
        )

    def _run(self, case: Case, words: Sequence[str], folder: Path) -> str:
        """The output of one command, which must succeed."""
        is_real = self.package is not None
        if words[0].endswith(".py"):
            words = [str((self.package or REPO) / words[0]), *words[1:]]
        variables = {"PYTHONPATH": str(self.package)} if is_real else {}
        ended = self.launcher.run(
            words, case.ranks, folder, real=is_real, timeout=SECONDS, **variables
        )
        if ended.returncode:
            raise RuntimeError(
                f"{case.name}: {' '.join(words)} ended with status {ended.returncode}:\n{ended.stdout}"
            )
        return ended.stdout


def loosened(levels: dict[Place, int], earlier: Recording) -> dict[Place, int]:
    """Levels at least as loose as those of an earlier recording."""
    free, rounded = [[split(text) for text in texts] for texts in (earlier.free, earlier.close)]
    for path, level in levels.items():
        if is_under(path, free):
            levels[path] = FREE
        elif is_under(path, rounded):
            levels[path] = max(level, CLOSE)
    return levels


@contextmanager
def recorder(package: Path | None = None) -> Iterator[Recorder]:
    """A recorder in a folder that goes away with it."""
    launcher = Launcher()
    with tempfile.TemporaryDirectory(prefix="house") as folder:
        try:
            yield Recorder(Path(folder), launcher, package)
        finally:
            launcher.close()
