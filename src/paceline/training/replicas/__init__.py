"""State that forwards change beside parameters, kept equal on all replicas."""
