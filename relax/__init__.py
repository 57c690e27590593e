"""Relax: an asynchronous reinforcement-learning engine for post-training language models.

Importing the package is light: neither torch nor ray is loaded before something needs them.
"""

__version__ = "0.1.0"
