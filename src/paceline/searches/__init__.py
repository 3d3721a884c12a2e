"""Search over hyperparameters and architectures. A controller samples, prunes and packs trials;
ranks only train.
"""
