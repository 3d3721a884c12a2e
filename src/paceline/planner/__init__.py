"""From a profile, a plan and a cluster to an estimate; from a request to a plan without open questions."""
