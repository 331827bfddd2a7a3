"""How a stage starts from a shell: Hydra composes the configuration, `entry` hands it on as a `Config`."""

import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from deepspec.artifacts import check_places, free_space, only_process_in
from deepspec.config.explain import explain, incomplete
from deepspec.config.keys import schema_keys
from deepspec.config.ranges import check
from deepspec.config.schema import Config
from deepspec.config.stages import STAGES
from deepspec.config.store import PRIMARY, register
from deepspec.config.sweep import shared_folder
from deepspec.errors import UserError

INTERRUPTED = 130  # what a shell reports for Ctrl-C
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def entry(stage: str, run: Callable[[Config], object], name: str | None = None) -> Callable[[], None]:
    """The main function of `python -m deepspec.<stage>`: composes the configuration, checks it, calls `run`.

    name: of the experiment where no recipe and nobody gives one.

    A `UserError`, a mistake in the configuration, a full disk or Ctrl-C end the process with a sentence on
    stderr and without a traceback (status 1; Ctrl-C: 130). Anything else is a defect and keeps its traceback.
    """

    def main() -> None:
        drafts = _drafts()
        keys = schema_keys(drafts)
        register(stage, drafts, name)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us as exceptions instead of Hydra's own printout
        taken: set[Path] = set()
        defects: list[Exception] = []

        def task(composed: DictConfig) -> None:
            # sentences are printed here, or Hydra adds "Error executing job" to them
            try:
                with_sentences(lambda: _run_alone(stage, run, _ready(composed, keys, taken)))
            except Exception as error:
                defects.append(error)
                raise

        def explained(error: Exception) -> str | None:
            return None if error in defects else explain(error, keys) or _about_folder(error)

        application = hydra.main(version_base="1.3", config_path=None, config_name=PRIMARY)(task)
        try:
            with_sentences(application, explained)
        except BrokenPipeError as error:
            if error in defects:
                raise
            _reader_left()

    return main


def start(stage: str, name: str | None = None) -> NoReturn:
    """Run `deepspec.<stage>` as a program and end the process.

    For the first lines of that module: its own imports take seconds, and a mistake in the configuration, or
    --help, should not wait for them. It is imported, by its name, when the configuration is known to be good.
    name: as of `entry`.
    """

    def run(config: Config) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"deepspec {stage}: {config.name} in {config.out}", flush=True)
        import_module(f"deepspec.{stage}").run(config)

    entry(stage, run, name)()
    raise SystemExit(0)


def with_sentences(
    call: Callable[[], object], explained: Callable[[Exception], str | None] = lambda error: None
) -> None:
    """Call; what a person can mend ends the process with one sentence on stderr instead of a traceback.

    explained: a sentence for further exceptions, or None for those that are defects.
    """
    try:
        call()
    except UserError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        print("\nStopped. The same command continues from what is finished.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        sentence = explained(error) or _about_disk(error)
        if sentence is None:
            raise
        _stop(sentence)


def command(stage: str) -> str:
    """The shell command that runs another stage with this process's overrides, for messages.

    Outside an entry point (a test, a notebook) it is the bare command.
    """
    words = [_python(), "-m", f"deepspec.{stage}"]
    if HydraConfig.initialized():
        settings = HydraConfig.get()
        for source in settings.runtime.config_sources:
            if source.provider == "command-line":
                words += ["--config-dir", source.path]
        words += list(settings.overrides.task)
    return shlex.join(words)


def _drafts() -> dict[str, type]:
    """Imported here, late: the schema's tests put a registry of their own in its place."""
    from deepspec.drafts.registry import option_classes

    return option_classes()


def _ready(composed: DictConfig, keys: dict[str, Any], taken: set[Path]) -> Config:
    """The composed configuration as checked dataclasses. `taken`: folders of earlier runs of this sweep."""
    try:
        wrong = incomplete(composed)
        if wrong:
            raise UserError(wrong)
        config = cast(Config, OmegaConf.to_object(composed))
    except OmegaConfBaseException as error:
        raise UserError(explain(error, keys) or str(error)) from error
    check(config)
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        out = Path(config.out).resolve()
        if out in taken or (not taken and shared_folder(composed, sys.argv[1:])):
            raise UserError(
                f"Two runs of this --multirun write into {config.out}. Put what differs into `out`, "
                "for example out='runs/${name}-${train.seed}'."
            )
        taken.add(out)
        print(f"== run {len(taken)}: {' '.join(HydraConfig.get().overrides.task)}", flush=True)
    return config


def _run_alone(stage: str, run: Callable[[Config], object], config: Config) -> None:
    check_places(Path(config.out))
    reads = stage in STAGES and STAGES[stage].reads and not config.auto_prepare
    with only_process_in(Path(config.out), reads):
        run(config)


def _python() -> str:
    """What the person types to start this interpreter: `python` where that is the same one."""
    on_path = shutil.which("python")
    if on_path and Path(on_path).parent.resolve() == Path(sys.executable).parent.resolve():
        return "python"
    path = Path(sys.executable)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _about_disk(error: Exception) -> str | None:
    if not isinstance(error, OSError):
        return None
    place = error.filename or "a file"
    if (
        error.errno in DISK_FULL and error.filename is None
    ):  # a write does not say where, and there are several disks
        return (
            "The disk of the run's folder (out=...) is full. Make room there and give the same command again."
        )
    if error.errno in DISK_FULL:
        there = next((one for one in Path(place).resolve().parents if one.is_dir()), Path.cwd())
        return (
            f"The disk is full while writing {place} ({free_space(there)}). Make room and give the same command "
            "again."
        )
    if error.errno in FORBIDDEN:
        return f"{place} cannot be written ({error.strerror}). Choose another folder with out=..."
    return None


def _about_folder(error: Exception) -> str | None:
    """Before a stage starts the only thing written is the run's folder."""
    if not isinstance(error, OSError) or error.filename is None:
        return None
    return f"The run's folder {error.filename} cannot be made ({error.strerror}). Choose another with out=..."


def _reader_left() -> NoReturn:
    """Whoever read --help has seen enough (`| head`); Python would complain once more when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def _stop(sentence: str) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(1) from None
