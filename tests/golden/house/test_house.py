"""The house does what it did: tiny runs against what was recorded; and the comparer sees what changes."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import Launcher
from tests.golden.house import __main__ as command
from tests.golden.house import references
from tests.golden.house.cases import BY_NAME, CASES, IN_CI
from tests.golden.house.compare import Recording, differences, unused
from tests.golden.house.dumps import TEXTS, WHOLE, read_rollouts
from tests.golden.house.files import RECORDED, load_all, save
from tests.golden.house.leaves import CLOSE, EXACT, FREE, classify, flatten, prefixes
from tests.golden.house.log_words import log_words
from tests.golden.house.record import Recorder
from tests.golden.house.references import NoStart, Starts
from tests.golden.house.renames import RENAMES, Rename

MIB = 2**20


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("house"), launcher)


@pytest.fixture(scope="module")
def starts() -> Iterator[Starts]:
    with Starts() as starts:
        yield starts


def marked(name: str) -> Any:
    return name if name in IN_CI else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [marked(case.name) for case in CASES])
def test_a_run_leaves_what_was_recorded(name: str, recorder: Recorder, starts: Starts) -> None:
    try:
        recorded = starts.reference(BY_NAME[name])
    except NoStart as reason:
        pytest.skip(str(reason))
    assert recorder.checksum == recorded.inputs, (
        "inputs.py makes other inputs: record all cases anew"
    )
    unlike = differences(recorded, recorder.play_as(recorded, RENAMES), RENAMES)
    assert not unlike, "\n".join(map(str, unlike[:30]))


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    return load_all(RECORDED)


def test_each_case_is_recorded_at_a_commit(recordings: dict[str, Recording]) -> None:
    assert {*recordings} == {*BY_NAME}
    assert [
        name for name, each in recordings.items() if not re.fullmatch("[0-9a-f]{40}", each.commit)
    ] == []
    assert len({each.inputs for each in recordings.values()}) == 1
    assert sum(file.stat().st_size for file in RECORDED.iterdir()) < 1.5 * MIB


def test_each_rename_is_needed(recordings: dict[str, Recording]) -> None:
    assert unused(RENAMES, list(recordings.values())) == []


@pytest.fixture
def recording(recordings: dict[str, Recording]) -> Recording:
    return copy.deepcopy(recordings["group_norm"])


GROUP = "step 1 train group 0 sample 0"
LINE = "[openppo] loading --pretrain ../inputs/actor for the reference"


def change_a_metric(now: dict[str, Any]) -> None:
    now["metrics"]["step 2"]["reward"] += 1e-12


def lose_a_metric(now: dict[str, Any]) -> None:
    del now["metrics"]["step 2"]["kl"]


def add_a_metric(now: dict[str, Any]) -> None:
    now["metrics"]["step 2"]["kl_2"] = 0.5


def change_weights(now: dict[str, Any]) -> None:
    now["weights"]["model/model.safetensors"]["checksum"] = "0"


def change_a_token(now: dict[str, Any]) -> None:
    now["samples"][GROUP]["segments"][0]["ids"][-1] += 1


def change_a_mask(now: dict[str, Any]) -> None:
    segment = now["samples"][GROUP]["segments"][0]
    segment["mask"] = segment["mask"][::-1]


def lose_a_group(now: dict[str, Any]) -> None:
    now["samples"] = {
        name: each for name, each in now["samples"].items() if "step 3 train group 8 " not in name
    }


def add_a_line(now: dict[str, Any]) -> None:
    now["log"]["command 0"]["words"].insert(3, "[openppo] a new line")


def lose_a_line(now: dict[str, Any]) -> None:
    now["log"]["command 0"]["words"].remove(LINE)


def move_a_line(now: dict[str, Any]) -> None:
    words = now["log"]["command 0"]["words"]
    words.remove(LINE)
    words.append(LINE)


def lose_a_file(now: dict[str, Any]) -> None:
    now["files"].remove("model/config.json")


CHANGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (change_a_metric, r"metrics > step 2 > reward: recorded (0\.\d+), now (?!\1)0\.\d+"),
    (lose_a_metric, r"metrics > step 2 > kl: recorded -?\d\.\d+(e-\d+)?, now nothing"),
    (add_a_metric, r"metrics > step 2 > kl_2: recorded nothing, now 0\.5"),
    (
        change_weights,
        r"weights > model/model\.safetensors > checksum: recorded '[0-9a-f]{16}', now '0'",
    ),
    (change_a_token, rf"samples > {GROUP} > segments > 0 > ids: recorded \[.*\], now \[.*\]"),
    (change_a_mask, rf"samples > {GROUP} > segments > 0 > mask: recorded '0+1+', now '1+0+'"),
    (lose_a_group, r"samples > step 3 train group 8 sample 0 > row: recorded \d+, now nothing"),
    (add_a_line, r"log > command 0 > words > \[openppo\] a new line: recorded nothing, now 1"),
    (lose_a_line, rf"log > command 0 > words > {re.escape(LINE)}: recorded 1, now nothing"),
    (move_a_line, rf"log > command 0 > words > order: recorded {re.escape(repr(LINE))}, now '.*'"),
    (lose_a_file, r"files > model/config.json: recorded 1, now nothing"),
]


@pytest.mark.parametrize(
    ("change", "report"), CHANGES, ids=[change.__name__ for change, _ in CHANGES]
)
def test_a_change_is_reported_with_case_and_place(
    change: Callable[[dict[str, Any]], None], report: str, recording: Recording
) -> None:
    now = copy.deepcopy(recording.observation)
    assert differences(recording, now) == []
    change(now)
    printed = [str(each) for each in differences(recording, now)]
    assert any(re.fullmatch(f"group_norm: {report}", line) for line in printed), printed


def renamed_metric(now: dict[str, Any]) -> None:
    for row in now["metrics"].values():
        row["mean_reward"] = row.pop("reward")
    names = now["invariants"]["metric names"]
    names[names.index("reward")] = "mean_reward"


def renamed_field(now: dict[str, Any]) -> None:
    for sample in now["samples"].values():
        sample["n_turns"] = sample.pop("turns")


def renamed_line(now: dict[str, Any]) -> None:
    words = now["log"]["command 0"]["words"]
    words[words.index(LINE)] = LINE.replace("for the reference", "as reference")


RENAMED = [
    (renamed_metric, Rename("metric", "reward", "mean_reward", reason="why")),
    (renamed_field, Rename("field", "turns", "n_turns", reason="why")),
    (renamed_line, Rename("log", "for the reference", "as reference", reason="why")),
    (lose_a_line, Rename("log", LINE, reason="why")),
    (add_a_line, Rename("log", None, "[openppo] a new line", reason="why")),
    (lose_a_file, Rename("file", "model/config.json", reason="why")),
]


@pytest.mark.parametrize(
    ("change", "rename"), RENAMED, ids=[change.__name__ for change, _ in RENAMED]
)
def test_a_rename_with_a_reason_lets_it_through(
    change: Callable[[dict[str, Any]], None], rename: Rename, recording: Recording
) -> None:
    now = copy.deepcopy(recording.observation)
    change(now)
    assert differences(recording, now) != []
    assert differences(recording, now, [rename]) == []
    assert unused([rename], [recording], [now]) == []
    elsewhere = replace(rename, cases=("ppo",))
    assert differences(recording, now, [elsewhere]) != []
    assert unused([elsewhere], [recording], [now]) == [elsewhere]


def test_a_rename_that_nothing_needs_is_an_error(
    recording: Recording,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(recording, tmp_path)
    words = ["house", "compare", str(tmp_path), str(tmp_path)]
    monkeypatch.setattr(command, "RENAMES", ())
    assert (run_command(words, monkeypatch), capsys.readouterr().out) == (
        0,
        "1 cases are as they were recorded\n",
    )
    monkeypatch.setattr(
        command, "RENAMES", (Rename("metric", "no_metric", "another", reason="why"),)
    )
    assert run_command(words, monkeypatch) == 1
    assert re.fullmatch(
        r"renames.py: nothing needs Rename\(.*no_metric.*\): remove it\n", capsys.readouterr().out
    )


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        command.main()
    return int(ended.value.code or 0)


def test_a_rename_without_a_reason_is_refused() -> None:
    with pytest.raises(AssertionError, match="say why in reason"):
        Rename("metric", "one", "other")


def observation(reward: float, log_prob: float, ids: tuple[int, ...] = (1, 2)) -> dict[str, Any]:
    segment = {"ids": list(ids), "log_probs": [0.0, log_prob]}
    metrics = {"step 1": {"reward": reward, "steps": 1.0}, "step 2": {"reward": 0.5, "steps": 2.0}}
    return {
        "metrics": metrics,
        "samples": {"a": {"segments": [segment], "turns": 1}},
        "invariants": {"tokens": 2},
    }


def levels_of(*observations: dict[str, Any]) -> dict[str, int]:
    return {
        " > ".join(path): level
        for path, level in classify([flatten(each) for each in observations]).items()
    }


def test_recordings_that_agree_are_compared_exactly() -> None:
    levels = levels_of(*[observation(0.25, -1.5)] * 3)
    assert {*levels.values()} == {EXACT}


def test_last_bits_of_one_sample_loosen_all_floats() -> None:
    levels = levels_of(
        observation(0.25, -1.5), observation(0.25, -1.5), observation(0.25, -1.5000001)
    )
    assert (
        levels["samples > a > segments > 0 > log_probs"]
        == levels["metrics > step 2 > reward"]
        == CLOSE
    )
    assert levels["invariants > tokens"] == EXACT


def test_a_metric_that_differs_alone_is_free_in_all_steps() -> None:
    levels = levels_of(observation(0.25, -1.5), observation(0.75, -1.5))
    assert levels["metrics > step 1 > reward"] == levels["metrics > step 2 > reward"] == FREE
    assert levels["metrics > step 1 > steps"] == levels["samples > a > segments > 0 > ids"] == EXACT


def test_other_tokens_free_what_follows_but_no_invariant() -> None:
    levels = classify([flatten(observation(0.25, -1.5, ids)) for ids in ((1, 2), (1, 3))])
    assert prefixes(levels, FREE) == ["metrics", "samples"]
    assert levels[("invariants", "tokens")] == EXACT


def test_close_leaves_may_differ_in_last_bits_only(recording: Recording) -> None:
    loose = replace(recording, close=["metrics"])
    now = copy.deepcopy(recording.observation)
    now["metrics"]["step 1"]["entropy"] *= 1 + 5e-5
    assert differences(loose, now) == []
    now["metrics"]["step 1"]["entropy"] *= 1 + 2e-4
    (unlike,) = differences(loose, now)
    assert unlike.place == "metrics > step 1 > entropy"


def test_a_dumped_sample_has_its_segments_in_normal_form(tmp_path: Path) -> None:
    segments = []
    for ids, mask in (([1, 2, 3, 4], [False, True, False, True]), ([5, 6], [False, True])):
        tokens = {"token_ids": ids, "action_mask": mask, "log_probs": [0.0] * len(ids)}
        numbers = {"versions": [3] * len(ids), "token_rewards": [0.5] * len(ids)}
        segments.append(tokens | numbers | {"finish_reason": "stop"})
    row = dict.fromkeys(WHOLE, "") | dict.fromkeys(TEXTS, "{}") | {"segments": segments}
    (tmp_path / "train-rank00000-00000.jsonl").write_text(json.dumps(row) + "\n")

    (sample,) = read_rollouts(tmp_path)
    assert [segment["ids"] for segment in sample["segments"]] == [[1, 2, 3, 4], [5, 6]]
    assert [segment["mask"] for segment in sample["segments"]] == ["0101", "01"]
    assert [segment["versions"] for segment in sample["segments"]] == [[3] * 4, [3] * 2]
    assert [segment["rewards"] for segment in sample["segments"]] == [[0.5, 0.5], [0.5]]


OUTPUT = """\
[2026-11-28 09:22:09,694] [WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU
Loading:  50%|#####     | 1/2 [00:00<00:00, 12.0it/s]\rLoading: 100%|##########| 2/2 [00:00<00:00, 24.0it/s]
[openppo] actor      /home/me/run/actor
[openppo]            19,296 trained, fp32, 2 x cpu
[openppo] self-check of step 1: samples as trained on
[openppo] response  abc
[openppo]           def
[openppo]  3  'g'       9       0
[openppo] self-check: masks, EOS, score and padding lie where they should
step 1/3 | reward -0.498 | kl 1.99e-08
         | entropy 1.89 | 1 min 3 s
[openppo] saved to /home/me/run/model/step_00000003
"""


def test_words_of_a_log_have_no_numbers_times_paths_or_bars() -> None:
    assert log_words(OUTPUT, Path("/home/me/run"), Path("/home/me/package")) == {
        "words": [
            "[openppo] actor <folder>/actor",
            "[openppo] N trained, fp32, N x cpu",
            "[openppo] self-check: masks, EOS, score and padding lie where they should",
            "step N/N | reward N | kl N | entropy N | N s",
            "[openppo] saved to <folder>/model/step_N",
        ],
        "self-check": [
            "[openppo] self-check of step N: samples as trained on",
            "[openppo] response",
            "[openppo] N token",
        ],
    }


def test_another_processor_needs_the_commit_in_the_history(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "kind", lambda: "another")
    save(replace(recording, commit="0" * 40), tmp_path)
    with (
        Starts(tmp_path) as starts,
        pytest.raises(NoStart, match="is not in the history of this clone. Fetch it"),
    ):
        starts.reference(BY_NAME["group_norm"])


@pytest.mark.slow
def test_on_another_processor_the_old_commit_is_recorded_first(
    recorder: Recorder, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor is the same in truth, so that the commit leaves here what it left there."""
    monkeypatch.setattr(references, "kind", lambda: "another")
    with Starts() as starts:
        made = starts.reference(BY_NAME["group_norm"])
    assert made.kind == "another" and made.inputs == recorder.checksum
    assert differences(recording, made.observation) == []
