"""Training and searches on the nodes of a Ray cluster."""
