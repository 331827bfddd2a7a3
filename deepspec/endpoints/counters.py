"""A server's own counters of drafts and accepted tokens, out of its Prometheus page."""

import re
from collections import defaultdict
from dataclasses import dataclass

from deepspec.endpoints.result import Acceptance

SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?:\s+\d+)?\s*$")


@dataclass(frozen=True)
class Names:
    """Of one server's counters. accepted: name → weight in the sum."""

    server: str
    drafts: str
    accepted: dict[str, int]
    drafted: str | None


KNOWN = (
    Names(
        "vllm",
        "vllm:spec_decode_num_drafts_total",
        {"vllm:spec_decode_num_accepted_tokens_total": 1},
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    Names(
        "deepspec",
        "deepspec_drafts_total",
        {"deepspec_accepted_tokens_total": 1},
        "deepspec_scheduled_tokens_total",
    ),
    # SGLang counts tokens and verifications: a request's first token is the prefill's, each verification gives one
    # token of the target's own, and the rest were drafted.
    Names(
        "sglang",
        "sglang:spec_verify_calls_total",
        {
            "sglang:generation_tokens_total": 1,
            "sglang:num_requests_total": -1,
            "sglang:spec_verify_calls_total": -1,
        },
        None,
    ),
)


def samples(page: str) -> dict[str, float]:
    """Every sample of a Prometheus page by its name, summed over labels; lines that are none are passed over."""
    found: defaultdict[str, float] = defaultdict(float)
    for line in page.splitlines():
        match = SAMPLE.match(line)
        if match:
            found[match[1]] += float(match[2])
    return found


def acceptance_between(before: str | None, after: str | None) -> tuple[Acceptance | None, str | None]:
    """What the counters of two pages differ by, or why that says nothing (None: no page could be read)."""
    if before is None or after is None:
        return None, "the server has no /metrics page that can be read"
    old, new = samples(before), samples(after)
    for names in KNOWN:
        if names.drafts not in new or not all(name in new for name in names.accepted):
            continue
        wanted = {names.drafts, *names.accepted, names.drafted or names.drafts}
        difference = {name: new.get(name, 0.0) - old.get(name, 0.0) for name in wanted}
        if min(difference.values()) < 0:
            return None, "the server's counters went back: it was restarted meanwhile"
        found = Acceptance(
            names.server,
            difference[names.drafts],
            sum(difference[name] * weight for name, weight in names.accepted.items()),
            None if names.drafted is None or names.drafted not in new else difference[names.drafted],
        )
        if found.drafts == 0:
            return found, "the server drafted nothing"
        return found, None
    return None, "the server's /metrics page has no counters of speculative decoding"
