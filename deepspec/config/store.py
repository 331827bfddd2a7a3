"""Registers the typed schema, the drafts' options and this project's Hydra settings."""

import os
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from deepspec.config import search
from deepspec.config.help import help_text
from deepspec.config.ranges import named
from deepspec.config.schema import Config

PRIMARY = "deepspec"  # the name of the primary config
SCHEMA = "deepspec_schema"
ABSOLUTE = "deepspec.absolute"  # resolver: a path made absolute, so that a sweep's folder cannot prefix it
NAMED = "deepspec.named"  # resolver: `out`, refused where it names no folder, before Hydra makes one below it

HELP = "deepspec.help"  # resolver: the text of --help, made only when it is asked for


def register(stage: str, drafts: dict[str, type], name: str | None = None) -> None:
    """Fill Hydra's ConfigStore and search path for one stage. `drafts`: name → option class. name: the stage's
    own for an experiment that has none."""
    search.register()
    OmegaConf.register_new_resolver(ABSOLUTE, lambda out: os.path.abspath(named(out)), replace=True)
    OmegaConf.register_new_resolver(NAMED, named, replace=True)
    OmegaConf.register_new_resolver(HELP, lambda *, _root_: _help(stage, drafts, _root_), replace=True)
    store = ConfigStore.instance()
    store.store(name=SCHEMA, node=Config)
    for draft, options in drafts.items():
        store.store(group="draft", name=draft, node=options)
    store.store(name=PRIMARY, node=_primary(stage) | ({} if name is None else {"name": name}))


def _primary(stage: str) -> dict[str, Any]:
    return {
        "defaults": [
            SCHEMA,
            {"target": "smollm2_135m"},
            {"draft": "eagle3"},
            {"hardware": "here"},
            {"override hydra/hydra_logging": "none"},
            {"override hydra/job_logging": "none"},
            "_self_",
        ],
        "hydra": {
            "job": {"name": stage},
            "run": {"dir": "${" + NAMED + ":${out}}/hydra"},
            "sweep": {"dir": "runs/multirun", "subdir": "${" + ABSOLUTE + ":${out}}/hydra"},
            # one rank keeps the record; the others would write the same files at the same time
            "output_subdir": "${hydra.job.name}" if os.environ.get("RANK", "0") == "0" else None,
            "job_logging": _logging(),
            "help": {"app_name": f"deepspec.{stage}", "template": "${" + HELP + ":}"},
        },
    }


def _logging() -> dict[str, Any]:
    """Messages of this project to stdout, other libraries' warnings too; no log files."""
    return {
        "version": 1,
        "formatters": {"plain": {"format": "%(message)s"}},
        "handlers": {
            "console": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stdout"}
        },
        "root": {"level": "WARNING", "handlers": ["console"]},
        # the hub's library prints its own warnings (of every retry) and would hand them on as well
        "loggers": {"deepspec": {"level": "INFO"}, "huggingface_hub": {"propagate": False}},
        "disable_existing_loggers": False,
    }


def _help(stage: str, drafts: dict[str, type], config: DictConfig) -> str:
    return help_text(stage, drafts, config).replace("$", "$$")  # Hydra takes it for a template
