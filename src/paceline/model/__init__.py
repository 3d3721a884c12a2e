"""The one way to look at a model: its graph, what its forward reads and changes, and its cost."""
