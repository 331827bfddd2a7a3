"""Continuous batching without a model: recorded rounds, measured costs and the engine's own scheduler."""
