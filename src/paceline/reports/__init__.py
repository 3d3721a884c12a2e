"""Reports describe a run for people: a verdict, a page of figures, and the comparison of two runs."""
