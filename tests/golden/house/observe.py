"""One observation of what a case left: metrics, samples, weights, files, output, the log's words, invariants."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.golden.house.dumps import Sample, read_rollouts, read_rows, read_shown
from tests.golden.house.log_words import log_words

Observation = dict[str, Any]
LEFT_OUT = re.compile(r"^time|^speed/|_s$|_per_s|idle_share|memory")
"""Metrics that no two runs have alike."""


def observe(folder: Path, outputs: list[str], package: Path) -> Observation:
    """What the commands of a case, with these ``outputs``, left in its ``folder``."""
    metrics, shown = logs_of(folder)
    samples = read_rollouts(folder / "rollouts")
    words = [log_words(output, folder, package) for output in outputs]
    weights = {
        str(file.relative_to(folder)): weights_of(file)
        for file in kept_files(folder, "*.safetensors")
    }
    return {
        "metrics": metrics,
        "samples": named(samples),
        "shown": shown,
        "weights": weights,
        "outputs": {file.name: read_rows(file) for file in sorted(folder.glob("*.jsonl"))},
        "files": [str(file.relative_to(folder)) for file in kept_files(folder, "*")],
        "log": {f"command {i}": lines for i, lines in enumerate(words)},
        "invariants": {
            "steps": list(metrics),
            "metric names": sorted({name for row in metrics.values() for name in row}),
            "samples": {
                split: counts(samples, split)
                for split in sorted({each["split"] for each in samples})
            },
            "learned": learned(folder, weights),
        },
    }


def kept_files(folder: Path, pattern: str) -> list[Path]:
    """Files outside checkpoints, whose format is no promise, and rollouts, whose form is."""
    files = [file for file in sorted(folder.rglob(pattern)) if file.is_file()]
    return [file for file in files if not re.search(r"/(checkpoints_\w+|rollouts)/", str(file))]


def logs_of(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics by step, without times, speeds and memory, and the samples that are logged token by token."""
    metrics: dict[str, Any] = {}
    for file in sorted(folder.rglob("metrics.jsonl")):
        for row in read_rows(file):
            name = f"step {row.pop('step')}"
            assert name not in metrics, f"{file}: {name} is logged twice"
            metrics[name] = {key: value for key, value in row.items() if not LEFT_OUT.search(key)}
    rows = [row for file in sorted(folder.rglob("tokens.jsonl")) for row in read_rows(file)]
    return metrics, read_shown(rows)


def named(samples: list[Sample]) -> dict[str, Sample]:
    """Samples by step, split, group and place in the group."""
    places: Counter[str] = Counter()
    by_name = {}
    for sample in samples:
        group = f"step {sample['step']} {sample['split']} group {sample['group']}"
        fields = {
            name: value for name, value in sample.items() if name not in ("step", "split", "group")
        }
        by_name[f"{group} sample {places[group]}"] = fields
        places[group] += 1
    return by_name


def counts(samples: list[Sample], split: str) -> dict[str, Any]:
    """What stays the same in whatever order samples come: their number, groups, endings, tokens, prompts."""
    of_split = [sample for sample in samples if sample["split"] == split]
    segments = [segment for sample in of_split for segment in sample["segments"]]
    groups = Counter((sample["step"], sample["group"]) for sample in of_split)
    return {
        "samples": len(of_split),
        "groups": len(groups),
        "group sizes": histogram(groups.values()),
        "endings": histogram(
            sample["ending"] or sample["segments"][-1]["finish"] for sample in of_split
        ),
        "segments": len(segments),
        "tokens": sum(len(segment["ids"]) for segment in segments),
        "actions": sum(segment["mask"].count("1") for segment in segments),
        "prompts": histogram(f"{sample['task']} {sample['row']}".strip() for sample in of_split),
    }


def histogram(values: Any) -> dict[str, int]:
    """How often each value occurs, by its text."""
    return dict(sorted(Counter(map(str, values)).items()))


def weights_of(file: Path) -> dict[str, Any]:
    """One checksum over sorted names, dtypes, shapes and bytes, and the norm, which may be close where bits differ."""
    digest, squares = hashlib.sha256(), 0.0
    tensors = load_file(file)
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
        squares += float(tensor.double().square().sum())
    return {"checksum": digest.hexdigest()[:16], "norm": squares**0.5}


def learned(folder: Path, weights: dict[str, Any]) -> dict[str, bool]:
    """Whether saved weights are others than those of every model that was there before."""
    before = {
        weights_of(file)["checksum"] for file in (folder.parent / "inputs").rglob("*.safetensors")
    }
    return {name: each["checksum"] not in before for name, each in weights.items()}


def written(observation: Observation) -> Observation:
    """The observation as a file has it."""
    return json.loads(json.dumps(observation))
