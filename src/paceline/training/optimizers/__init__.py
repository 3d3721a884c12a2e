"""Optimizers on ranks: what an update looks at, how it is made where ranks hold parts, and what is kept of it."""
