"""Turns what Hydra and OmegaConf say about a configuration into one or two sentences for the person."""

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from deepspec.config.keys import nearest, schema_keys, takes
from deepspec.config.search import recipe_names
from deepspec.errors import UserError

NAMED_BY_HYDRA = re.compile(r"Could not (?:override|append to config)[^']*'([^']+)'")
IN_FILE = re.compile(r"In '([^']+)': ")
AMBIGUOUS = re.compile(r"Ambiguous value for argument '(.+)'")
UNKNOWN_REFERENCE = re.compile(r"Interpolation key '([^']+)' not found")
NOT_IN_ENVIRONMENT = re.compile(r"Environment variable '([^']+)' not found")
MISSING = re.compile(r"[Mm]issing mandatory value: (\S+)")


def explain(error: BaseException, keys: dict[str, Any]) -> str | None:
    """One or two sentences on a configuration error, or None if `error` is not one.

    keys: every valid dotted name and its type (`schema_keys`), for the nearest valid ones.
    """
    if str(error).startswith("Only one of --run"):  # Hydra's own, a bare ValueError
        return "--multirun, --cfg and --info do not go together: give one of them."
    chain = list(_chain(error))
    if not any(isinstance(one, HydraException | OmegaConfBaseException | yaml.YAMLError) for one in chain):
        return None
    for one in chain:
        if isinstance(one, UserError):
            return str(one)
    for one in chain:
        said = _explain_one(one, chain, keys)
        if said:
            return said
    return " ".join(str(error).split()) or type(error).__name__


def incomplete(config: DictConfig) -> str | None:
    """A sentence on the first key that is not in the schema (`+key=` adds any) or has no value, or None."""
    draft = OmegaConf.get_type(config, "draft")
    keys = schema_keys({"chosen": draft} if is_dataclass(draft) else {})
    for key in _leaves(OmegaConf.to_container(config, resolve=False), ""):
        if key not in keys and not str(keys.get(key.rpartition(".")[0], "")).startswith("dict["):
            return unknown_key(key, "", keys)
    names = sorted(OmegaConf.missing_keys(config))
    return _not_set(names[0]) if names else None


def _leaves(node: Any, prefix: str) -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, innermost last."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _explain_one(one: BaseException, chain: list[BaseException], keys: dict[str, Any]) -> str | None:
    text = str(one)
    where = _where(chain)
    found = MISSING.search(text)
    if found:
        return _not_set(found.group(1))
    if isinstance(one, yaml.MarkedYAMLError) and one.problem_mark is not None:
        mark = one.problem_mark
        return f"{mark.name}, line {mark.line + 1}, is not valid YAML: {one.problem}."
    if isinstance(one, MissingConfigException):
        return _no_such_option(one)
    if isinstance(one, OverrideParseException):
        return (
            f"`{one.override}` cannot be read. Write key=value, "
            "and put a value with commas, brackets, = or quotes into quotes: key='a, b'."
        )
    if "'recipe'" in text and "+recipe=" in text:
        return "Write +recipe=NAME, with a plus sign. " + _recipes()
    several = AMBIGUOUS.search(text)
    if several:
        return (
            f"`{several.group(1)}` gives several values. Add --multirun for one run each, "
            "or put a list in brackets: key=[a,b]."
        )
    if text.startswith("Error merging override ~"):
        return f"`{text.rsplit(' ', 1)[-1]}` would remove a setting; give it another value instead."
    variable = NOT_IN_ENVIRONMENT.search(text)
    if variable:
        name = variable.group(1)
        return f"`${{oc.env:{name}}}`{where} reads the environment variable {name}, which is not set: export {name}=..."
    unknown = UNKNOWN_REFERENCE.search(text)
    if unknown:
        hint = _did_you_mean(unknown.group(1), keys)
        return f"`${{{unknown.group(1)}}}`{where} refers to a setting that does not exist.{hint}"
    if isinstance(one, OmegaConfBaseException) and one.full_key:
        return _about_key(_whole_key(one.full_key, chain), one, where, keys)
    return None


def unknown_key(key: str, where: str, keys: dict[str, Any]) -> str:
    """A sentence on a key that does not exist, with the nearest that do. where: ` in <file>` or nothing."""
    section = key.rpartition(".")[0]
    hint = _did_you_mean(key, keys)
    if not hint:
        inside = [name for name in keys if section and name.rpartition(".")[0] == section]
        hint = f" Those of `{section}` are {', '.join(inside)}." if inside else " --help lists all settings."
    return f"`{key}`{where} is not a setting.{hint}"


def _did_you_mean(key: str, keys: dict[str, Any]) -> str:
    close = nearest(key, list(keys))
    return f" Did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""


def _about_key(key: str, one: OmegaConfBaseException, where: str, keys: dict[str, Any]) -> str | None:
    name = key.partition("[")[0]
    if name in keys and isinstance(one, ConfigKeyError | ConfigAttributeError):
        return f"`{key}`{where} is a setting of another draft than the one chosen. {_other_draft(where)}"
    if name in keys:
        given = "null" if one.value is None else repr(str(one.value))
        return f"`{key}`{where} takes {takes(keys[name])}, not {given}."
    if key.startswith("hydra."):
        return None
    if str(keys.get(name.rpartition(".")[0], "")).startswith("dict["):
        return f"`{key}` is not set yet; write a plus sign to add it: +{key}=..."
    return unknown_key(key, where, keys)


def _other_draft(where: str) -> str:
    if where:
        return "Take a recipe of the draft you want, or copy this one and change its `draft:`."
    return "Leave it out, or choose the draft that has it with draft=..."


def _whole_key(key: str, chain: list[BaseException]) -> str:
    """OmegaConf names a key as seen from the node it met it in; Hydra's own message has the whole of it."""
    for one in chain:
        found = NAMED_BY_HYDRA.search(str(one))
        if found and found.group(1).endswith(key):
            return found.group(1)
    return key


def _where(chain: list[BaseException]) -> str:
    """` in recipes/x.yaml` if the error came from a file, else nothing."""
    for one in chain:
        found = IN_FILE.search(str(one))
        if found and found.group(1) != "deepspec":
            group, _, name = found.group(1).partition("/")
            folder = "recipes" if group == "recipe" else f"conf/{group}"
            return f" in {folder}/{name}.yaml"
    return ""


def _not_set(key: str) -> str:
    if key == "name":
        return f"No recipe is chosen and the run has no `name`. {_recipes()} Or set name=..."
    return f"`{key}` is not set; it has no default. Give it: {key}=..."


def _recipes() -> str:
    names = recipe_names()
    if not names:
        return "No recipes were found: neither a folder recipes/ here nor the project's own."
    return f"Recipes: {', '.join(f'+recipe={name}' for name in names)}."


def _no_such_option(one: MissingConfigException) -> str:
    group, _, name = (one.missing_cfg_file or "").partition("/")
    if group == "recipe":
        close = nearest(name.removesuffix(".yaml"), recipe_names())
        hint = f" Did you mean +recipe={close[0]}?" if close else ""
        return f"There is no recipe `{name}`.{hint} {_recipes()}"
    options = sorted(one.options or [])
    if not options:
        return " ".join(str(one).split())
    return f"There is no `{group}={name}`. `{group}` is one of {', '.join(options)}."
