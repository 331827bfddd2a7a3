"""What the server tells Prometheus; every number is a count since its start or a state of now."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deepspec.decoding import Round

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
TPOT_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


class Metrics:
    """A registry of this server's own. longest: tokens that a round can draft for one request."""

    def __init__(self, longest: int) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "deepspec_requests",
            "HTTP requests by path and status (499: the client went away)",
            ["path", "status"],
            registry=registry,
        )
        self.running = Gauge("deepspec_running", "Answers being decoded", registry=registry)
        self.waiting = Gauge(
            "deepspec_waiting", "Answers waiting for a place in the batch", registry=registry
        )
        self.prompt_tokens = Counter("deepspec_prompt_tokens", "Tokens prefilled", registry=registry)
        self.generated = Counter("deepspec_generated_tokens", "Tokens of answers", registry=registry)
        self.drafts = Counter(
            "deepspec_drafts", "Rounds of a request with drafted tokens verified", registry=registry
        )
        self.drafted = Counter("deepspec_drafted_tokens", "Tokens proposed by the draft", registry=registry)
        self.accepted = Counter(
            "deepspec_accepted_tokens", "Drafted tokens that were accepted", registry=registry
        )
        self.rounds = Counter(
            "deepspec_rounds", "Rounds by the requests in the batch", ["rows"], registry=registry
        )
        self.budget = Counter(
            "deepspec_scheduled_tokens",
            "Drafted tokens that the target verified, all requests together, by the requests in the batch",
            ["rows"],
            registry=registry,
        )
        self.length = Histogram(
            "deepspec_acceptance_length",
            "Tokens committed a round and request, the target's own included",
            buckets=range(1, longest + 2),
            registry=registry,
        )
        self.ttft = Histogram(
            "deepspec_time_to_first_token_seconds",
            "From a request's arrival, waiting included, to its first token",
            buckets=TTFT_BUCKETS,
            registry=registry,
        )
        self.tpot = Histogram(
            "deepspec_time_per_output_token_seconds",
            "Mean time per token after the first, by answer",
            buckets=TPOT_BUCKETS,
            registry=registry,
        )

    def round(self, rounds: Sequence[Round]) -> None:
        """One round of the batch: each request's record."""
        if not rounds:
            return
        rows = str(len(rounds))
        self.rounds.labels(rows).inc()
        self.budget.labels(rows).inc(sum(one.scheduled or 0 for one in rounds))
        for one in rounds:
            self.drafted.inc(one.drafted)
            self.drafts.inc(1 if one.scheduled else 0)
            self.accepted.inc(one.accepted)
            self.generated.inc(one.committed)
            self.length.observe(one.committed)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)
