"""Prompts rewritten: each transform in a file of its own, chosen and tuned by the configuration."""

from deepspec.data.augment.apply import Augmentation, augment, read_augmentations

__all__ = ["Augmentation", "augment", "read_augmentations"]
