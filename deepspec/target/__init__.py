"""The frozen model: loading, feature capture, state with rollback."""

from deepspec.target.dtype import probe_dtype
from deepspec.target.edges import Edges
from deepspec.target.layout import Layout, chain, tree
from deepspec.target.load import load_edges, load_target, resolve_dtype
from deepspec.target.model import Captured, Target, TargetOutput
from deepspec.target.state import State

__all__ = [
    "Captured",
    "Edges",
    "Layout",
    "State",
    "Target",
    "TargetOutput",
    "chain",
    "load_edges",
    "load_target",
    "probe_dtype",
    "resolve_dtype",
    "tree",
]
