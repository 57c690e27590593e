"""Forward passes that trainer and embedded engine share."""
