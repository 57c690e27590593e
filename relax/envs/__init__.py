"""Environments: how a policy acts over one or many turns."""
