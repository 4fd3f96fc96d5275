"""Small Transformers that show the training instabilities of large ones."""

__version__ = "0.1.0"
