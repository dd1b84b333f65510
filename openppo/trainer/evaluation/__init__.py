"""Models at held-out prompts: the evaluator of training, and the commands that answer prompts without training."""

from openppo.trainer.evaluation.evaluator import Evaluation, Evaluator, pass_at_k

__all__ = ["Evaluation", "Evaluator", "pass_at_k"]
