"""Run by vLLM's own Python, without deepspec: greedy answers to given prompts, and the counters of what was accepted.

Arguments: a JSON file with `target` (a folder), `draft` (a folder or null), `settings` (of speculation), `prompts`
(token ids), `max_new_tokens`; where to write {answers, drafts, accepted}, the counters null without a draft.
"""

import json
import sys
from pathlib import Path


def main(asked: str, answer: str) -> None:
    from vllm import LLM, SamplingParams

    given = json.loads(Path(asked).read_text(encoding="utf-8"))
    llm = LLM(
        model=given["target"],
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        seed=0,
        disable_log_stats=False,
        speculative_config={"model": given["draft"], **given["settings"]} if given["draft"] else None,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=given["max_new_tokens"])
    found = llm.generate([{"prompt_token_ids": ids} for ids in given["prompts"]], sampling)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    result = {
        "answers": [list(one.outputs[0].token_ids) for one in found],
        "drafts": counters.get("vllm:spec_decode_num_drafts"),
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens"),
    }
    Path(answer).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
