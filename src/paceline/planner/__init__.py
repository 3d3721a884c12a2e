"""The planner turns a profile, a plan and a cluster into an estimate, and a request into a complete
plan.
"""
