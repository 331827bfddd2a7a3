"""Recipes and groups are found from a checkout and from an installed wheel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deepspec.config.search import recipe_names
from tests.config.processes import HERE, ROOT, environment


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel built from this checkout, and nothing else, installed into it."""
    pytest.importorskip(
        "hatchling", reason="building the wheel needs hatchling, which scripts/setup.sh installs"
    )
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, ROOT], check=True, timeout=300
    )
    (wheel,) = folder.glob("deepspec-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", folder / "site", wheel], check=True, timeout=300)
    return folder / "site"


def test_recipes_and_groups_of_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("defaults: [quickstart]\nname: mine\n")
    stage = tmp_path / "fake_stage.py"
    stage.write_text((HERE / "fake_stage.py").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "fake_stage", "+recipe=mine", "target=smollm2_135m_hub"],
        cwd=tmp_path,
        env=environment(installed),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["name"], seen["target"]) == ("mine", "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_the_wheel_has_recipes_configs_and_licence(installed: Path) -> None:
    package = installed / "deepspec"
    for folder in ("recipes", "conf/target", "conf/accelerate"):
        ours = {path.name for path in (ROOT / folder).glob("*.yaml")}
        assert ours and ours == {path.name for path in (package / folder).glob("*.yaml")}
    (licence,) = installed.glob("deepspec-*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()


def test_names_join_own_and_shipped_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = set(recipe_names())
    assert {"quickstart", "smollm2_eagle3", "example_own_prompts"} <= shipped
    (tmp_path / "recipes" / "cluster").mkdir(parents=True)
    (tmp_path / "recipes" / "cluster" / "mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert set(recipe_names()) == shipped | {"cluster/mine"}
