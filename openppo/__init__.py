"""OpenPPO: PPO for language models on one node, on DeepSpeed, without Ray."""

__version__ = "0.1.0"
