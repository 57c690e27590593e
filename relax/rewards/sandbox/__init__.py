"""A box for programs that nobody has read: processes without network, without files of others, with bounded resources."""
