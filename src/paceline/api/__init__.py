"""What a user asks for: train, evaluate, predict, verify. The command line only calls these."""
