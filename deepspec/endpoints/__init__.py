"""Measuring any OpenAI-compatible server from outside: round trips, first tokens, tokens a second, acceptance."""
