"""The stages as commands of their own: `deepspec-train` is `python -m deepspec.train`, and so for each.

A shell completes them (recipes, groups, keys) once it was told to: eval "$(deepspec-train -sc install=bash)", or zsh,
or fish (`deepspec-train -sc install=fish | source`).
"""

import sys

from deepspec.config.app import start


def plan() -> None:
    start("plan")


def prepare() -> None:
    start("prepare")


def capture() -> None:
    start("capture")


def train() -> None:
    start("train")


def evaluate() -> None:
    start("evaluate")


def pipeline() -> None:
    start("pipeline")


def generate() -> None:
    start("generate")


def verify() -> None:
    start("verify")


def simulate() -> None:
    start("simulate")


def serve() -> None:
    start("serve")


def serve_features() -> None:
    start("serve_features")


def bench_endpoint() -> None:
    start("bench_endpoint", name="endpoints")


def export() -> None:
    start("export")


def import_draft() -> None:
    # `from` is a word of Python, and so no name of a configuration's field
    sys.argv[1:] = ["import_" + word if word.startswith("from=") else word for word in sys.argv[1:]]
    start("import_draft")
