"""Weight sync: publish, verify, acknowledge."""
