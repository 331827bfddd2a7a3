"""vLLM's own hidden-states connector for machines without CUDA: the same file, written at once. Imported by vLLM."""

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Done:
    def query(self) -> bool:
        return True


class CpuHiddenStates(ExampleHiddenStatesConnector):
    def _submit_async_write(self, pending: PendingSave) -> None:
        blocks = torch.tensor(pending.block_ids)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        save_file(
            {"hidden_states": states.clone().contiguous(), "token_ids": pending.token_ids.clone()},
            pending.filename,
        )
        if (held := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(held)
        self._req_copy_events[pending.req_id] = _Done()
