"""The parts of a global step: sample and score, then update actor and critic."""
