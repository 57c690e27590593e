"""Rewards: one file each, and the workers that run them."""
