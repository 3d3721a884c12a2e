"""One process: its signs of life, its failures, and memory that outlives it."""
