"""A rank's run: the feed, the step, the loop and the evaluation."""
