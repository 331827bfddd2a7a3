"""The rooms of `deepspec/` import one way only: along the flow from prompts to reports, never back."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each room and the rooms to its left, whose abilities it may use.
SHARED = {"errors", "artifacts", "randomness"}
LEFT_OF: dict[str, set[str]] = {
    "errors": set(),
    "artifacts": {"errors"},
    "randomness": set(),
    "data": set(),
    "target": {"data"},
    "drafts": {"data", "target"},
    "training": {"data", "target", "drafts"},
    "decoding": {"data", "target", "drafts"},
    "evaluation": {"data", "target", "drafts", "training", "decoding"},
    "serving": {"data", "target", "drafts", "decoding"},
    "simulation": {"data", "target", "drafts", "training", "decoding", "evaluation"},
    "planning": {"data", "target", "drafts", "training", "decoding", "evaluation", "simulation"},
    "endpoints": {"data", "evaluation"},
    "reporting": {
        "data",
        "target",
        "drafts",
        "training",
        "decoding",
        "evaluation",
        "simulation",
        "endpoints",
    },
    "interop": {"data", "target", "drafts", "training", "decoding", "evaluation", "reporting"},
    "config": {"drafts"},
}
# What a room may use of another room is only this part of it.
ONLY = {
    ("config", "drafts"): "deepspec.drafts.registry",
    ("decoding", "drafts"): "deepspec.drafts.contract",
}
SCHEMA = "deepspec.config.schema"
# Packages that are no room's business: a draft is a model, data are files, neither needs a launcher.
FOREIGN = {
    "data": {"hydra", "omegaconf", "accelerate"},
    "target": {"hydra", "omegaconf", "accelerate"},
    "drafts": {"hydra", "omegaconf", "accelerate"},
    "decoding": {"hydra", "omegaconf", "accelerate"},
    "serving": {"hydra", "omegaconf", "accelerate"},
    "endpoints": {"hydra", "omegaconf", "accelerate", "torch", "transformers"},
    "reporting": {"hydra", "omegaconf", "accelerate", "torch", "transformers"},
}
# Spreading one model over devices is no launching, though one package does both.
EXCEPT = {("deepspec/target/placement.py", "accelerate")}


def imports(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, inside functions too; `from a import b` is `a.b`."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += [node.module] if node.module else []
            for name in node.names:
                yield node.lineno, ".".join([*base, name.name])


def verdict(room: str | None, name: str) -> str | None:
    """Why a file of `room` (None: an entry point at the top) may not import `name`, or None if it may."""
    if room is None:
        return None
    parts = name.split(".")
    if parts[0] != "deepspec":
        return f"{room} has no business with {parts[0]}" if parts[0] in FOREIGN.get(room, set()) else None
    other = parts[1] if len(parts) > 1 else ""
    if other in ("", "__version__", room) or (other in SHARED and room not in SHARED):
        return None
    if other == "config":
        ours = name == SCHEMA or name.startswith(SCHEMA + ".")
        return None if ours and room not in SHARED else f"{room} may import only {SCHEMA} of config"
    if other not in LEFT_OF.get(room, set()):
        return f"{other} is not to the left of {room}"
    allowed = ONLY.get((room, other))
    if allowed and not (name == allowed or name.startswith(allowed + ".")):
        return f"{room} may import only {allowed} of {other}"
    return None


def violations(root: Path) -> list[str]:
    """Every import under `root`/deepspec that points the wrong way, as `file:line: reason`."""
    found = []
    for path in sorted((root / "deepspec").rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)  # a checkout may be called deepspec too
        room = parts[1] if len(parts) > 2 else None
        if parts[-1] == "__init__":
            parts.pop()
        if len(parts) == 2 and parts[1] in SHARED:
            room = parts[1]
        for line, name in imports(path, ".".join(parts)):
            reason = verdict(room, name)
            if reason and (path.relative_to(root).as_posix(), name.split(".")[0]) not in EXCEPT:
                found.append(f"{path.relative_to(root)}:{line}: imports {name}: {reason}")
    return found


def test_no_import_points_back() -> None:
    assert violations(ROOT) == []


def test_every_room_is_known() -> None:
    rooms = {path.parent.name for path in (ROOT / "deepspec").glob("*/*.py")}
    assert rooms and rooms <= set(LEFT_OF)


def a_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "deepspec" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("data/pack.py", "from deepspec.target import Target\n", "target is not to the left of data"),
        ("data/deep/er.py", "import deepspec.drafts.eagle3\n", "drafts is not to the left of data"),
        (
            "drafts/a.py",
            "def f():\n    from ..decoding import Engine\n",
            "decoding is not to the left of drafts",
        ),
        ("drafts/b.py", "from .. import training\n", "training is not to the left of drafts"),
        ("drafts/c.py", "import hydra.utils\n", "drafts has no business with hydra"),
        ("drafts/__init__.py", "from ..target import Target\nfrom ..decoding import x\n", "decoding is not"),
        (
            "training/loop.py",
            "from deepspec.decoding import Engine\n",
            "decoding is not to the left of training",
        ),
        ("decoding/e.py", "from deepspec.training import loop\n", "training is not to the left of decoding"),
        ("decoding/f.py", "from deepspec.drafts.eagle3 import Eagle3\n", "only deepspec.drafts.contract"),
        ("evaluation/g.py", "from deepspec.reporting import page\n", "reporting is not to the left"),
        ("target/h.py", "from deepspec.config.app import command\n", "only deepspec.config.schema"),
        ("target/i.py", "from deepspec import prepare\n", "prepare is not to the left of target"),
        ("errors.py", "from deepspec.artifacts import cache_dir\n", "artifacts is not to the left of errors"),
        ("unknown/j.py", "from deepspec.data import pack\n", "data is not to the left of unknown"),
    ],
)
def test_an_arrow_that_points_back_is_caught(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (found,) = violations(a_tree(tmp_path, {name: text}))
    assert found.startswith(f"deepspec/{name}:") and reason in found


def test_the_ways_forward_are_free(tmp_path: Path) -> None:
    tree = {
        "train.py": "from deepspec.training import loop\nfrom deepspec.config.app import entry\n",
        "artifacts.py": "from deepspec import __version__\nfrom deepspec.errors import UserError\n",
        "data/a.py": "from deepspec.artifacts import versions\nfrom deepspec.config.schema import Config\n",
        "drafts/b.py": "from deepspec.target import Target\nfrom .contract import Drafter\nimport torch\n",
        "decoding/c.py": "from deepspec.drafts.contract import Proposal\nfrom . import rules\n",
        "evaluation/d.py": "from deepspec.decoding import Engine\nfrom deepspec.training import tau\n",
        "reporting/e.py": "from deepspec.evaluation.schema import read\nimport jinja2\n",
        "config/f.py": "from deepspec.drafts.registry import option_classes\nimport hydra\n",
    }
    assert violations(a_tree(tmp_path, tree)) == []
