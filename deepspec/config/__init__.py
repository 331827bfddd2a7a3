"""Typed settings: the schema, where recipes are found, and how a stage is started from a shell."""
