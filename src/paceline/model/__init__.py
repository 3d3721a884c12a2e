"""A model's forward as a graph of operators, cut into pieces along its own modules."""
