"""Speed beside other tools, measured in turns. See docs/benchmarks.md."""
