"""A cluster on one machine: hosts with slow links, and work that sleeps in place of an accelerator."""
