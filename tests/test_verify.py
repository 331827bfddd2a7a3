"""`deepspec.verify`: passes what is lossless, and sees what is not."""

import re
from pathlib import Path

import pytest
import torch

from deepspec import verify
from deepspec.decoding.acceptance import Shape, chains
from deepspec.drafts.contract import Proposal
from deepspec.errors import UserError
from deepspec.evaluation.verdicts import Recorded, Test, chi_square, critical_value, try_rule, upper_tail
from deepspec.target.layout import tree
from deepspec.target.state import State
from tests.talking import talking_run


def distributions(*size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*size, generator=generator) * 1.5).softmax(-1)


def recorded(kind: str, seed: int = 0, v: int = 300) -> Recorded:
    """A round of three drafted tokens on 300: a chain, a deterministic one, a tree, a tree of sampled children."""
    p, q = distributions(1, 4, v, seed=seed), distributions(1, 3, v, seed=seed + 100)
    tokens = torch.tensor([[3, 7, 11]])
    if kind == "chain":
        return Recorded(Proposal(tokens, [3], q=q), p, None)
    if kind == "point":
        return Recorded(Proposal(p[:, :3].argmax(-1), [3]), p, None)
    if kind == "vocab":
        return Recorded(
            Proposal(tokens - tokens % 2, [3], q=distributions(1, 3, v // 2), vocab=torch.arange(0, v, 2)),
            p,
            None,
        )
    parents = torch.tensor([[-1, -1, 0]])
    layout = tree([5], parents)
    shape = Shape.of(parents, layout.visible, torch.tensor([3]), torch.tensor([9]))
    if kind == "tree":
        best = p[0, 0].topk(2).indices
        return Recorded(Proposal(torch.tensor([[*best.tolist(), 5]]), [3], parents=parents), p, shape)
    proposal = Proposal(tokens, [3], parents=parents, q=q[:, :2], q_row=torch.tensor([[0, 0, 1]]))
    return Recorded(proposal, p, shape)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        ("chain", "token"),
        ("chain", "block"),
        ("vocab", "auto"),
        ("point", "auto"),
        ("tree", "auto"),
        ("drawn", "auto"),
    ],
)
def test_lossless_rules_pass(kind: str, rule: str) -> None:
    tests = [test for seed in range(3) for test in try_rule(recorded(kind, seed), rule, 20_000, seed)]
    assert len(tests) >= 5 and sum(test.verdicts for test in tests) >= 3 * 20_000
    assert min(test.p_value for test in tests) > 1e-4  # about twenty tests, fixed seeds


def test_a_draw_from_a_rounded_distribution_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafted tokens come from q, the ratio is taken of another tensor."""
    honest = chains._ratio

    def rounded(proposal, p):
        return honest(proposal, p) * torch.where(proposal.tokens % 2 == 0, 1.1, 0.9)

    monkeypatch.setattr(chains, "_ratio", rounded)
    for rule in ("token", "block"):
        assert min(test.p_value for test in try_rule(recorded("chain"), rule, 50_000, 0)) < 1e-6


def test_a_threshold_on_the_drawn_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = chains._inside

    def leaky(proposal):
        q = proposal.q.gather(2, proposal.tokens[..., None])[..., 0]
        return honest(proposal) & (q >= 0.02)

    monkeypatch.setattr(chains, "_inside", leaky)
    assert min(test.p_value for test in try_rule(recorded("chain"), "token", 50_000, 0)) < 1e-6


def test_the_chi_square_tail() -> None:
    """Against tables: 95% points for 1, 10 and 100 degrees of freedom."""
    for freedom, point in ((1, 3.841), (10, 18.307), (100, 124.342)):
        assert upper_tail(point, freedom) == pytest.approx(0.05, abs=1e-4)
        assert critical_value(0.05, freedom) == pytest.approx(point, abs=1e-3)


def test_an_impossible_token_decides() -> None:
    counts, p = torch.tensor([500.0, 499.0, 1.0]), torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    assert chi_square("x", counts.double(), p).p_value == 0.0


def test_the_visible_distance_is_seen_that_often() -> None:
    """By simulation: at the claimed distance, in its worst direction, nearly every repetition complains."""
    cells, verdicts, significance = 20, 20_000, 1e-3
    distance = Test("x", verdicts, 1.0, cells - 1).visible(significance)
    p = torch.full((cells,), 1 / cells, dtype=torch.float64)
    shifted = p + distance * torch.tensor([1.0, -1.0] * (cells // 2), dtype=torch.float64) / (cells / 2)
    generator = torch.Generator().manual_seed(0)
    complaints = 0
    for _ in range(200):
        drawn = torch.multinomial(shifted, verdicts, replacement=True, generator=generator)
        complaints += (
            chi_square("x", torch.bincount(drawn, minlength=cells).double(), p).p_value < significance
        )
    assert complaints >= 190


# ---------------------------------------------------------------- the whole command


def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **decode):
    config = talking_run(tmp_path, monkeypatch, **decode)
    config.verify.prompts, config.verify.rounds, config.verify.draws = 3, 3, 5000
    return config


@pytest.mark.parametrize("decode", [{}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_a_sound_pair_passes(tmp_path: Path, monkeypatch, capsys, decode: dict) -> None:
    findings = verify.run(small(tmp_path, monkeypatch, **decode))
    assert [(f.part, f.sound) for f in findings] == [("greedy", True), ("rule", True), ("logits", True)]
    shown = capsys.readouterr().out
    assert re.search(
        r"3 of 3 greedy answers \(\d+ tokens\) equal plain decoding, 0 up to a proven tie", shown
    )
    assert "5000 verdicts each" in shown and "would have been seen" in shown and "verdict OK" in shown


def test_a_rollback_that_is_off_by_one_is_seen(tmp_path: Path, monkeypatch, capsys) -> None:
    """Of every verification the first kept token's keys and values are its neighbour's."""
    honest = State.keep

    @torch.inference_mode()
    def sloppy(self, counts, path=None):
        for buffer in self._buffers():
            for row, length in enumerate(self.lengths):
                if 0 < length < self.width - 1:
                    buffer[row, :, length] = buffer[row, :, length + 1]
        honest(self, counts, path)

    config = small(tmp_path, monkeypatch)
    monkeypatch.setattr(State, "keep", sloppy)
    with pytest.raises(UserError, match=r"Not lossless: .*logits"):
        verify.run(config)
    assert "logits  WRONG" in capsys.readouterr().out
