"""The verbs of Paceline, such as train, evaluate, predict and verify.

The command line only calls these.
"""
