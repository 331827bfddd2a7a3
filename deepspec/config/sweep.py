"""Whether the runs of a `--multirun` have folders of their own, known before the first of them runs."""

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

NAMED = re.compile(r"\$\{([\w.]+)\}")


def shared_folder(composed: DictConfig, arguments: Sequence[str]) -> str | None:
    """`out` as written, if every run of the sweep has the same; None where it differs, or cannot be known.

    arguments: the command line's. A recipe names its runs, so that with several recipes nothing is said here.
    """
    swept = _swept(arguments)
    written = str(OmegaConf.to_container(composed, resolve=False)["out"])  # type: ignore[index, call-overload]
    if not swept or "out" in swept or "recipe" in swept:
        return None
    named = set(NAMED.findall(written))
    if "name" not in swept:
        named.discard("name")
    differ = any(
        one == key or one.startswith(f"{key}.") or key.startswith(f"{one}.") for one in named for key in swept
    )
    return None if differ or "${hydra" in written else written


def _swept(arguments: Sequence[str]) -> set[str]:
    parser, found = OverridesParser.create(), set[str]()
    for argument in arguments:
        if "=" not in argument or argument.startswith("-"):
            continue
        try:
            override: Any = parser.parse_override(argument)
        except HydraException:
            continue
        if override.is_sweep_override():
            found.add(str(override.key_or_group))
    return found
