"""Devices and links as values, of this machine or of a cluster that is described."""
