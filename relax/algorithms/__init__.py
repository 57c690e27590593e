"""Advantages and policy objectives: pure tensor functions, one file each."""
