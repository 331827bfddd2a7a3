"""What a person sees who starts a stage from a shell."""

import errno
import fcntl
import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from deepspec.artifacts import only_process_in
from deepspec.config.app import command, with_sentences
from deepspec.errors import UserError
from tests.config import fake_stage

Stage = Callable[..., CompletedProcess[str]]


def seen(done: CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def sentence(done: CompletedProcess[str]) -> str:
    """The whole of stderr, which must be one line that starts with `error: `."""
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0].removeprefix("error: ")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Stage:
    """The same stage started in this process, which is faster; gives what a process would have given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setitem(sys.modules, "deepspec.drafts.registry", fake_stage.registry())

    def start(*arguments: str) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["fake_stage", *arguments])
        status: Any = 0
        try:
            fake_stage.main()
        except SystemExit as stopped:
            status = stopped.code
        HydraConfig.instance().cfg = None  # as in a process of its own, whatever ended this one
        out, err = capfd.readouterr()
        return CompletedProcess(arguments, status, out, err)

    return start


def test_recipe_and_overrides_arrive_as_typed_dataclasses(stage: Stage, tmp_path: Path) -> None:
    done = stage("+recipe=quickstart", "train.epochs=2", "data.system=be brief", "+train.loss.soft_ce=0.5")
    (config,) = seen(done)
    assert config["name"] == "quickstart"
    assert config["out"] == "runs/quickstart"
    assert config["target"] == "builtin:smollm2_135m"
    assert config["draft"][0] == "Eagle3Options"
    assert config["epochs"] == 2.0
    assert config["answers"] == "mixed"
    assert config["system"] == "be brief"
    assert config["loss"] == {"soft_ce": 0.5}
    assert config["cwd"] == str(tmp_path)
    assert done.stderr == ""


def test_nothing_is_written_outside_the_run(stage: Stage, tmp_path: Path) -> None:
    seen(stage("+recipe=quickstart", "out=elsewhere/run"))
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    settings = [f"elsewhere/run/hydra/fake/{name}.yaml" for name in ("config", "hydra", "overrides")]
    assert written == ["elsewhere/run/.lock", *settings]


@pytest.mark.parametrize("out", ["out=", "out=''", "out='  '"])
def test_an_empty_out_is_refused_before_anything_is_made(here: Stage, tmp_path: Path, out: str) -> None:
    assert "`out` is empty" in sentence(here("name=x", out))
    assert "`out` is empty" in here("--multirun", "name=x", "train.seed=1,2", out).stderr
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} <= {"multirun.yaml"}


def test_two_processes_do_not_work_in_one_folder(here: Stage, tmp_path: Path) -> None:
    lock = tmp_path / "runs" / "x" / ".lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as held:  # flock keeps out whoever opened the file separately, this process too
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "Another process works in runs/x" in sentence(here("name=x"))
        seen(here("name=y"))
    seen(here("name=x"))
    seen(here("name=x"))


def test_readers_share_a_folder_and_keep_writers_out(tmp_path: Path) -> None:
    with only_process_in(tmp_path, reading=True):
        with only_process_in(tmp_path, reading=True):
            pass
        with pytest.raises(UserError, match="Another process works"), only_process_in(tmp_path):
            pass
    with (
        only_process_in(tmp_path),
        pytest.raises(UserError, match="Another process works"),
        only_process_in(tmp_path, reading=True),
    ):
        pass


def test_only_the_first_rank_locks(here: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "runs" / "x" / ".lock"
    lock.parent.mkdir(parents=True)
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setenv("RANK", "1")
        seen(here("name=x"))
        monkeypatch.setenv("RANK", "0")
        assert "Another process" in sentence(here("name=x"))


def test_command_names_the_same_overrides_and_gives_the_same_config(stage: Stage, tmp_path: Path) -> None:
    given = ("+recipe=quickstart", "draft.ttt_steps=3", 'data.system="it\'s, a test"')
    first = seen(stage(*given))[0]
    words = shlex.split(first["command"])
    assert words[1:3] == ["-m", "deepspec.prepare"]
    assert words[3:] == list(given)
    again = seen(stage(*words[3:]))[0]
    assert again == first


def test_command_without_a_running_application_is_the_bare_command() -> None:
    assert command("train").endswith(" -m deepspec.train")


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.epoch=2", ["`train.epoch`", "`train.epochs`"]),
        ("+train.epoch=2", ["`train.epoch`", "`train.epochs`"]),
        ("trian.epochs=2", ["`trian`", "`train`"]),
        ("epochs=2", ["`epochs`", "`train.epochs`"]),
        ("draft.ttt_step=2", ["`draft.ttt_step`", "`draft.ttt_steps`"]),
        ("+wholly_unknown=2", ["`wholly_unknown`", "--help"]),
        ("train.epochs=abc", ["`train.epochs`", "a number", "'abc'"]),
        ("draft.ttt_steps=1.5", ["`draft.ttt_steps`", "a whole number", "'1.5'"]),
        ("data.answers=own", ["`data.answers`", "regenerated, given, mixed", "'own'"]),
        ("data.batch_size=null", ["`data.batch_size`", "a whole number", "not null"]),
        ("evaluate.sweep=[2,x]", ["`evaluate.sweep[1]`", "a whole number", "'x'"]),
        ("decode.k=0", ["`decode.k`", "1 or more", "not 0"]),
        ("evaluate.sweep=[3,0]", ["`evaluate.sweep`", "1 or more", "not 0"]),
        ("decode.temperature=nan", ["`decode.temperature`", "0 or more"]),
        ("draft.ttt_steps=0", ["`draft.ttt_steps`", "1 or more", "not 0"]),
        ("draft.layers=0", ["`draft.layers`", "1 or more", "not 0"]),
        ("draft.intermediate_size=-4", ["`draft.intermediate_size`", "1 or more", "not -4"]),
        ("draft.step_decay=-1", ["`draft.step_decay`", "more than 0", "not -1"]),
        ("draft.capture_layers=[]", ["`draft.capture_layers`", "at least one", "not []"]),
        ("draft.capture_layers=[2,0]", ["`draft.capture_layers`", "ascending", "not [2, 0]"]),
        ("draft.capture_layers=[1,1]", ["`draft.capture_layers`", "none twice"]),
        ("draft.capture_layers=[-1,2]", ["`draft.capture_layers`", "0 or more", "not -1"]),
        ("train.keep_features_gib=-1", ["`train.keep_features_gib`", "0 or more", "not -1"]),
        ("data.max_length=8", ["`data.max_length`", "16 or more"]),
        ("data.max_new_tokens=1", ["`data.max_new_tokens`", "2 or more"]),
        ("data.batch_size=0", ["`data.batch_size`", "1 or more"]),
        ("data.temperature=-1", ["`data.temperature`", "0 or more"]),
        ("decode.max_new_tokens=1", ["`decode.max_new_tokens`", "2 or more"]),
        ("decode.max_batch_size=4", ["`decode.max_batch_size`", "not a setting"]),
        ("target=smolm", ["`target=smolm`", "smollm2_135m", "hf"]),
        ("draft=eagle9", ["`draft=eagle9`", "eagle3"]),
        ("target=hf", ["`target.path`"]),
        ("train.loss.kl=1.0", ["+train.loss.kl="]),
        ("train.seed=1,2", ["train.seed=1,2", "--multirun"]),
        ("out=${nam}", ["`${nam}`", "`name`"]),
        ("out=${oc.env:NOT_SET_HERE}", ["`${oc.env:NOT_SET_HERE}`", "export NOT_SET_HERE="]),
        ("~train.epochs", ["~train.epochs"]),
        ("epochs", ["`epochs`", "key=value"]),
        ("out=a=b", ["`out=a=b`", "= or quotes into quotes"]),
        ("out=taken", ["taken", "out="]),
    ],
)
def test_a_bad_override_is_one_sentence_naming_it(
    here: Stage, tmp_path: Path, override: str, told: list[str]
) -> None:
    (tmp_path / "taken").write_text("a file where a folder should go")
    said = sentence(here("name=x", override))
    for part in told:
        assert part in said


def test_greedy_acceptance_of_sampled_text_is_refused(here: Stage) -> None:
    said = sentence(here("name=x", "decode.rule=greedy", "decode.temperature=0.5"))
    assert "decode.rule=greedy" in said and "decode.rule=auto" in said
    seen(here("name=x", "decode.rule=greedy"))
    seen(here("name=x", "decode.rule=token", "decode.temperature=0.5"))


def test_least_values_pass(here: Stage) -> None:
    least = ("data.held_out_prompts=0", "data.regenerated_prompts=0", "draft.capture_layers=[0,2]")
    seen(here("name=x", "train.keep_features_gib=0", "evaluate.sweep_prompts=0", *least))


def test_a_key_of_another_draft(here: Stage) -> None:
    said = sentence(here("name=x", "draft=other", "draft.ttt_steps=2"))
    assert said.startswith(
        "`draft.ttt_steps` is a setting of another draft than the one chosen. Leave it out"
    )
    assert "`draft.ttt_steps`" in sentence(here("name=x", "draft=other", "+draft.ttt_steps=2"))


def test_another_draft_for_a_recipe_with_options_of_its_own_is_told_what_to_do(here: Stage) -> None:
    said = sentence(here("+recipe=quickstart", "draft=other"))
    assert "recipes/quickstart.yaml" in said and "Take a recipe of the draft you want" in said


def test_mistakes_end_a_real_process_the_same_way(stage: Stage) -> None:
    assert "`train.epochs`" in sentence(stage("name=x", "train.epoch=2"))
    assert "`decode.k`" in sentence(stage("name=x", "decode.k=0"))


def test_unknown_recipe_lists_the_known_and_the_nearest(here: Stage) -> None:
    said = sentence(here("+recipe=quikstart"))
    assert (
        "`quikstart`" in said
        and "Did you mean +recipe=quickstart?" in said
        and "+recipe=smollm2_eagle3" in said
    )


def test_neither_recipe_nor_name(here: Stage) -> None:
    said = sentence(here())
    assert "`name`" in said and "+recipe=quickstart" in said


def test_flags_that_do_not_go_together(here: Stage) -> None:
    assert "--multirun, --cfg" in sentence(here("--multirun", "+recipe=quickstart", "--cfg", "job"))


def test_recipe_without_the_plus(here: Stage) -> None:
    assert "+recipe=NAME" in sentence(here("recipe=quickstart"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: x\ntrain:\n  epoch: 2\n", ["`train.epoch` in recipes/mine.yaml", "`train.epochs`"]),
        ("name: x\ntrain:\n  epochs: many\n", ["`train.epochs` in recipes/mine.yaml", "a number", "'many'"]),
        ("name: x\ntrain: {\n", ["mine.yaml", "line 3", "not valid YAML"]),
        ("defaults: [override /target: nope]\nname: x\n", ["`target=nope`", "smollm2_135m"]),
    ],
)
def test_a_bad_recipe_is_named(here: Stage, tmp_path: Path, text: str, told: list[str]) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text(text)
    said = sentence(here("+recipe=mine"))
    for part in told:
        assert part in said


def test_own_recipes_nest_and_win_over_the_projects(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "recipes" / "cluster").mkdir(parents=True)
    (tmp_path / "recipes" / "quickstart.yaml").write_text("name: mine\n")
    nested = ("# @package _global_", "defaults: [/recipe/quickstart, override /draft: other]", "name: deep")
    (tmp_path / "recipes" / "cluster" / "deep.yaml").write_text("\n".join(nested))
    assert seen(stage("+recipe=quickstart"))[0]["name"] == "mine"
    deep = seen(stage("+recipe=cluster/deep"))[0]
    assert (deep["name"], deep["draft"][0]) == ("deep", "OtherOptions")


def test_user_error_is_printed_without_traceback(here: Stage) -> None:
    assert sentence(here("name=mistake")) == "prompts.jsonl, line 3: not JSON. Mend the line."


def test_what_lies_in_the_way_is_a_sentence(here: Stage, tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "evaluation").write_text("mine")
    assert "runs/x/evaluation is a file" in sentence(here("name=x"))


def test_a_full_disk_is_a_sentence(here: Stage) -> None:
    said = sentence(here("name=full"))
    assert "disk is full" in said and "runs/full/data" in said and "GiB free" in said


def test_a_full_disk_that_does_not_say_where_is_not_given_the_room_of_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit):
        with_sentences(full)
    said = capsys.readouterr().err
    assert "The disk of the run's folder" in said and "GiB free" not in said


def test_a_defect_keeps_its_traceback(stage: Stage) -> None:
    done = stage("name=defect")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ZeroDivisionError: a defect" in done.stderr


def test_interrupt_ends_with_130_and_no_traceback(stage: Stage) -> None:
    done = stage("name=interrupt")
    assert done.returncode == 130
    assert "Traceback" not in done.stderr and "Stopped." in done.stderr


def test_cfg_job_prints_yaml_and_runs_nothing(stage: Stage, tmp_path: Path) -> None:
    done = stage("--cfg", "job", "+recipe=quickstart", "decode.k=9")
    assert done.returncode == 0
    assert "k: 9" in done.stdout and "hydra:" not in done.stdout and "{" not in done.stdout.splitlines()[0]
    assert list(tmp_path.iterdir()) == []


def test_help_names_recipes_groups_and_keys(stage: Stage) -> None:
    done = stage("--help")
    assert done.returncode == 0
    for part in (
        "+recipe=NAME",
        "quickstart",
        "smollm2_135m_hub",
        "eagle3",
        "--multirun",
        "draft.ttt_steps=5",
    ):
        assert part in done.stdout


def test_multirun_runs_every_recipe(stage: Stage, tmp_path: Path) -> None:
    done = stage("--multirun", "+recipe=quickstart,smollm2_eagle3", "train.epochs=1")
    first, second = seen(done)
    assert (first["name"], second["name"]) == ("quickstart", "smollm2_eagle3")
    assert shlex.split(second["command"])[3:] == ["+recipe=smollm2_eagle3", "train.epochs=1"]
    assert (tmp_path / "runs" / "smollm2_eagle3" / "hydra" / "fake" / "config.yaml").is_file()


def test_multirun_refuses_two_runs_in_one_folder(here: Stage) -> None:
    done = here("--multirun", "+recipe=quickstart", "train.seed=1,2")
    assert done.returncode == 1
    assert done.stderr.startswith("error: Two runs of this --multirun write into runs/quickstart.")
    assert "== run" not in done.stdout  # before the first of them


def test_multirun_into_separate_folders(stage: Stage) -> None:
    outs = [
        one["out"]
        for one in seen(stage("--multirun", "name=x", "train.seed=1,2", "out='runs/${train.seed}'"))
    ]
    assert outs == ["runs/1", "runs/2"]


def test_torchrun_starts_every_rank(stage: Stage) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    done = stage("+recipe=quickstart", "train.epochs=3", launcher=launcher)
    ranks = seen(done)
    assert sorted(one["rank"] for one in ranks) == ["0", "1"]
    assert {one["epochs"] for one in ranks} == {3.0}


def test_accelerate_launch_with_our_file(stage: Stage) -> None:
    files = Path(__file__).parent.parent.parent / "conf" / "accelerate"
    launch = ("-m", "accelerate.commands.launch", "--config_file")
    one = seen(stage("+recipe=quickstart", launcher=(*launch, str(files / "single.yaml"), "-m")))
    assert [config["name"] for config in one] == ["quickstart"]
    two = stage(
        "+recipe=quickstart",
        launcher=(*launch, str(files / "ddp_cpu.yaml"), "--main_process_port", "0", "-m"),
        ACCELERATE_USE_CPU="true",
    )
    assert sorted(config["rank"] for config in seen(two)) == ["0", "1"]


def test_a_warning_of_the_hubs_library_is_printed_once() -> None:
    code = """
import logging.config
from deepspec.config.store import _logging
logging.config.dictConfig(_logging())
from huggingface_hub.utils import logging as hub
hub.get_logger("huggingface_hub.utils._http").warning("Retrying in 1s")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).count("Retrying in 1s") == 1


def test_with_sentences_returns_when_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    with_sentences(lambda: None)
    with pytest.raises(SystemExit) as stopped:
        with_sentences(lambda: (_ for _ in ()).throw(UserError("One thing.")).__next__())
    assert stopped.value.code == 1
    assert capsys.readouterr().err == "error: One thing.\n"
