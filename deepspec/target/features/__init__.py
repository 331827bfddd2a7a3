"""The target's features on disk: made once, small, and read by row as the target would give them."""

from deepspec.target.features.estimate import Estimate, chosen, estimated, gib
from deepspec.target.features.making import Order, complete, make_store
from deepspec.target.features.store import FeatureStore, StoredRows, check_store, recipe_of
from deepspec.target.features.writer import Recipe, Rows

__all__ = [
    "Estimate",
    "FeatureStore",
    "Group",
    "Order",
    "Recipe",
    "Rows",
    "StoredRows",
    "check_store",
    "chosen",
    "complete",
    "estimated",
    "gib",
    "make_store",
    "recipe_of",
]
