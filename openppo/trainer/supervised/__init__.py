"""Training on given data: SFT, reward models and process reward models share one loop."""
