"""One option, one name: every field is used, and every flag that we write about exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

TEXTS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "examples")
TEXT_SUFFIXES = {".md", ".rst", ".txt", ".sh", ".py", ".yaml", ".yml"}
COMMAND_CONFIGS = {
    "train_ppo": "TrainPPOConfig",
    "train_sft": "TrainSFTConfig",
    "train_rm": "TrainRMConfig",
    "train_prm": "TrainPRMConfig",
    "generate": "GenerateConfig",
    "evaluate": "EvaluateConfig",
    "serve_rm": "ServeRMConfig",
    "merge_lora": "MergeLoRAConfig",
    "export": "ExportConfig",
    "report": "ReportConfig",
}
EVERY_COMMAND = {"config", "help", "version"}
OTHER_PROGRAMS = set(
    """
    nproc_per_node nnodes node_rank standalone master_addr master_port shutdown_timeout max_restarts signals_to_handle
    rdzv_backend rdzv_endpoint module
    job-name nodes ntasks-per-node gpus-per-node cpus-per-task time signal output kill-on-bad-exit requeue open-mode
    quiet version clear disable-pip-version-check no-deps upgrade editable index-url extra-index-url no-build-isolation
    update-aliases push slow import-mode durations check strict logdir
    """.split()
)
"""Flags of torchrun and deepspeed; of Slurm; of pip; of mike, pytest, ruff, mypy and tensorboard."""
FLAG = re.compile(r"(?<![\w!-])--([a-z][a-z0-9_-]*)")
OUR_COMMAND = re.compile(r"openppo(?:\.cli\.| )(\w+)")


@cache
def config_classes(repo: Path) -> dict[str, dict[str, str]]:
    """The dataclasses of the config: class name -> field name -> annotation."""
    files = sorted(file for file in (repo / "openppo" / "config").glob("*.py") if file.stem != "fields")
    nodes = [node for file in files for node in ast.parse(file.read_text(encoding="utf-8")).body]
    found = [node for node in nodes if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for node in found if "NamedTuple" not in [ast.unparse(base) for base in node.bases]}

    def fields_of(node: ast.ClassDef) -> dict[str, str]:
        bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        inherited = {name: kind for base in bases for name, kind in fields_of(base).items()}
        own = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
        return inherited | {ast.unparse(item.target): ast.unparse(item.annotation) for item in own}

    return {name: fields_of(node) for name, node in classes.items()}


@cache
def flags_of(repo: Path, command: str | None = None) -> set[str]:
    """Flags of one command (of all commands when None): field names, and ``no_`` before boolean ones."""
    classes = config_classes(repo)
    top = {COMMAND_CONFIGS[command]} if command else set(COMMAND_CONFIGS.values())
    flags: set[str] = set(EVERY_COMMAND)
    for name in top & classes.keys():
        for group in classes[name].values():
            for field, annotation in classes[group].items():
                flags |= {field, f"no_{field}"} if annotation == "bool" else {field}
    return flags


def unused_fields(repo: Path) -> list[str]:
    """Options that no file of the package reads as an attribute; checks in the config itself do not count."""
    package = repo / "openppo"
    read = {
        node.attr
        for file in package.rglob("*.py")
        for part in _parts_that_use(file, package)
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
    }
    return [f"{name}.{field}" for name, fields in config_classes(repo).items() for field in fields if field not in read]


def _parts_that_use(file: Path, package: Path) -> list[ast.AST]:
    """The whole file; of the config only methods that give an option another form, since validation is no use."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if package / "config" not in file.parents:
        return [tree]
    methods = [method for node in tree.body if isinstance(node, ast.ClassDef) for method in node.body]
    return [method for method in methods if isinstance(method, ast.FunctionDef) and "validate" not in method.name]


def config_getattrs(repo: Path) -> list[str]:
    """``getattr`` on a config: it would hide a wrong name behind a default."""
    return [
        f"{file}:{node.lineno}"
        for file in sorted((repo / "openppo").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
        if node.args and re.fullmatch(r"(self\._?)?(config|cfg)(\.\w+)?", ast.unparse(node.args[0]))
    ]


def texts(repo: Path) -> Iterator[tuple[Path, str]]:
    """What we write for people: documents and examples, with continued lines joined."""
    for entry in TEXTS:
        top = repo / entry
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if file.is_file() and file.suffix in TEXT_SUFFIXES and "hooks" not in file.parts:
                yield file, re.sub(r"\\\n\s*", " ", file.read_text(encoding="utf-8"))


@cache
def argparse_flags(repo: Path) -> set[str]:
    """Flags that our scripts and smaller commands declare with ``add_argument``."""
    sources = [file for folder in ("examples", "benchmarks", "openppo/cli") for file in (repo / folder).rglob("*.py")]
    declared = re.compile(r"add_argument\(\s*[\"']--([a-z][a-z0-9_-]*)")
    return {flag for file in sources for flag in declared.findall(file.read_text(encoding="utf-8"))}


def unknown_flags(repo: Path) -> list[str]:
    """Flags in documents and examples that no command has; after ``openppo.cli.X``, that X does not have."""
    anywhere = flags_of(repo) | OTHER_PROGRAMS | argparse_flags(repo)
    found = []
    for file, text in texts(repo):
        for line in text.splitlines():
            command = OUR_COMMAND.search(line)
            for match in FLAG.finditer(line):
                known = anywhere
                if command and command.group(1) in COMMAND_CONFIGS and match.start() > command.end():
                    known = flags_of(repo, command.group(1)) if "`" not in line else anywhere
                if match.group(1) not in known:
                    found.append(f"{file.relative_to(repo)}: --{match.group(1)}")
    return found


def test_every_option_is_used() -> None:
    assert unused_fields(REPO) == []


def test_no_option_is_read_with_a_default_of_its_own() -> None:
    assert config_getattrs(REPO) == []


def test_every_flag_in_documents_and_examples_exists() -> None:
    assert unknown_flags(REPO) == []


REPOSITORY = {
    "openppo/config/all.py": """
class PPOConfig:
    eps_clip: float = 0.2
    offload: bool = True
class RunConfig:
    save_path: str = ""
class TrainPPOConfig:
    ppo: PPOConfig
    run: RunConfig
class TrainSFTConfig:
    run: RunConfig
""",
    "openppo/a.py": """x = config.ppo.eps_clip
offload = save_path = config.run
getattr(config, 'a', 1)
getattr(cfg, 'a')
getattr(self.config, 'a')
getattr(config.ppo, 'a')
getattr(model.config, 'a')
getattr(x, 'a')
""",
    "examples/sft.sh": "torchrun --nproc_per_node 2 -m openppo.cli.train_sft --save_path x \\\n --eps_clip 0.1\n",
    "examples/make.py": 'parser.add_argument("--rows")\n# --rows 3 --columns 3\n',
    "README.md": "| --- |\n<!--note--> `--eps_clip`, `--no_offload`, `--clip_eps`, `--no_eps_clip`; a--b; --upgrade",
}


def test_each_checker_finds_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    for name, text in REPOSITORY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert unused_fields(tmp_path) == ["PPOConfig.offload", "RunConfig.save_path"]
    assert [found.rsplit(":", 1)[1] for found in config_getattrs(tmp_path)] == ["3", "4", "5", "6"]
    assert unknown_flags(tmp_path) == [
        "README.md: --clip_eps",
        "README.md: --no_eps_clip",
        "examples/make.py: --columns",
        "examples/sft.sh: --eps_clip",
    ]
