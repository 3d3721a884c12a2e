"""Speed beside other tools, measured in turns. See benchmarks/README.md."""
