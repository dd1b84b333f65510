"""An oracle of the house: tiny runs, recorded before code moves and compared after each step.

``python -m tests.golden.house record FOLDER`` and ``compare A B``; CONTRIBUTING.md says when.
"""
