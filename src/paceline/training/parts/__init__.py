"""Work beside the step: copies in memory, drift, spikes and checks of memory and arithmetic."""
