"""deepspec: learn a draft model for a language model, and measure how much faster it decodes."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Before anything imports torch: threads that wait for each other must sleep, not spin. With another program on
# the same cores, spinning makes a two-thread forward up to 70 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Progress bars are the stages' own; those of the libraries below would run over them.
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if TYPE_CHECKING:
    from deepspec.library import SpeculativeDecoder
    from deepspec.training.saved_draft import load_draft

__all__ = ["SpeculativeDecoder", "__version__", "load_draft"]
_PLACES = {"SpeculativeDecoder": "deepspec.library", "load_draft": "deepspec.training.saved_draft"}


def __getattr__(name: str) -> Any:
    """The library's names, imported when they are asked for: the programs start without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'deepspec' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
