"""vLLM itself, on the CPU and in an environment of its own, gives features that are the target's."""

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from deepspec.serving.engine import EngineTarget
from deepspec.target import Target
from tests.config.processes import environment
from tests.interop.test_real_readers import made_reader
from tests.interop.test_vllm import small_target

pytestmark = pytest.mark.slow
LAYERS = [0, 2]
SECONDS = 300


@contextmanager
def vllm(python: str, target: Target, folder: Path) -> Iterator[str]:
    """`vllm serve` with its hidden-states extraction, ready to answer; its URL."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ids = [*(layer + 1 for layer in LAYERS), target.num_layers]
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    connector = {
        "kv_connector": "CpuHiddenStates",
        "kv_connector_module_path": "cpu_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "states")},
    }
    call = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.model.name_or_path)]
    call += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512"]
    call += ["--enforce-eager", "--speculative-config", json.dumps(method)]
    call += ["--kv-transfer-config", json.dumps(connector)]
    alone = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    path = {"PYTHONPATH": str(Path(__file__).parent)}
    with (
        (folder / "vllm.log").open("w") as log,
        subprocess.Popen(call, env={**environment(), **alone, **path}, stdout=log, stderr=log) as process,
    ):
        try:
            url = f"http://127.0.0.1:{port}"
            until = httpx.Client(transport=httpx.HTTPTransport(retries=0))
            for _ in range(SECONDS):
                assert process.poll() is None, (folder / "vllm.log").read_text()[-3000:]
                try:
                    if until.get(f"{url}/health", timeout=1.0).is_success:
                        break
                except httpx.TransportError:
                    try:
                        process.wait(1.0)
                    except subprocess.TimeoutExpired:
                        continue
            yield f"{url}/v1"
        finally:
            process.terminate()


def test_vllms_hidden_states_are_the_targets(tmp_path: Path) -> None:
    target = small_target(tmp_path / "target")
    place = torch.arange(30).repeat(3, 1)
    documents = torch.where(place < 12, 0, torch.where(place < 27, 1, -1))
    positions = torch.where(documents == 1, place - 12, place)
    tokens = torch.randint(3, target.vocab_size, (3, 30), generator=torch.Generator().manual_seed(1))
    with vllm(made_reader("vllm"), target, tmp_path) as url:
        seen = EngineTarget(target, url, LAYERS, "small").capture(tokens, positions, documents, LAYERS)
    expected = target.capture(tokens, positions, documents, LAYERS)
    real = documents >= 0
    torch.testing.assert_close(seen.features[real], expected.features[real], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(seen.last_hidden[real], expected.last_hidden[real], rtol=1e-3, atol=1e-3)
