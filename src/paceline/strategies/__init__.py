"""Plans, and a folder for each strategy with its plan keys, its cost and its code."""
