"""What a target's state can do, tried at load and never assumed from the family's name."""

import math

import torch
from torch import Tensor

from deepspec.target.layout import chain, tree
from deepspec.target.model import Target
from deepspec.target.state import State

# Mean |difference| over mean |logit| that rounding alone may cause; a wrong mask or a lost key is far above.
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def probe(target: Target) -> dict[str, str]:
    """{ability: "" if it works, else the reason} for chain, tree, ragged and features.

    chain: prefill, a block, a partial keep, a continuation. tree: two branches seen as two texts. ragged: two
    rows of different lengths keep different paths. features: captured hiddens through the final norm and head
    give the real logits. Each is compared with a plain forward without a state.
    """
    checks = {"chain": _chain, "tree": _tree, "ragged": _ragged, "features": _features}
    found: dict[str, str] = {}
    for name, check in checks.items():
        try:
            error = check(target)
            limit = TOLERANCE.get(target.dtype, 1e-3)
            if math.isnan(error):
                found[name] = "its logits are not numbers: the weights are damaged or the dtype is too narrow"
            elif error > limit:
                found[name] = f"logits differ from a plain forward by {error:.1e} of their size"
            else:
                found[name] = ""
        except (
            Exception
        ) as error:  # a family's own code, met by what it was not written for, may fail in any way
            found[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return found


def _text(target: Target, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        min(3, target.vocab_size - 1), target.vocab_size, (length,), generator=generator
    ).tolist()


def _plain(target: Target, tokens: list[int]) -> Tensor:
    """[T, V] by the library's own forward, no state."""
    with torch.inference_mode():
        return target.model(input_ids=torch.tensor([tokens], device=target.device), use_cache=False).logits[0]


def _error(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).abs().mean() / expected.float().abs().mean()).item()


def _run(target: Target, state: State, tokens: list[list[int]], parents: list[int] | None = None) -> Tensor:
    rows = torch.tensor(tokens, device=target.device)
    if parents is None:
        layout = chain(state.lengths, rows.shape[1], target.device)
    else:
        layout = tree(state.lengths, torch.tensor([parents] * len(tokens), device=target.device))
    return target.forward(rows, state, layout).logits


def _chain(target: Target) -> float:
    text, block, after = _text(target, 12, 0), _text(target, 4, 1), _text(target, 3, 2)
    state = target.new_state(1, 64)
    _run(target, state, [text])
    state.keep([12])
    verified = _run(target, state, [block])[0]
    state.keep([2])
    continued = _run(target, state, [after])[0]
    return max(
        _error(verified, _plain(target, text + block)[12:]),
        _error(continued, _plain(target, text + block[:2] + after)[14:]),
    )


def _tree(target: Target) -> float:
    text, (root, a, b, c) = _text(target, 12, 3), _text(target, 4, 4)
    state = target.new_state(1, 64)
    _run(target, state, [text])
    state.keep([12])
    logits = _run(target, state, [[root, a, b, c]], [-1, -1, 1])[0]
    left, right = _plain(target, [*text, root, a])[12:], _plain(target, [*text, root, b, c])[12:]
    return max(_error(logits[[0, 1]], left), _error(logits[[0, 2, 3]], right))


def _ragged(target: Target) -> float:
    texts, block, after = (
        [_text(target, 12, 5), _text(target, 7, 6)],
        _text(target, 3, 7),
        _text(target, 2, 8),
    )
    state = target.new_state(2, 64, rows=0)
    for text in texts:
        one = target.new_state(1, 32)
        _run(target, one, [text])
        one.keep([len(text)])
        state.append(one)
    _run(target, state, [block, block])
    state.keep([3, 1])
    logits = _run(target, state, [after, after])
    return max(
        _error(logits[0], _plain(target, texts[0] + block + after)[-2:]),
        _error(logits[1], _plain(target, texts[1] + block[:1] + after)[-2:]),
    )


def _features(target: Target) -> float:
    tokens = torch.tensor([_text(target, 12, 9)], device=target.device)
    positions = torch.arange(12, device=target.device)[None]
    captured = target.capture(tokens, positions, torch.zeros_like(tokens), [0])
    with torch.inference_mode():
        return _error(target.logits(captured.last_hidden[0]), _plain(target, tokens[0].tolist()))
