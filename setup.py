"""Packaging of OpenPPO. Tested pins are in requirements.txt; these are the ranges that should work."""

from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = (here / "openppo" / "__init__.py").read_text().split('__version__ = "')[1].split('"')[0]

setup(
    name="openppo",
    version=version,
    description="PPO for language models on one node, on DeepSpeed, without Ray",
    long_description=(here / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["openppo", "openppo.*"]),
    package_data={"openppo.tracking.report": ["page/*"]},
    install_requires=[
        "torch>=2.8",
        "deepspeed>=0.19",
        "transformers>=5.0",
        "aiohttp>=3.9",
        "peft>=0.18",
        "datasets>=4.0",
        "numpy>=1.26",
        "pyarrow>=15",
        "pyyaml>=6.0",
        "rich>=13.7",
        "tensorboard>=2.16",
        "tqdm>=4.66",
        "tyro>=1.0",
    ],
    extras_require={
        "dev": [
            "math-verify",
            "mypy",
            "pytest",
            "pytest-xdist",
            "ruff",
            "selenium",
            "types-PyYAML",
            "types-tqdm",
            "vaderSentiment",
            "wandb",
        ],
        "flash": ["flash-attn"],
        "math": ["math-verify"],
        "vllm": ["vllm>=0.32"],
        "wandb": ["wandb>=0.19"],
    },
)
