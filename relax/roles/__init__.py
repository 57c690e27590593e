"""The roles: plain async classes without Ray."""
