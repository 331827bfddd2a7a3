"""Evaluation sets: what each is made of, where its rows are found, and the prompts made of them."""

from deepspec.evaluation.tasks.item import Item, Source, Unreachable
from deepspec.evaluation.tasks.read import read_tasks

__all__ = ["Item", "Source", "Unreachable", "read_tasks"]
