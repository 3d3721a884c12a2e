"""Runs a plan with parameter servers: one coordinator, servers that update, workers that compute gradients."""
