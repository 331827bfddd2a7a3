"""Losses against ten-line references in float64 Python, and gradients against finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspec.drafts import losses

V, VD, N, H = 11, 5, 6, 4
VOCAB = torch.tensor([0, 3, 4, 8, 10])


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    exps = [math.exp(x - top) for x in row]
    return [e / sum(exps) for e in exps]


def draw(seed: int, *shape: int) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(kind: str, q_logits: Tensor, full_logits: Tensor, weights: Tensor) -> tuple[float, float]:
    total = weight_total = 0.0
    for q_row, p_row, w in zip(q_logits.tolist(), full_logits.tolist(), weights.tolist(), strict=True):
        q, p = softmax(q_row), softmax(p_row)
        kept = [p[v] for v in VOCAB.tolist()]
        mass = sum(kept)
        near = [x / mass for x in kept]
        if kind == "soft_cross_entropy":
            value = -sum(a * math.log(b) for a, b in zip(near, q, strict=True))
        elif kind == "kl":
            value = sum(a * math.log(a / b) for a, b in zip(near, q, strict=True))
        elif kind == "reverse_kl":
            value = sum(b * math.log(b / a) for a, b in zip(near, q, strict=True))
        else:
            on_v = [0.0] * V
            for v, b in zip(VOCAB.tolist(), q, strict=True):
                on_v[v] = b
            value, mass = sum(abs(a - b) for a, b in zip(p, on_v, strict=True)) / 2, 1.0
        total, weight_total = total + w * mass * value, weight_total + w * mass
    return total, weight_total


def on_vocab(full_logits: Tensor, **more: Tensor) -> losses.Teacher:
    return losses.teacher_on_vocab(lambda h: h, full_logits, VOCAB, **more)


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "kl", "reverse_kl", "total_variation"])
@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_distribution_losses_equal_the_reference(kind: str, seed: int) -> None:
    q_logits, full, weights = draw(seed, N, VD), draw(seed + 1, N, V), draw(seed + 2, N).abs()
    teacher = on_vocab(full)
    mass = () if kind == "total_variation" else (teacher.kept_mass,)
    total, weight = getattr(losses, kind)(q_logits, teacher.log_probs, *mass, weights)
    expected = reference(kind, q_logits, full, weights)
    assert (total.item(), weight.item()) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["soft_cross_entropy", "kl", "reverse_kl", "total_variation"])
def test_gradients_of_distribution_losses(kind: str) -> None:
    teacher = on_vocab(draw(1, N, V))
    mass = () if kind == "total_variation" else (teacher.kept_mass,)
    weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.3], dtype=torch.float64)
    logits = draw(2, N, VD).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: getattr(losses, kind)(x, teacher.log_probs, *mass, weights)[0], logits
    )


def test_soft_cross_entropy_gradient_is_mass_times_q_minus_p() -> None:
    teacher, logits = on_vocab(draw(3, N, V)), draw(4, N, VD).requires_grad_()
    losses.soft_cross_entropy(logits, teacher.log_probs, teacher.kept_mass)[0].backward()
    kept = teacher.log_probs.exp()
    expected = teacher.kept_mass[:, None] * logits.detach().softmax(-1) - kept
    torch.testing.assert_close(logits.grad, expected)


@given(seed=st.integers(0, 2**31), chunk=st.integers(1, 8), with_vocab=st.booleans())
@settings(max_examples=25, deadline=None)
def test_teacher_is_the_full_softmax_seen_through_the_vocabulary(
    seed: int, chunk: int, with_vocab: bool
) -> None:
    weight, hidden = draw(seed, H, V), draw(seed + 1, N, H)
    text = torch.randint(V, (N,), generator=torch.Generator().manual_seed(seed))
    widest = 0

    def head(rows: Tensor) -> Tensor:
        nonlocal widest
        widest = max(widest, len(rows))
        return rows @ weight

    vocab = VOCAB if with_vocab else None
    teacher = losses.teacher_on_vocab(head, hidden, vocab, text, chunk)
    p = torch.tensor([softmax(row) for row in (hidden @ weight).tolist()], dtype=torch.float64)
    kept = p[:, VOCAB] if with_vocab else p
    assert widest <= chunk
    torch.testing.assert_close(teacher.log_probs, kept.log())
    torch.testing.assert_close(teacher.kept_mass, kept.sum(-1))
    torch.testing.assert_close(teacher.text_prob, p[range(N), text])
    assert teacher.argmax.tolist() == p.argmax(-1).tolist()


def test_draft_ids_and_their_probabilities() -> None:
    tokens = torch.tensor([[0, 1, 8], [10, 9, 3]])
    ids = losses.draft_ids(tokens, VOCAB)
    assert ids.tolist() == [[0, -1, 3], [4, -1, 1]]
    assert losses.draft_ids(tokens, None) is tokens
    log_probs = draw(5, 6, VD).log_softmax(-1)
    found = losses.prob_of(log_probs, ids.flatten())
    expected = [
        0.0 if i < 0 else log_probs[row, i].exp().item() for row, i in enumerate(ids.flatten().tolist())
    ]
    assert found.tolist() == pytest.approx(expected)


def test_hard_cross_entropy_leaves_out_labels_the_draft_lacks() -> None:
    logits, labels = draw(6, 4, VD).requires_grad_(), torch.tensor([2, -1, 0, 4])
    weights = torch.tensor([1.0, 5.0, 2.0, 0.5], dtype=torch.float64)
    total, weight = losses.hard_cross_entropy(logits, labels, weights)
    rows = [softmax(row) for row in logits.tolist()]
    expected = -sum(w * math.log(rows[i][label]) for i, label, w in [(0, 2, 1.0), (2, 0, 2.0), (3, 4, 0.5)])
    assert total.item() == pytest.approx(expected)
    assert weight.item() == pytest.approx(3.5)
    assert torch.autograd.gradcheck(lambda x: losses.hard_cross_entropy(x, labels, weights)[0], logits)


@pytest.mark.parametrize("beta", [1.0, 0.25])
def test_smooth_l1(beta: float) -> None:
    prediction, goal = draw(7, N, H).requires_grad_(), draw(8, N, H)
    weights = draw(9, N).abs()
    total, weight = losses.smooth_l1(prediction, goal, weights, beta)
    expected = 0.0
    for a, b, w in zip(prediction.tolist(), goal.tolist(), weights.tolist(), strict=True):
        gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
        expected += w * sum(g * g / 2 / beta if g < beta else g - beta / 2 for g in gaps) / H
    assert (total.item(), weight.item()) == pytest.approx((expected, weights.sum().item()))
    assert torch.autograd.gradcheck(lambda x: losses.smooth_l1(x, goal, weights, beta)[0], prediction)


def test_an_impossible_token_does_not_poison_the_loss() -> None:
    full = draw(10, N, V)
    full[:, 3] = -math.inf
    teacher, logits = on_vocab(full), draw(11, N, VD).requires_grad_()
    for loss in (losses.soft_cross_entropy, losses.kl, losses.reverse_kl):
        total, weight = loss(logits, teacher.log_probs, teacher.kept_mass)
        (gradient,) = torch.autograd.grad(total, logits)
        assert math.isfinite(total.item()) and weight > 0
        assert gradient.isfinite().all()


def test_no_positions_and_low_precision_give_float32_zeros() -> None:
    logits = torch.zeros(0, VD, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.zeros(0, V, dtype=torch.bfloat16)
    teacher = losses.teacher_on_vocab(lambda h: h, hidden, VOCAB, torch.zeros(0, dtype=torch.long))
    total, weight = losses.soft_cross_entropy(logits, teacher.log_probs, teacher.kept_mass)
    total.backward()
    assert (total.item(), weight.item()) == (0.0, 0.0)
    assert total.dtype == weight.dtype == torch.float32
    assert logits.grad is not None
