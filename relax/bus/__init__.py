"""The transfer queue: the only way in which roles exchange data."""
