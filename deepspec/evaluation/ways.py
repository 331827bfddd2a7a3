"""Ways of decoding a request that are measured against each other."""

from deepspec.config.schema import DecodeConfig
from deepspec.decoding import Engine
from deepspec.decoding.request import Request, Result
from deepspec.drafts.contract import Drafter
from deepspec.evaluation.baselines import OURS, transformers_decode
from deepspec.evaluation.measure import Decode
from deepspec.target import Target


def plain_way(target: Target, decoder: str = OURS) -> Decode:
    """Plain decoding by this project's loop, or by transformers."""
    return _one(Engine(target)) if decoder == OURS else transformers_decode(target)


def configured_way(target: Target, draft: Drafter | None, decode: DecodeConfig, k: int) -> Decode:
    """As configured, with K drafted tokens a round; without a draft, plain decoding as configured (decode.exact)."""
    return _one(Engine.configured(target, draft, decode, k))


def _one(engine: Engine) -> Decode:
    def decode(request: Request) -> Result:
        return engine.generate([request])[0]

    return decode
