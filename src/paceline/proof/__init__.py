"""Whether a plan computes what one device computes: a plain loop to compare with, a yardstick, a comparison."""
