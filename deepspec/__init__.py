"""deepspec: learn a draft model for a language model, and measure how much faster it decodes."""

__version__ = "0.1.0"
