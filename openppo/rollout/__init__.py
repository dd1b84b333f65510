"""Engines that sample responses, and the rollout that makes trajectories of them."""
