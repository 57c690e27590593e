"""The controller: plan, start, watch, stop."""
