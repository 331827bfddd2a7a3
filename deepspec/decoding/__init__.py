"""Speculative decoding: acceptance rules and the engine."""

from deepspec.decoding.engine import Engine
from deepspec.decoding.request import Request, Result, Round, Sampling

__all__ = ["Engine", "Request", "Result", "Round", "Sampling"]
