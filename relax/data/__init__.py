"""Prompts, rendering, packing."""
