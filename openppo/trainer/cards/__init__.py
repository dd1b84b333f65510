"""Model cards of trained and exported models."""
