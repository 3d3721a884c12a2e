"""Jobs, models and data that at least three files of tests need; what fewer need stands beside its tests."""
