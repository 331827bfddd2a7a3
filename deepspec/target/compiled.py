"""The target's step as one graph, for forwards of one shape (`torch.compile`)."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[..., Tensor]


class Compiled:
    """Calls a step with some layers' outputs captured; compiled at the first call, which takes seconds to minutes.

    The hooks stay, unlike those of a plain forward: a graph does not ask again which hooks there are. Where nothing
    can be compiled (no C++ compiler, no Triton), one warning says so and the step runs as it is.
    """

    def __init__(self, step: Step, modules: Sequence[nn.Module]) -> None:
        self.step, self.kept = step, dict[int, Tensor]()
        self.capturing = self.proven = False
        for place, module in enumerate(modules):
            module.register_forward_hook(self._hook(place))
        self.run: Step = torch.compile(step, dynamic=False)

    def __call__(self, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
        """The step's result and the captured outputs, in the modules' order."""
        self.capturing = True
        try:
            result = self._first(**inputs) if not self.proven else self.run(**inputs)
            return result, [self.kept[place] for place in sorted(self.kept)]
        finally:
            self.capturing = False
            self.kept.clear()

    def _first(self, **inputs: Any) -> Tensor:
        self.proven = True
        try:
            return self.run(**inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:160]
            warnings.warn(
                f"decode.compile: nothing is compiled here, decoding goes on without ({reason})", stacklevel=2
            )
            self.run = self.step
            return self.step(**inputs)

    def _hook(self, place: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.capturing:
                self.kept[place] = output[0] if isinstance(output, tuple) else output

        return hook
