"""What is shipped: sdist and wheel built, and the wheel's commands run in an environment without this checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path

import pytest

from tests.config.processes import ROOT

pytestmark = pytest.mark.slow
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def run(*command: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    bare = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**bare, **more},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, made from the sdist alone, in an environment of its own; what it needs is seen behind it."""
    folder = tmp_path_factory.mktemp("shipped")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    (sdist,) = folder.glob("deepspec-*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("deepspec-*.whl")
    made = run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    assert made.returncode == 0, made.stderr
    python = folder / "venv" / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    site = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    ).stdout.strip()
    Path(site, "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = run(python, "-c", "import deepspec; print(deepspec.__file__)", cwd=folder).stdout.strip()
    assert Path(found).is_relative_to(folder)
    return python.parent


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_command_explains_itself(name: str, bin_folder: Path, tmp_path: Path) -> None:
    done = run(bin_folder / name, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if SCRIPTS[name].startswith("deepspec.commands:"):
        assert "+recipe=NAME" in done.stdout and "quickstart" in done.stdout


def test_its_recipes_and_groups_are_inside(bin_folder: Path, tmp_path: Path) -> None:
    done = run(bin_folder / "deepspec-train", "+recipe=quickstart", "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "builtin:smollm2_135m" in done.stdout


def test_a_shell_completes(bin_folder: Path, tmp_path: Path) -> None:
    line = "deepspec-train +recipe=quick"
    said = {"COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = run(bin_folder / "deepspec-train", "-sc", "query=bash", cwd=tmp_path, **said)
    assert "+recipe=quickstart" in done.stdout.split(), done.stderr
    taught = run(bin_folder / "deepspec-train", "-sc", "install=bash", cwd=tmp_path)
    assert taught.returncode == 0 and "complete" in taught.stdout
