"""The ranks of a plan with parameter servers: a coordinator, servers and workers."""
