"""Engines that sample responses, and the rollout that makes samples of them."""
