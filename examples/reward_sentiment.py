"""A Python reward: how happy a text sounds, by the word list of vaderSentiment (pip install vaderSentiment)."""

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

_analyzer = SentimentIntensityAnalyzer()


def reward_fn(prompts: list[str], responses: list[str], labels: list) -> list[float]:
    """Compound score of each response, from -1 (sad) to 1 (happy)."""
    return [_analyzer.polarity_scores(response)["compound"] for response in responses]
