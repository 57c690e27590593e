"""Relax: an asynchronous reinforcement-learning engine for post-training language models.

Importing the package is light: neither torch nor ray is loaded before something needs them.
"""

__version__ = "0.1.0"

from relax.torchvision_on_cpu import watch_for_import

watch_for_import()  # here, so that it is done before anything can import transformers and, with it, torchvision
