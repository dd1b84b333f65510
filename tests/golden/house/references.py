"""The recording that a case is compared with: the committed one, or one of the same commit made on this machine."""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.fork_server import Launcher
from tests.golden.house.cases import Case
from tests.golden.house.compare import Recording
from tests.golden.house.files import RECORDED, load
from tests.golden.house.record import Recorder
from tests.golden.house.start import checkout, in_history, kind


class NoStart(Exception):  # noqa: N818 (a test skips)
    """This clone lacks the commit that must be recorded on this kind of processor first."""


class Starts:
    """Makes recordings of the commits that the committed ones are of, where these are of another kind of processor."""

    def __init__(self, recorded: Path = RECORDED) -> None:
        self.recorded = recorded
        self._recorders: dict[str, Recorder] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Starts":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def reference(self, case: Case) -> Recording:
        """What a case is compared with here; the classes of leaves are the committed ones."""
        committed = load(self.recorded / f"{case.name}.json")
        if committed.kind == kind():
            return committed
        if not in_history(committed.commit):
            raise NoStart(
                f"recorded on another kind of processor, and commit {committed.commit}, which would be recorded here "
                "first, is not in the history of this clone. Fetch it (git fetch --unshallow)."
            )
        played = self._recorder(committed.commit)
        return replace(
            committed, kind=kind(), inputs=played.checksum, observation=played.play(case)
        )

    def _recorder(self, commit: str) -> Recorder:
        """The recorder of one commit's package."""
        if commit not in self._recorders:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="start")))
            (folder / "cases").mkdir()
            launcher = Launcher()
            self._stack.callback(launcher.close)
            self._recorders[commit] = Recorder(
                folder / "cases", launcher, checkout(commit, folder / "package")
            )
        return self._recorders[commit]
