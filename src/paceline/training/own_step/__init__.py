"""Steps of a job's own: what they are tried on, and what they may call."""
