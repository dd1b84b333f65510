"""Models at held-out prompts: the evaluator of training, and the commands that answer prompts without training."""

from openppo.trainer.evaluation.evaluator import Evaluation, Evaluator, Grading, pass_at_k

__all__ = ["Evaluation", "Evaluator", "Grading", "pass_at_k"]
