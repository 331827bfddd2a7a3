"""The probe passes what works and names what does not."""

import pytest
import torch

from deepspec.errors import UserError
from deepspec.target.probe import probe
from deepspec.target.state import State
from tests.models import FAMILIES, tiny_target


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_that_work_are_said_to_work(family: str) -> None:
    assert probe(tiny_target(family)) == dict.fromkeys(("chain", "tree", "ragged", "features"), "")


def test_a_state_that_forgets_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback that keeps rejected tokens gives wrong logits without an error: the probe must see it."""

    def keep_all(self: State, counts: object, path: object = None) -> None:
        self.lengths = [self.width] * self.rows

    monkeypatch.setattr(State, "keep", keep_all)
    target = tiny_target("llama")
    assert "differ" in probe(target)["chain"]
    with pytest.raises(UserError, match=r"tiny llama .* cannot be used for chain"):
        target.require("chain")


def test_a_model_that_ignores_the_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    inner = target.model.forward

    def deaf(*args: object, **kwargs: object) -> object:
        if isinstance(kwargs.get("attention_mask"), torch.Tensor):
            kwargs["attention_mask"] = torch.zeros_like(kwargs["attention_mask"])
        return inner(*args, **kwargs)

    monkeypatch.setattr(target.model, "forward", deaf)
    found = probe(target)
    assert "differ" in found["tree"]
