"""Where Hydra finds `conf/` and `recipes/`: beside the package in a checkout, inside it in a wheel.

A plain search path would make a folder `recipes/` a group of that name; the source below serves the files of
such a folder as the group `recipe` instead, so that `+recipe=cluster/llama` is `recipes/cluster/llama.yaml`.
"""

from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin

PACKAGE = Path(__file__).resolve().parent.parent
GROUP = "recipe"


def shipped(folder: str) -> Path:
    """The project's own `conf` or `recipes`, wherever this package was installed from."""
    inside = PACKAGE / folder
    return inside if inside.is_dir() else PACKAGE.parent / folder


def recipe_folders() -> list[Path]:
    """Folders of recipes, the person's own (`recipes/` where they stand) before the project's."""
    found = [path.resolve() for path in (Path("recipes"), shipped("recipes")) if path.is_dir()]
    return list(dict.fromkeys(found))


def recipe_names() -> list[str]:
    """Every name that `+recipe=` takes, sorted."""
    return sorted(
        {
            path.relative_to(folder).with_suffix("").as_posix()
            for folder in recipe_folders()
            for path in folder.rglob("*.yaml")
        }
    )


class RecipeSource(FileConfigSource):
    """A folder of YAML files, seen by Hydra as the group `recipe`, each at the configuration's root."""

    @staticmethod
    def scheme() -> str:
        return "deepspec-recipes"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(self._below(config_path) or "")
        result.header["package"] = result.header["package"] or "_global_"
        return result

    def is_group(self, config_path: str) -> bool:
        below = self._below(config_path)
        return config_path == "" or (below is not None and super().is_group(below))

    def is_config(self, config_path: str) -> bool:
        below = self._below(config_path)
        return below is not None and super().is_config(below)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter is ObjectType.CONFIG else [GROUP]
        folder = Path(self.path, self._below(config_path) or "")
        found: set[str] = set()
        if results_filter is not ObjectType.GROUP:
            found |= {path.stem for path in folder.glob("*.yaml")}
        if results_filter is not ObjectType.CONFIG:
            found |= {path.name for path in folder.iterdir() if path.is_dir()}
        return sorted(found)

    @staticmethod
    def _below(config_path: str) -> str | None:
        """Where in this folder the config that Hydra calls `recipe/...` lies; None for another group's."""
        group, _, below = config_path.partition("/")
        return below if group == GROUP else None


class DeepspecSearchPath(SearchPathPlugin):
    """Adds the recipe folders and the shipped config groups to every Hydra application of this process."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in recipe_folders():
            search_path.append("deepspec", f"{RecipeSource.scheme()}://{folder}")
        search_path.append("deepspec", f"file://{shipped('conf')}")


def register() -> None:
    """Make Hydra know the two classes above; must run before `hydra.main` composes anything."""
    Plugins.instance().register(RecipeSource)
    Plugins.instance().register(DeepspecSearchPath)
