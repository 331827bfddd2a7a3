"""Prompts → conversations → augmentation → regeneration → template and loss mask → draft vocabulary → packing."""

from deepspec.data.build import TargetFacts, build, work_folder
from deepspec.data.dataset import load_draft_vocab, load_prompts, load_rows
from deepspec.data.gather import deciding, gather
from deepspec.data.prompts import read_prompts
from deepspec.data.template import ChatTemplate

__all__ = [
    "ChatTemplate",
    "TargetFacts",
    "build",
    "deciding",
    "gather",
    "load_draft_vocab",
    "load_prompts",
    "load_rows",
    "read_prompts",
    "work_folder",
]
