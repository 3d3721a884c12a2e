"""Collectives of CPU ranks, in memory that those on one host share."""
