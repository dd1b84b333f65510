"""Programs that know nothing of openppo: what they are started with, what ends them, what rewards them."""

import asyncio
import json
import re
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from openppo.agents import Agent, AgentPlayer, agent_source
from openppo.agents.program import Command, ProgramAgent, printed_reward
from openppo.config.agents import AgentConfig
from openppo.process_groups import RELEASE
from openppo.tracking import Metrics
from openppo.types import Ending, EpisodeInput, Prompt, SamplingParams, SingleProcess, segments_of
from tests.fork_server import REPO

CLIENT = """
import json, os, sys, urllib.request

def post(path, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def ask(text):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", {"model": "any", "messages": messages})["choices"][0]["message"]["content"]

def reward(value):
    print(json.dumps({"reward": value}))

"""


@pytest.fixture
def play(make_sampler, tmp_path):
    """``play(lines)`` plays an episode of a program with these lines; returns its sample and metrics."""

    def run(
        lines: str, row: dict[str, Any] | None = None, command: str = "", **options: Any
    ) -> Any:
        (tmp_path / "agent.py").write_text(CLIENT + lines)
        agent = ProgramAgent(
            AgentConfig(agent_command=command or f"{sys.executable} {tmp_path}/agent.py", **options)
        )
        sampler = make_sampler(agent, lambda prompt: "yes", **options)
        prompt, metrics = Prompt("say yes", [5, 6], row=row or {}), Metrics()
        [sampled] = sampler.sample([prompt], SamplingParams(64), 1, 1, 0, metrics, evaluation=True)
        assert len(sampled.segments) == 1
        return sampled, metrics.reduced(SingleProcess())

    return run


def test_stdin_has_the_prompt_and_the_last_line_the_reward(play):
    sampled, metrics = play(
        "answer = ask(sys.stdin.read())\nprint('said', answer)\nreward({'a': 1, 'b': 0.5})\n"
    )
    assert sampled.episode.messages == [
        {"role": "user", "content": "say yes"},
        {"role": "assistant", "content": "yes"},
    ]
    assert sampled.scores == {"a": 1.0, "b": 0.5}
    assert metrics["agent/completed"] == 1
    assert len(sampled.last.spans) == 1


@pytest.mark.parametrize("more", ["", " | cat"])
def test_the_row_is_json_and_its_columns_are_single_arguments(play, tmp_path, more):
    row = {
        "question": 'it\'s "$(touch hacked)" `x` a & b\n',
        "n": 7,
        "deep": {"list": [1, None]},
        "empty": "",
    }
    lines = "json.dump([sys.argv[1:], json.loads(os.environ['OPENPPO_TASK'])], open(sys.argv[0] + '.seen', 'w'))\n"
    command = (
        f"{sys.executable} {tmp_path}/agent.py {{question}} -n={{n}} {{deep}} {{empty}} '1 2'{more}"
    )
    _, metrics = play(f"{lines}ask('x')\nreward(1)", row, command)
    expected = [row["question"], "-n=7", '{"list": [1, null]}', "", "1 2"]
    assert json.loads((tmp_path / "agent.py.seen").read_text()) == [expected, row]
    assert metrics["agent/completed"] == 1
    assert not Path("hacked").exists()


def test_the_environment_is_built_and_not_inherited(play, tmp_path, monkeypatch):
    ranks = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID GROUP_RANK OMP_NUM_THREADS"
    left_out = [*ranks.split(), "CUDA_VISIBLE_DEVICES", "HF_TOKEN", "WANDB_API_KEY", "SOME_SECRET"]
    kept = ["LC_TIME", "PYTHONPATH", "TMPDIR", "MINE"]
    for name in [*left_out, *kept]:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "example.com")
    play("json.dump(dict(os.environ), open(sys.argv[0] + '.seen', 'w'))", agent_env=("MINE",))
    seen = json.loads((tmp_path / "agent.py.seen").read_text())
    assert seen.keys() & set(left_out) == set()
    assert seen.keys() >= {*kept, "PATH", "HOME"}
    assert seen["OPENAI_BASE_URL"] == seen["OPENAI_API_BASE"]
    assert re.match(r"http://127\.0\.0\.1:\d+/", seen["OPENAI_BASE_URL"])
    assert seen["NO_PROXY"] == seen["no_proxy"] == "example.com,127.0.0.1,localhost"


def test_each_episode_has_a_key_of_its_own(make_sampler, tmp_path):
    (tmp_path / "agent.py").write_text(
        f"{CLIENT}ask('x')\nprint(os.environ['OPENAI_API_KEY'], file=sys.stderr)\nreward(1)"
    )
    agent = ProgramAgent(AgentConfig(agent_command=f"{sys.executable} {tmp_path}/agent.py"))
    sampled = make_sampler(agent, lambda prompt: "yes").sample(
        [Prompt("x", [5], index=i) for i in range(3)], SamplingParams(8), 1, 1, 0, Metrics()
    )
    assert len({sample.episode.output for sample in sampled}) == 3


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("post('/reward', {'reward': 0.25})\nreward(1)", {"reward": 0.25}),
        ("post('/complete', {'reward': 0.25})\nreward(1)", {"reward": 0.25}),
        ("post('/complete', {'reward': 0.25})\nsys.exit(3)", {"reward": 0.25}),
        ("reward(0.5)\nprint()", {"reward": 0.5}),
        ("reward(1)\nreward(0.5)", {"reward": 0.5}),
    ],
)
def test_a_posted_reward_precedes_a_printed_one(play, lines, expected):
    sampled, metrics = play(f"ask('x')\n{lines}")
    assert sampled.scores == expected
    assert metrics["agent/completed"] == 1


def test_without_a_reward_of_its_own_others_score_the_episode(make_sampler, tmp_path):
    (tmp_path / "agent.py").write_text(f"{CLIENT}ask('x')\nprint('no reward')")
    sampler = make_sampler(
        ProgramAgent(AgentConfig(agent_command=f"{sys.executable} {tmp_path}/agent.py")), str.upper
    )
    for has_rewards, ending in ((True, Ending.COMPLETED), (False, Ending.AGENT_ERROR)):
        object.__setattr__(sampler.player.parts, "has_rewards", has_rewards)
        metrics = Metrics()
        sampled = sampler.sample([Prompt("x", [5])], SamplingParams(8), 1, 1, 0, metrics)
        assert metrics.reduced(SingleProcess())[f"agent/{ending.value}"] == 1
        assert [sample.scores for sample in sampled] == ([{}] if has_rewards else [])


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ("raise KeyError('lost')", "exit status 1: KeyError: 'lost'"),
        ("sys.exit(3)", "exit status 3: no output"),
        ("os.kill(os.getpid(), 9)", "exit status"),
        ("reward('much')", "the reward 'much' is no finite number"),
        ("reward(float('nan'))", "the reward nan is no finite number"),
    ],
)
def test_what_went_wrong_stays_with_the_episode(play, lines, error):
    sampled, metrics = play(f"ask('x')\n{lines}")
    assert metrics["agent/agent_error"] == 1
    assert error in sampled.episode.error
    assert sampled.episode.n_turns == 1
    assert sampled.episode.messages[-1] == {"role": "assistant", "content": "yes"}
    if "KeyError" in error:
        assert sampled.episode.output.startswith("Traceback") and sampled.episode.output.endswith(
            "KeyError: 'lost'"
        )


def dies(pid: int) -> bool:
    """Whether a process that was sent a signal ends; one that is dead but not waited for has ended."""
    for _ in range(1000):
        file = Path(f"/proc/{pid}/stat")
        if not file.exists() or file.read_text().rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("last", "ending"), [("time.sleep(600)", "timeout"), ("reward(1)", "completed")]
)
def test_children_are_killed_with_the_program(play, last, ending):
    lines = """
        import subprocess, time
        child = subprocess.Popen(["sleep", "600"])
        ask("x")
        print(os.getpid(), child.pid, file=sys.stderr, flush=True)
    """
    lines = "\n".join(line.strip() for line in lines.splitlines())
    sampled, metrics = play(f"{lines}\n{last}", agent_timeout=3.0 if ending == "timeout" else 600.0)
    assert metrics[f"agent/{ending}"] == 1
    assert [dies(int(pid)) for pid in sampled.episode.output.split()] == [True, True]


@pytest.mark.parametrize("passes", range(6))
def test_a_program_cancelled_while_it_starts_leaves_nothing(passes, tmp_path):
    """asyncio starts a process in several passes of its loop; a signal may come between any two."""
    agent = ProgramAgent(AgentConfig(agent_command=f"sleep 600 | tail -f /dev/null {tmp_path}"))
    session: Any = SimpleNamespace(output="")

    async def cancelled_at_its_start() -> bool:
        await agent.start()
        work = asyncio.create_task(agent.run(EpisodeInput(Prompt("x", [5]), seed=0), session))
        for _ in range(passes):
            await asyncio.sleep(0)
        work.cancel()
        ended, _ = await asyncio.wait([work], timeout=60)
        await agent.stop()
        return bool(ended)

    assert asyncio.run(cancelled_at_its_start())
    pids = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(tmp_path) in str(process.info)
    ]
    assert all(map(dies, pids))


def test_waiting_for_a_place_costs_an_episode_no_time(make_sampler):
    class Waits(Agent):
        @asynccontextmanager
        async def slot(self):
            await asyncio.sleep(0.5)
            yield

        async def run(self, task, session):
            return 1.0

    metrics = Metrics()
    sampler = make_sampler(Waits(), str.upper, agent_timeout=0.4)
    sampler.sample([Prompt("x", [5])], SamplingParams(8), 1, 1, 0, metrics)
    assert metrics.reduced(SingleProcess())["agent/timeout"] == 0


def test_no_more_programs_run_at_a_time_than_allowed(make_sampler, tmp_path):
    lines = "import time\nos.mkdir(f'{sys.argv[1]}/{os.getpid()}')\nrunning = len(os.listdir(sys.argv[1]))\nask('x')\n"
    lines += "time.sleep(0.05)\nos.rmdir(f'{sys.argv[1]}/{os.getpid()}')\nreward(running)"
    (tmp_path / "agent.py").write_text(CLIENT + lines)
    (tmp_path / "running").mkdir()
    command = f"{sys.executable} -S {tmp_path}/agent.py {tmp_path}/running"
    agent = ProgramAgent(AgentConfig(agent_command=command, agent_concurrency=2))
    prompts = [Prompt("x", [5], index=i) for i in range(6)]
    sampled = make_sampler(agent, lambda prompt: "yes").sample(
        prompts, SamplingParams(8), 1, 1, 0, Metrics()
    )
    assert len(sampled) == len(segments_of(sampled)) == 6
    assert max(sample.scores["reward"] for sample in sampled) <= 2


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("no_such_program --x", "there is no program 'no_such_program'. Install it"),
        ("no_such_program | cat", "there is no program 'no_such_program'. Install it"),
        (f"{sys.executable} no_such_file.py", "there is no file no_such_file.py in"),
        ("", "there is no program ''"),
        ("echo 'x", "No closing quotation. Correct the quotes."),
        ("echo '{task}' | cat", "leave the quotes around {task} out"),
    ],
)
def test_a_command_that_cannot_work_is_refused_with_a_remedy(command, error):
    with pytest.raises(ValueError, match=re.escape(error)) as raised:
        agent_source(AgentConfig(agent_command=command))
    assert str(raised.value).startswith("--agent_command")


@pytest.mark.parametrize(
    "command",
    [
        "printf %s {task}",
        "printf %s {task} | cat",
        "cd . && printf %s {task}",
        "LEVEL=3 printf %s {task}",
        "(printf %s {task})",
        'echo "$(printf %s "$HOME")" > /dev/null; printf %s {task}',
    ],
)
def test_values_are_no_language_of_the_shell(command):
    value = 'it\'s "$(echo hacked)" `x`; exit 1 #'
    arguments = Command(command).arguments({"task": value})
    assert subprocess.run(arguments, input=RELEASE, capture_output=True).stdout.decode() == value


def test_an_unknown_column_is_found_before_a_model_is_loaded():
    source = agent_source(AgentConfig(agent_command="echo {question} {anwser}"))
    rows = [
        Prompt("", [], row={"question": "?", "answer": 2}, source="tasks.jsonl", index=i)
        for i in range(3)
    ]
    with pytest.raises(
        ValueError,
        match=r"\{anwser\} is no column of row 1 of tasks.jsonl, which has: question, answer",
    ):
        source.check_prompts(rows)


def test_an_unset_variable_is_no_agent_env():
    with pytest.raises(ValueError, match=r"agent_env NO_SUCH is not set: export it"):
        AgentPlayer(ProgramAgent(AgentConfig(agent_command="echo", agent_env=("NO_SUCH",))))


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("", None),
        ("done", None),
        ("[1]", None),
        ('{"score": 1}', None),
        ('{"reward": null}', None),
        ('{"reward": 1}\ndone', None),
        ('thinking\n{"reward": 1}\n\n', 1),
        ('{"reward": true, "more": []}', True),
        ('{"reward": {"a": 0.5}}', {"a": 0.5}),
    ],
)
def test_a_reward_is_printed_as_json_in_the_last_line(output, reward):
    assert printed_reward(output) == reward


@pytest.mark.parametrize(
    ("answers", "reward"), [(["42"], 1.0), (["41", "it is 42 ."], 0.5), (["41", "43"], 0.0)]
)
def test_the_example_asks_a_second_time(make_sampler, answers, reward):
    command = f"{sys.executable} {REPO}/examples/agents/second_chance.py --answer {{answer}}"
    said = iter(answers)
    sampler = make_sampler(
        ProgramAgent(AgentConfig(agent_command=command)), lambda prompt: next(said)
    )
    prompt, metrics = Prompt("What is 17 + 25?", [5], row={"answer": "42"}), Metrics()
    [sampled] = sampler.sample([prompt], SamplingParams(64), 1, 1, 0, metrics)
    assert len(sampled.segments) == 1 and sampled.scores == {"reward": reward}
    assert metrics.reduced(SingleProcess())["agent/turns"] == len(answers)
