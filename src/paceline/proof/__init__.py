"""Prove that a plan computes what one device computes, with a plain loop, a yardstick and a
comparison.
"""
