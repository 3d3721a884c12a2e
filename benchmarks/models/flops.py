"""The FLOPs of a profile's matrix products, by which models and profiles are compared."""

from __future__ import annotations

from paceline.model.cost.profile import Profile


def forward_flops(profile: Profile) -> float:
    """Return the FLOPs of a forward for one sample."""
    return sum(s.forward.flops.per_sample * s.repeat for s in profile.segments)


def backward_flops(profile: Profile) -> float:
    """Return the FLOPs of a backward for one sample."""
    return sum(s.backward.flops.per_sample * s.repeat for s in profile.segments)
