"""What the shipped launch files and cluster recipes ask for, without a cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from deepspec.config.ranges import check
from deepspec.config.schema import Config, Parallel
from deepspec.config.store import PRIMARY, register
from deepspec.drafts.registry import option_classes
from deepspec.training.launch import with_accumulation
from deepspec.training.parallel import chosen

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes" / "cluster").glob("*.yaml"))
FILES = {
    "ddp_gpu": Parallel.ddp,
    "ddp_nodes_gpu": Parallel.ddp,
    "zero2_gpu": Parallel.deepspeed_zero2,
    "zero3_gpu": Parallel.deepspeed_zero3,
    "zero3_nodes_gpu": Parallel.deepspeed_zero3,
    "fsdp2_gpu": Parallel.fsdp2,
}


@pytest.mark.parametrize(("name", "kind"), FILES.items())
def test_a_launch_file_asks_for_its_kind(name: str, kind: Parallel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that accelerate launch would give its processes, read as a run reads it."""
    for variable in ("WORLD_SIZE", "ACCELERATE_USE_CPU"):
        monkeypatch.delenv(variable, raising=False)
    file = ROOT / "conf" / "accelerate" / f"{name}.yaml"
    args = launch_command_parser().parse_args(["--config_file", str(file), "-m", "deepspec.train"])
    args, _, _ = _validate_launch_command(args)
    if kind in (Parallel.deepspeed_zero2, Parallel.deepspeed_zero3):
        args.deepspeed_fields_from_accelerate_config = ""  # filled in by accelerate launch itself
        _, environment = prepare_deepspeed_cmd_env(args)
    else:
        environment = prepare_multi_gpu_env(args)
    environment["WORLD_SIZE"] = str(args.num_processes)  # torch's launcher sets it in each process
    assert chosen(Parallel.auto, environment) is kind
    assert (
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environment or args.gradient_accumulation_steps == 1
    )


@pytest.fixture
def hydra() -> Iterator[None]:
    register("train", option_classes())
    GlobalHydra.instance().clear()
    with initialize(version_base="1.3", config_path=None):
        yield


@pytest.mark.parametrize("name", RECIPES)
def test_a_cluster_recipe_composes(name: str, hydra: None, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = compose(PRIMARY, overrides=[f"+recipe=cluster/{name}"])
    config = cast(Config, OmegaConf.to_object(cast(Any, composed)))
    check(config)
    assert config.name == name
    eight = with_accumulation(config.train, 8)
    assert 8 * eight.batch_size * eight.accumulation == config.train.global_batch == 512


def test_there_are_cluster_recipes() -> None:
    assert RECIPES
