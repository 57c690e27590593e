"""Metrics, samples and progress that people read."""
