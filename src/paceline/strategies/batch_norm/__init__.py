"""Statistics of batch norms, joined over the replicas of any plan."""
