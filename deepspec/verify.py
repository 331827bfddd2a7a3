"""`python -m deepspec.verify +recipe=X`: is decoding with this draft lossless for this target, on this machine?"""

if __name__ == "__main__":
    from deepspec.config.app import start

    start("verify")  # before the imports below, which take seconds

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepspec.config.app import command
from deepspec.config.schema import Config, Rule
from deepspec.decoding import Engine, Request, Sampling
from deepspec.decoding.engine import sampling_of
from deepspec.decoding.row import Row
from deepspec.decoding.sampling import distributions
from deepspec.decoding.trial import Trial
from deepspec.errors import UserError
from deepspec.evaluation.bare import logits_two_ways
from deepspec.evaluation.prompts import Prompt, spread
from deepspec.evaluation.sources import prompts_of, read_source
from deepspec.evaluation.ties import prove_tie
from deepspec.evaluation.verdicts import Recorded, Test, try_rule
from deepspec.pair import Pair, find_draft, load_pair
from deepspec.target import Target

TIMES_ROUNDING = 10.0  # logits may differ by so many times what the library's own two ways differ by,
TIMES_EPSILON = 64.0  # or by so many units in the last place of the largest


@dataclass
class Finding:
    """One part's verdict in words."""

    part: str
    sound: bool
    words: str


@dataclass
class Seen:
    """A round as the engine saw it. before: answer tokens known then."""

    before: int
    trial: Trial
    logits: Tensor  # [N+1, V], on the host


def run(config: Config) -> list[Finding]:
    """Test the pair of the run's folder and print a verdict; `UserError` (exit status 1) where it is not lossless."""
    found = find_draft(config)
    source = read_source(config, command("prepare"))
    pair = load_pair(config, found)
    prompts, _ = prompts_of(source, config, pair.target)
    chosen = spread(prompts, config.verify.prompts)
    how = f"{config.decode.rule.value} rule, " + (
        f"K = {config.decode.k}" if config.decode.tree.value == "none" else f"{config.decode.tree.value} tree"
    )
    print(f"{pair.target.name} ({pair.target.dtype}) with {type(pair.draft).__name__}, {how}", flush=True)
    findings = []
    for part in (greedy_text, rule_alone):
        for finding in part(config, pair, chosen):
            print(f"{finding.part:8}{'OK' if finding.sound else 'WRONG':7}{finding.words}", flush=True)
            findings.append(finding)
    wrong = [finding.part for finding in findings if not finding.sound]
    if wrong:
        raise UserError(
            f"Not lossless: {', '.join(wrong)} failed. Do not use this draft with this configuration."
        )
    print("verdict OK     nothing speaks against losslessness; what was tested stands above", flush=True)
    return findings


def greedy_text(config: Config, pair: Pair, prompts: Sequence[Prompt]) -> list[Finding]:
    """Greedy answers against plain decoding, a difference only where rounding explains it."""
    target, decode = pair.target, config.decode
    engine = Engine.configured(target, pair.draft, decode)
    plainly = Engine.configured(target, None, decode)
    sampling = Sampling(repetition_penalty=decode.repetition_penalty)
    ties, wrong, tokens = 0, [], 0
    for prompt in prompts:
        request = _request(config, target, prompt, sampling)
        plain, ours = plainly.generate([request])[0], engine.generate([request])[0]
        tokens += len(plain.tokens)
        two_ways = logits_two_ways(target, engine.how.most, decode.repetition_penalty)
        tie = prove_tie(two_ways, prompt.tokens, plain.tokens, ours.tokens)
        if tie is not None and (decode.exact or not tie.proven):
            wrong.append(f"{prompt.id} at token {tie.position + 1}")
        elif tie is not None:
            ties += 1
    same = len(prompts) - ties - len(wrong)
    words = f"{same} of {len(prompts)} greedy answers ({tokens} tokens) equal plain decoding, {ties} up to a proven tie"
    if wrong:
        words += f"; unexplained: {', '.join(wrong)}"
    return [Finding("greedy", not wrong, words)]


def rule_alone(config: Config, pair: Pair, prompts: Sequence[Prompt]) -> list[Finding]:
    """Sampled rounds, recorded: the rule alone on their (p, q), and the target's logits in them."""
    decode = config.decode
    rule = "auto" if decode.rule is Rule.greedy else decode.rule.value
    sampling = replace(
        sampling_of(decode),
        temperature=decode.temperature or config.verify.temperature,
        repetition_penalty=1.0,  # counts the text so far: p and q would not be the logits' own
    )
    recorder = _Recorder()
    engine = Engine.configured(
        pair.target, pair.draft, replace(decode, rule=Rule(rule)), observe=recorder.observe
    )
    recorded: list[Recorded] = []
    differences: list[float] = []
    rounding = 0.0
    for prompt in prompts:
        request = _request(config, pair.target, prompt, sampling)
        recorder.rounds.clear()
        (result,) = engine.generate([request])
        text = [*prompt.tokens, *result.tokens]
        plain = _plain_logits(pair.target, text)
        for seen in recorder.rounds:
            differences += _differences(seen, result.tokens, plain[len(prompt.tokens) - 1 :])
        rounding = max(rounding, _rounding(pair.target, prompt.tokens), _least(plain))
        recorded += [
            _recorded(seen, sampling) for seen in recorder.rounds if seen.trial.proposal.tokens.numel()
        ]
    if not recorded:
        raise UserError("No round drafted anything: there is no rule to test. Raise decode.max_new_tokens.")
    every = max(1, len(recorded) // config.verify.rounds)
    return [
        _rule_finding(config, recorded[::every][: config.verify.rounds], rule),
        _logits_finding(differences, rounding),
    ]


def _rule_finding(config: Config, recorded: Sequence[Recorded], rule: str) -> Finding:
    tests: list[Test] = []
    for number, round_ in enumerate(recorded):
        tests += try_rule(round_, rule, config.verify.draws, config.decode.seed + number)
    each = config.verify.significance / len(tests)
    lowest = min(tests, key=lambda test: test.p_value)
    visible = max(test.visible(each) for test in tests if test.verdicts == config.verify.draws)
    words = (
        f"{len(recorded)} rounds, {config.verify.draws} verdicts each, {len(tests)} chi-square tests: least p-value "
        f"{lowest.p_value:.2g} ({lowest.what}; the limit is {each:.1g}). A total-variation distance of {visible:.3f} "
        "at the first token would have been seen"
    )
    return Finding("rule", lowest.p_value >= each, words)


def _logits_finding(differences: Sequence[float], rounding: float) -> Finding:
    largest, limit = max(differences), TIMES_ROUNDING * rounding
    words = (
        f"{len(differences)} accepted positions after keep and rollback: largest difference to a plain forward "
        f"{largest:.2g}, the library's own two ways differ by {rounding:.2g} (limit {limit:.2g})"
    )
    return Finding("logits", largest <= limit, words)


class _Recorder:
    """Keeps a single stream's rounds."""

    def __init__(self) -> None:
        self.rounds: list[Seen] = []

    def observe(self, rows: list[Row], trial: Trial, logits: Tensor) -> None:
        self.rounds.append(Seen(len(rows[0].tokens), trial, logits[0].clone()))


def _recorded(seen: Seen, sampling: Sampling) -> Recorded:
    return Recorded(seen.trial.proposal, distributions(seen.logits[None], [sampling]), seen.trial.shape)


def _differences(seen: Seen, answer: Sequence[int], plain: Tensor) -> list[float]:
    """max |Δlogit| after the pending token and each accepted one that the answer keeps.

    plain: [A, V], row i the logits that answer token i was chosen by.
    """
    proposal, found, node = seen.trial.proposal, [], 0
    parents = seen.trial.shape.parents[0].tolist() if seen.trial.shape is not None else None
    drafted = proposal.tokens[0].tolist()[: proposal.length[0]]
    for place in range(seen.before, len(answer)):
        found.append(float((seen.logits[node].double() - plain[place].double()).abs().max()))
        below = [
            index + 1
            for index, token in enumerate(drafted)
            if token == answer[place] and (parents[index] if parents else index - 1) == node - 1
        ]
        if not below:
            break
        node = below[0]
    return found


@torch.inference_mode()
def _plain_logits(target: Target, text: Sequence[int]) -> Tensor:
    """[T, V] by one forward of the model itself, without a cache."""
    return target.model(torch.tensor([list(text)], device=target.device), use_cache=False).logits[0]


@torch.inference_mode()
def _rounding(target: Target, prompt: Sequence[int], tokens: int = 8) -> float:
    """How far transformers' own cached decoding and one plain forward are apart, on a few tokens."""
    ids = torch.tensor([list(prompt)], device=target.device)
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        pad_token_id=0,
    )
    stepped = torch.cat(out.logits)
    whole = _plain_logits(target, out.sequences[0].tolist())[len(prompt) - 1 : -1]
    # generate gives float32 whatever the model computes in; so the other side is rounded to it too.
    return float((stepped - whole[: len(stepped)].float()).abs().max())


def _least(logits: Tensor) -> float:
    """Below this a difference means nothing in the logits' own format."""
    return TIMES_EPSILON * torch.finfo(logits.dtype).eps * float(logits.abs().max()) / TIMES_ROUNDING


def _request(config: Config, target: Target, prompt: Prompt, sampling: Sampling) -> Request:
    decode = config.decode
    return Request(
        list(prompt.tokens),
        decode.max_new_tokens,
        sampling,
        decode.seed,
        target.eos,
        prompt.id,
        tuple(decode.stop),
    )
