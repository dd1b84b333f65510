"""Which trajectories are trained on next, where sampling does not wait for training."""
