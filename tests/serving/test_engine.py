"""Features that vLLM writes, handed on by our protocol: against the target itself, with a stand-in for vLLM that keeps
its habits (layer ids one higher, files with a lock), and for what it may do wrong."""

import copy
import fcntl
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deepspec.errors import UserError
from deepspec.serving.engine import EngineTarget, engine_command
from deepspec.serving.refusal import Refusal
from deepspec.target import Target
from tests.models import tiny_model

LAYERS = [0, 2]


class Engine:
    """Hidden states as transformers gives them; `spoil` changes an answer before it is sent."""

    def __init__(self, family: str, folder: Path, ids: list[int]) -> None:
        self.model, self.folder, self.ids, self.count = tiny_model(family), folder, ids, 0
        self.spoil: dict[str, Any] = {}
        self.lock = threading.Lock()

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "status" in self.spoil:
            return self.spoil["status"], {"error": "as asked"}
        text = torch.tensor([body["prompt"]])
        last: list[torch.Tensor] = []
        layer = self.model.get_decoder().layers[-1]
        with self.lock, torch.no_grad():
            handle = layer.register_forward_hook(lambda module, given, made: last.append(made))
            said = self.model(text, output_hidden_states=True, use_cache=False)
            handle.remove()
            self.count += 1
            number = self.count
        before_norm = last[0] if isinstance(last[0], torch.Tensor) else last[0][0]
        entering = [*said.hidden_states[:-1], before_norm]
        if self.spoil.get("normed"):
            entering[-1] = said.hidden_states[-1]
        states = torch.stack([entering[j][0] for j in self.ids], 1)
        path = self.folder / f"cmpl-{number}.safetensors"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            save_file({"hidden_states": states.contiguous(), "token_ids": text[0]}, path)
        if self.spoil.get("lost"):
            path.unlink()
        chances = said.logits[0, -1].log_softmax(-1)
        token = int(chances.argmax())
        told = {"token_logprobs": [float(chances[token])]}
        answer: dict[str, Any] = {"choices": [{"text": "", "token_ids": [token], "logprobs": told}]}
        if not self.spoil.get("silent"):
            answer["kv_transfer_params"] = {"hidden_states_path": str(path)}
        return 200, answer


@contextmanager
def running(engine: Engine) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._say(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._say(*engine.complete(body))

        def _say(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def target(family: str = "llama") -> Target:
    return Target(tiny_model(family), None, family, {"name": family, "dtype": "float64"})


def columns() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows of two documents, padding behind."""
    place = torch.arange(11).repeat(2, 1)
    documents = torch.where(place < 4, 0, torch.where(place < 9, 1, -1))
    positions = torch.where(documents == 1, place - 4, place)
    tokens = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
    return tokens, positions, documents


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_features_are_those_of_the_target_itself(family: str, tmp_path: Path) -> None:
    with running(Engine(family, tmp_path, [1, 3, 4])) as url:
        seen = EngineTarget(target(family), url, LAYERS, "tiny").capture(*columns(), [2])
    expected = target(family).capture(*columns(), [2])
    real = columns()[2] >= 0
    torch.testing.assert_close(seen.features[real], expected.features[real], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(seen.last_hidden[real], expected.last_hidden[real], rtol=1e-9, atol=1e-9)
    assert not list(tmp_path.iterdir())  # what was read is removed


@pytest.mark.parametrize(
    ("ids", "spoil", "words"),
    [
        ([1, 4], {}, r"shape \[24, 2, 32\], expected was \[24, 3, 32\].*vllm serve tiny"),
        ([1, 3, 3], {}, "gives the token that it says .* nats, not"),
        ([1, 3, 4], {"normed": True}, "before the final norm"),
        ([1, 3, 4], {"silent": True}, "gives no hidden states"),
        ([1, 3, 4], {"lost": True}, "must see its shared_storage_path"),
        ([1, 3, 4], {"status": 404}, "vLLM says 404"),
    ],
)
def test_an_engine_that_gives_something_else_is_refused(
    ids: list[int], spoil: dict[str, Any], words: str, tmp_path: Path
) -> None:
    engine = Engine("llama", tmp_path, ids)
    engine.spoil = spoil
    engine.model = copy.deepcopy(engine.model)
    with torch.no_grad():  # a final norm that does something
        engine.model.model.norm.weight.mul_(torch.linspace(0.02, 0.6, 32))
    own = Target(engine.model, None, "llama", {"name": "llama", "dtype": "float64"})
    with running(engine) as url, pytest.raises(UserError, match=words):
        EngineTarget(own, url, LAYERS, "tiny")


def test_an_engine_that_goes_away_is_worth_another_try(tmp_path: Path) -> None:
    engine = Engine("llama", tmp_path, [1, 3, 4])
    with running(engine) as url:
        seen = EngineTarget(target(), url, LAYERS, "tiny")
        engine.spoil = {"status": 500}
        with pytest.raises(Refusal) as refused:
            seen.capture(*columns(), LAYERS)
        assert refused.value.status == 503 and refused.value.after
    with pytest.raises(Refusal) as refused:
        seen.capture(*columns(), LAYERS)
    assert refused.value.status == 503


def test_no_engine_at_all_and_other_layers_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"feature_server\.engine: http://127\.0\.0\.1:9/v1 is no .* vllm serve"
    ):
        EngineTarget(target(), "http://127.0.0.1:9", LAYERS, "tiny")
    with running(Engine("llama", tmp_path, [1, 3, 4])) as url:
        seen = EngineTarget(target(), url, LAYERS, "tiny")
    with pytest.raises(UserError, match="Layer 1 is not extracted here, only 0, 2"):
        seen.check_layers([1])


def test_the_command_asks_for_what_enters_the_next_layer() -> None:
    assert '"eagle_aux_hidden_state_layer_ids": [2, 15, 27, 30]' in engine_command("x", [1, 14, 26], 30)
