"""Features from vLLM: its own extraction of hidden states behind our protocol, for targets that only an engine runs.

vLLM (method `extract_hidden_states` with a hidden-states connector) writes what it computed of each request into a
safetensors file, and the answer says which: `hidden_states` [T, n, H] and `token_ids` [T]. Its layer id j is what enters
layer j, i.e. the output of layer j − 1, and the number of layers is the last output, before the final norm. Files are
read where vLLM writes them: this server runs on its machine or shares that folder with it.
"""

import fcntl
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deepspec.data.protocol import KEY, base_url, key_header, may_pass, time_limits
from deepspec.errors import UserError
from deepspec.serving.refusal import Refusal
from deepspec.target import Captured, Target

SETTING = "feature_server.engine"
PATIENCE = 600.0  # seconds without a byte after which a request has failed
RETRY_SECONDS = 5
AT_ONCE = 32  # documents that vLLM is asked for at a time
PROBE = 24  # tokens of the text that a server is tried with
NATS = 0.25  # that its number format and kernels may change a log-probability


def engine_command(path: str, layers: Sequence[int], count: int) -> str:
    """How vLLM is started so that it gives these layers' outputs. layers: 0-based; count: of the target's."""
    ids = [*(layer + 1 for layer in layers), count]
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/deepspec"},
    }
    return f"vllm serve {path} --speculative-config '{json.dumps(method)}' --kv-transfer-config '{json.dumps(connector)}'"


class EngineTarget:
    """What the feature server needs of a target, run by vLLM.

    edges: the target's; layers: whose outputs vLLM extracts, beside the last one, ascending. `UserError` for a server
    that cannot be reached, writes no hidden states, or others.
    """

    def __init__(self, edges: Target, url: str, layers: Sequence[int], path: str) -> None:
        self.edges, self.layers = edges, list(layers)
        self.name, self.device = edges.name, torch.device("cpu")
        self.hidden_size, self.num_layers, self.vocab_size = (
            edges.hidden_size,
            edges.num_layers,
            edges.vocab_size,
        )
        self.url = base_url(url, SETTING)
        self.command = engine_command(path, layers, edges.num_layers)
        self.client = httpx.Client(headers=key_header(), timeout=time_limits(PATIENCE))
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="engine")
        self.model = self._model()
        self._try()

    def identity(self) -> dict[str, Any]:
        """The edges' own, which is the whole target's."""
        return self.edges.identity()

    def check_layers(self, layers: Sequence[int]) -> None:
        """`UserError` unless vLLM extracts them."""
        if missing := [layer for layer in layers if layer not in self.layers]:
            raise UserError(
                f"Layer {missing[0]} is not extracted here, only {', '.join(map(str, self.layers))}. Start vLLM and this "
                "server with the draft's own layers (draft.capture_layers)."
            )

    def capture(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, layers: Sequence[int]
    ) -> Captured:
        """As `Target.capture`, document by document. `Refusal` where vLLM does not answer (503) or cannot (400)."""
        width, dtype = self.hidden_size, self.edges.dtype
        features = torch.zeros(*tokens.shape, len(layers) * width, dtype=dtype)
        last_hidden = torch.zeros(*tokens.shape, width, dtype=dtype)
        places = [
            (row, (documents[row] == number).nonzero()[:, 0])
            for row in range(len(tokens))
            for number in documents[row].unique().tolist()
            if number >= 0
        ]
        for row, place in places:
            if not torch.equal(positions[row, place], torch.arange(len(place))):
                raise Refusal(
                    400, "vLLM runs whole documents: positions must count from 0.", param="positions"
                )
        chosen = [self.layers.index(layer) for layer in layers]
        texts = [tokens[row, place].tolist() for row, place in places]
        for (row, place), states in zip(places, self.pool.map(self._states, texts), strict=True):
            features[row, place] = states[:, chosen].flatten(1).to(dtype)
            last_hidden[row, place] = states[:, -1].to(dtype)
        return Captured(features, last_hidden)

    def _states(self, text: list[int]) -> Tensor:
        """[T, layers + 1, H] of one document, in vLLM's format."""
        return self._read(self._ask(text), text)

    def _read(self, answer: dict[str, Any], text: list[int]) -> Tensor:
        try:
            path = Path(answer["kv_transfer_params"]["hidden_states_path"])
        except (KeyError, TypeError) as error:
            raise Refusal(
                502, f"{self.url} gives no hidden states. Start it so: {self.command}", kind="server_error"
            ) from error
        found = _read(path)
        states, ids = found.get("hidden_states"), found.get("token_ids")
        wanted = (len(text), len(self.layers) + 1, self.hidden_size)
        if states is None or ids is None or tuple(states.shape) != wanted or ids.tolist() != text:
            shape = None if states is None else list(states.shape)
            raise Refusal(
                502,
                f"{self.url} wrote hidden states of shape {shape}, expected was {list(wanted)}: it extracts other "
                f"layers. Start it so: {self.command}",
                kind="server_error",
            )
        if not bool(torch.isfinite(states).all()):
            raise Refusal(502, f"{self.url} wrote hidden states that are not finite.", kind="server_error")
        return states

    def _ask(self, text: list[int]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0}
        body |= {"logprobs": 0, "return_token_ids": True}
        try:
            reply = self.client.post(f"{self.url}/completions", json=body)
            if reply.is_success:
                answer: dict[str, Any] = reply.json()
                return answer
        except (httpx.TransportError, ValueError) as error:
            raise Refusal(
                503, f"vLLM does not answer: {error}.", kind="server_error", after=RETRY_SECONDS
            ) from error
        if reply.status_code in (401, 403):
            raise Refusal(502, f"vLLM refuses the key of {KEY} ({reply.status_code}).", kind="server_error")
        if may_pass(reply.status_code):
            raise Refusal(503, f"vLLM says {reply.status_code}.", kind="server_error", after=RETRY_SECONDS)
        raise Refusal(400, f"vLLM says {reply.status_code}: {reply.text[:300]}")

    def _model(self) -> str:
        try:
            reply = self.client.get(f"{self.url}/models")
            return str(reply.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{SETTING}: {self.url} is no OpenAI-compatible server that answers ({error}). Start it so: "
                f"{self.command}"
            ) from error

    def _try(self) -> None:
        """A short text: the last hidden state must give the token that vLLM says, before the final norm."""
        text = [(7 * place + 11) % self.vocab_size for place in range(PROBE)]
        try:
            answer = self._ask(text)
            states = self._read(answer, text)
        except Refusal as error:
            raise UserError(f"{SETTING}: {error}") from error
        try:
            (choice,) = answer["choices"]
            token, chance = int(choice["token_ids"][0]), float(choice["logprobs"]["token_logprobs"][0])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(
                f"{SETTING}: {self.url} does not say its tokens and their log-probabilities."
            ) from error
        hidden = states[-1:, -1].to(self.edges.device, self.edges.dtype)
        ours = float(self.edges.logits(hidden)[0].float().log_softmax(-1)[token])
        if abs(ours - chance) > NATS:
            raise UserError(
                f"{SETTING}: the last hidden state that {self.url} writes gives the token that it says {ours:.2f} nats, "
                f"not {chance:.2f}: it is not the last layer's output before the final norm, or the weights are "
                f"others. Start it so: {self.command}"
            )


def _read(path: Path) -> dict[str, Tensor]:
    """A file of hidden states, when its writer is done with it; it is removed."""
    lock = path.with_name(path.name + ".lock")
    try:
        if lock.exists():
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise Refusal(
            502,
            f"vLLM wrote {path}, which cannot be read here ({error}): this server must see its shared_storage_path.",
            kind="server_error",
        ) from error
    finally:
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
