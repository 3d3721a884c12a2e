"""Search over hyperparameters and architectures: a controller samples, prunes and packs trials; ranks only train."""
