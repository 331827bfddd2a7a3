"""Checkpoint folders: what is kept, what is trusted, what is said."""

import hashlib
import json
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepspec.errors import UserError
from deepspec.training.checkpoint import Checkpoints, Counters, check_recipe
from tests.training.fakes import FakeConfig, FakeDraft
from tests.training.worker import accelerator_for_tests


class Saved:
    """A draft and its optimiser after some steps of a made-up loss, saved after each."""

    def __init__(self, folder: Path, keep_last: int = 2, steps: int = 3) -> None:
        accelerator = accelerator_for_tests()
        self.said: list[str] = []
        self.checkpoints = Checkpoints(
            folder, {"data": "a"}, keep_last, accelerator, "restart", self.said.append
        )
        self.draft = FakeDraft(FakeConfig())
        self.optimiser = accelerator.prepare(torch.optim.AdamW(self.draft.parameters()))
        self.states: list[dict[str, Tensor]] = []
        for step in range(1, steps + 1):
            sum(one.square().sum() for one in self.draft.parameters()).backward()
            self.optimiser.step()
            self.optimiser.zero_grad()
            self.states.append({name: one.clone() for name, one in self.draft.state_dict().items()})
            self.checkpoints.save(self.draft, self.optimiser, Counters(step=step, seconds=0.1 * step))

    def resume(self) -> Counters:
        """Into a fresh draft and optimiser."""
        torch.manual_seed(99)
        accelerator = self.checkpoints.accelerator
        self.draft = FakeDraft(FakeConfig())
        self.draft, self.optimiser = accelerator.prepare(
            self.draft, torch.optim.AdamW(self.draft.parameters())
        )
        found = self.checkpoints.newest()
        if found is None:
            return Counters()
        found.load_weights(self.draft)
        found.load_states(self.draft, self.optimiser, accelerator)
        return found.counters

    def is_at(self, step: int) -> bool:
        return all(
            torch.equal(one, self.states[step - 1][name]) for name, one in self.draft.state_dict().items()
        )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_are_kept_and_the_newest_is_loaded(tmp_path: Path) -> None:
    saved = Saved(tmp_path, keep_last=2, steps=11)
    assert names(tmp_path) == ["step-10", "step-11"]
    moments = saved.optimiser.state_dict()["state"]
    assert saved.resume() == Counters(step=11, seconds=0.1 * 11)
    assert saved.is_at(11)
    assert all(
        torch.equal(one["exp_avg"], moments[key]["exp_avg"])
        for key, one in saved.optimiser.state_dict()["state"].items()
    )


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "manifest", "no manifest"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path: Path, damage: str) -> None:
    saved = Saved(tmp_path)
    newest = tmp_path / "step-3"
    if damage == "cut":
        state = newest / "optimiser.safetensors"
        state.write_bytes(state.read_bytes()[:-100])
    elif damage == "flipped":
        state = newest / "optimiser.safetensors"
        middle, content = state.stat().st_size // 2, bytearray(state.read_bytes())
        content[middle] ^= 1
        state.write_bytes(content)
    elif damage == "missing":
        (newest / "draft" / "model.safetensors").unlink()
    elif damage == "manifest":
        (newest / "manifest.json").write_text("{", encoding="utf-8")
    else:
        (newest / "manifest.json").unlink()
    assert saved.resume().step == 2
    assert saved.is_at(2)
    assert any("step-3 is not whole" in line for line in saved.said)


def test_a_full_disk_is_a_sentence_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # a file may not grow further, as on a full disk
    try:
        with pytest.raises(UserError, match="Could not write"):
            saved.checkpoints.save(saved.draft, saved.optimiser, Counters(step=4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["step-2", "step-3"]
    assert saved.resume().step == 3
    assert saved.is_at(3)


def change(checkpoint: Path, content: bytes) -> None:
    """Other bytes in the file, with a sum that agrees: what an attacker has, or an older manifest."""
    (checkpoint / "optimiser.safetensors").write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    manifest["bytes"]["optimiser.safetensors"] = len(content)
    manifest["sha256"]["optimiser.safetensors"] = hashlib.sha256(content).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    change(tmp_path / "step-3", b"\0" * 100)
    with pytest.raises(UserError, match=r"step-3 is damaged.*Remove that folder"):
        saved.resume()


def test_a_checkpoint_of_before_the_sums_is_loaded(tmp_path: Path) -> None:
    saved = Saved(tmp_path)
    path = tmp_path / "step-3" / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    del manifest["sha256"]
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert saved.resume().step == 3


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (str(tmp_path / "ran"),))

    saved = Saved(tmp_path / "checkpoints")
    torch.save({"optimiser": Evil()}, tmp_path / "evil.pt")
    change(tmp_path / "checkpoints" / "step-3", (tmp_path / "evil.pt").read_bytes())
    with pytest.raises(UserError, match="damaged"):
        saved.resume()
    assert not (tmp_path / "ran").exists()


def test_leftovers_of_a_kill_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    saved = Saved(tmp_path, steps=1)
    (tmp_path / ".step-2.partial-77" / "draft").mkdir(parents=True)
    (tmp_path / ".step-1.old-77").mkdir()
    (tmp_path / "step-by-step.txt").touch()
    saved.checkpoints.remove_leftovers()
    assert names(tmp_path) == ["step-1", "step-by-step.txt"]
    saved.checkpoints.remove_all()
    assert names(tmp_path) == ["step-by-step.txt"]
    assert saved.resume() == Counters()


def test_differences_are_named_with_both_values(tmp_path: Path) -> None:
    before = {"target": {"name": "A", "weights": "1"}, "train": {"betas": [0.9, 0.95]}, "old": 1}
    now = {"target": {"name": "B", "weights": "1"}, "train": {"betas": (0.9, 0.95)}}
    with pytest.raises(UserError) as refused:
        check_recipe(before, now, tmp_path, "restart")
    said = str(refused.value)
    assert "target.name" not in said
    assert "old was 1, is 'not set'" in said
    assert "weights" not in said
    assert "betas" not in said
    check_recipe(before, {**before, "train": {"betas": (0.9, 0.95)}}, tmp_path, "restart")
