"""Packaging of OpenPPO. Tested pins are in requirements.txt; these are the ranges that should work."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = (
    (here / "openppo" / "__init__.py")
    .read_text(encoding="utf-8")
    .split('__version__ = "')[1]
    .split('"')[0]
)
repository = "https://github.com/openppo/openppo"


def long_description() -> str:
    """README with links and pictures that lead somewhere from the page of a package index too."""
    readme = (here / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"(!\[[^\]]*\])\((?!\w+:|#)", rf"\1({repository}/raw/v{version}/", readme)
    return re.sub(r"(?<!!)(\[[^\]]*\])\((?!\w+:|#)", rf"\1({repository}/blob/v{version}/", readme)


setup(
    name="openppo",
    version=version,
    description="PPO for language models on one node, on DeepSpeed, without Ray",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    url=repository,
    project_urls={
        "Documentation": f"{repository}/tree/v{version}/docs",
        "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    },
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords=[
        "PPO",
        "RLHF",
        "GRPO",
        "reinforcement learning",
        "language models",
        "DeepSpeed",
        "LoRA",
    ],
    python_requires=">=3.11",
    packages=find_packages(include=["openppo", "openppo.*"]),
    package_data={"": ["py.typed", "**/*.html", "**/*.css", "**/*.js", "**/*.yaml"]},
    entry_points={"console_scripts": ["openppo=openppo.__main__:main"]},
    install_requires=[
        "torch>=2.11",  # tested with 2.11 and 2.13
        "deepspeed>=0.19.8",  # the first whose ZeRO-1 and 2 skip a step, or report it, by the norm
        "transformers>=5.17",  # tested with 5.17 and 5.23
        "accelerate>=1.1",  # transformers loads with it in partitions, and peft needs it
        "aiohttp>=3.12",
        "peft>=0.20",
        "datasets>=4.0",
        "filelock>=3.20",
        "fsspec>=2024.6",
        "huggingface_hub>=1.5",
        "jinja2>=3.1",
        "numpy>=2.0",
        "pillow>=10",
        "pyarrow>=16",
        "pydantic>=2.7",
        "pyyaml>=6.0.1",
        "regex>=2024.4",
        "safetensors>=0.8",
        "tensorboard>=2.17",
        "tokenizers>=0.23.1",
        "psutil>=5.9",
        "tqdm>=4.66.3",
        "tyro>=1.0",
    ],
    extras_require={
        "dev": [
            "build",
            "check-jsonschema",
            "gymnasium",
            "ipykernel",
            "math-verify",
            "mypy",
            "nbclient",
            "pytest",
            "pytest-xdist",
            "ruff",
            "selenium",
            "twine",
            "types-PyYAML",
            "types-tqdm",
            "vaderSentiment",
            "wandb",
        ],
        "gpu": ["liger-kernel==0.8.5"],
        "docs": ["mkdocs-material>=9.7", "mike>=2.1"],
        "flash": ["flash-attn"],
        "math": ["math-verify"],
        "vision": ["torchvision", "av", "num2words"],
        "vllm": ["vllm>=0.32"],
        "wandb": ["wandb>=0.19"],
    },
)
