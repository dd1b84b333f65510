"""From prompts to trajectories: engines that sample, and rewards that score."""
