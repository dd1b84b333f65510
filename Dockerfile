# OpenPPO on NVIDIA GPUs, with the versions that were tested (requirements*.txt):
#
#     docker build --tag openppo:gpu .
#     docker run --rm --gpus all --shm-size 16g --volume "$PWD:/workspace" openppo:gpu openppo train_ppo ...
#
# docs/gpus.md says more. tests/packaging/test_dockerfile.py runs the pip steps in a clean environment.
FROM python:3.12-slim-trixie

# Compilers: DeepSpeed's Adam for CPUs and torch.compile need g++, Triton gcc, both on first use. PyTorch's wheel brings CUDA.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/openppo
COPY requirements.txt requirements-dev.txt ./
RUN python -m pip install --no-cache-dir "$(grep '^torch==' requirements.txt)" \
    && python -m pip install --no-cache-dir --requirement requirements.txt

COPY setup.py pyproject.toml README.md LICENSE ./
COPY openppo ./openppo
RUN python -m pip install --no-cache-dir --constraint requirements.txt --constraint requirements-dev.txt \
        '.[gpu,math,wandb]'

# Files that runs write belong to this user: --build-arg UID="$(id -u)" makes it yours.
ARG UID=1000
RUN useradd --uid "$UID" --create-home openppo \
    && install --directory --owner openppo /workspace /cache
# Models, data sets and compiled kernels are cached here.
ENV XDG_CACHE_HOME=/cache
USER openppo
WORKDIR /workspace

CMD ["openppo", "--help"]
