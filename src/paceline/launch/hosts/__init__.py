"""Ranks on several hosts: launchers, hosts that come and go, and how peers prove themselves."""
