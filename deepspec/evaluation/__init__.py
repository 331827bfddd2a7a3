"""Measuring: prompts, plain against speculative decoding, statistics with intervals, and the result file."""
