"""Optimizers on ranks: what an update depends on, how it is made if ranks hold parts, and which
state of it is saved.
"""
