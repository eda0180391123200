"""A research workbench for training world action models."""

__version__ = "0.1.0"
