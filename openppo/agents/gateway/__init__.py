"""The OpenAI-compatible address of a run: a codec in front of ``Session.chat``."""
