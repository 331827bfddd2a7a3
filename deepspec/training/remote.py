"""Features from servers that run the target elsewhere (`features.source=server`)."""

import time
from collections.abc import Callable, Sequence

import httpx
import torch

from deepspec.artifacts import fingerprint
from deepspec.data.protocol import back_off, base_url, key_header, may_pass, retry_after, time_limits
from deepspec.drafts.contract import TargetModel
from deepspec.errors import UserError
from deepspec.target import Captured, Target
from deepspec.target.features.wire import MEDIA_TYPE, Malformed, identity_of, question, read_answer
from deepspec.training.batches import RowBatch
from deepspec.training.memory import FeatureMemory, remembered

SETTING, KEY = "features.servers", "DEEPSPEC_API_KEY"
PATIENCE = 600.0  # seconds without a byte after which an answer has failed


class FromServer:
    """Rows' features, asked for batch by batch; the order is the trainer's own, so that a restart of either side loses
    and repeats nothing.

    target: the target's edges, or all of it. seconds: how long servers may be away before training stops. batch_size:
    rows of a question; None = each of the draft's batches as one. memory: rows it holds are not asked for again; with it
    rows are asked for one by one, see `FeatureMemory`. made_by, resume: commands for messages. `UserError`
    for servers that cannot be reached, run another target or refuse.
    """

    def __init__(
        self,
        target: Target,
        layers: Sequence[int],
        servers: Sequence[str],
        *,
        seconds: float,
        made_by: str,
        resume: str,
        batch_size: int | None = None,
        memory: FeatureMemory | None = None,
        ahead: int = 0,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not servers:
            raise UserError(
                f"features.source=server needs {SETTING}: the URL of at least one. Start one: {made_by}"
            )
        self.whole, self.layers, self.batch_size, self.ahead = target, list(layers), batch_size, ahead
        self.target: TargetModel = target
        self.memory = memory if memory is not None and memory.gib > 0 else None
        self.device = target.device
        self.urls = [base_url(url, SETTING, KEY) for url in servers]
        self.seconds, self.made_by, self.resume = seconds, made_by, resume
        self.sleep, self.clock = sleep, clock
        self.client = httpx.Client(headers=key_header(KEY), timeout=time_limits(PATIENCE))
        self.next = 0
        self._check_targets()

    def captured(self, window: Sequence[RowBatch]) -> list[Captured]:
        return [self._batch(batch) for batch in window]

    def _batch(self, batch: RowBatch) -> Captured:
        if self.memory is not None:

            def capture(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
                found = self._rows(batch, rows)
                return found.features.to(self.whole.dtype), found.last_hidden.to(self.whole.dtype)

            length = batch.tokens.shape[1]
            return Captured(*remembered(batch.ids, length, self.memory, self.device, capture))
        size = self.batch_size or len(batch.ids)
        parts = [self._rows(batch, slice(first, first + size)) for first in range(0, len(batch.ids), size)]
        return Captured(
            *(
                torch.cat([getattr(part, name) for part in parts]).to(self.device, self.whole.dtype)
                for name in ("features", "last_hidden")
            )
        )

    def _rows(self, batch: RowBatch, rows: slice) -> Captured:
        columns = (batch.tokens[rows], batch.positions[rows], batch.documents[rows])
        content = question(*columns, self.layers, self.whole.identity())
        shape = (*columns[0].shape, len(self.layers), self.whole.hidden_size)
        return self._patiently(lambda url: read_answer(self._post(url, content), *shape))

    def _post(self, url: str, content: bytes) -> bytes:
        reply = self.client.post(f"{url}/features", content=content, headers={"Content-Type": MEDIA_TYPE})
        self._check(url, reply)
        return reply.content

    def _patiently(self, ask: Callable[[str], Captured]) -> Captured:
        """One server after the other, with growing pauses, until `seconds` have passed without an answer."""
        began, attempt = self.clock(), 0
        while True:
            url = self.urls[self.next % len(self.urls)]
            self.next += 1
            try:
                return ask(url)
            except (httpx.TransportError, Malformed, _Later) as error:
                why, pause = str(error) or type(error).__name__, getattr(error, "after", None)
            attempt += 1
            if attempt % len(self.urls):
                continue  # another one may answer at once
            pause = back_off(attempt // len(self.urls) - 1) if pause is None else pause
            if self.clock() - began + pause > self.seconds:
                raise UserError(
                    f"No feature server has answered for {self.seconds:g} s (features.server_seconds); the last one "
                    f"said: {url}: {why}. Start it again ({self.made_by}); training goes on from its last checkpoint: "
                    f"{self.resume}"
                )
            self.sleep(pause)

    def _check(self, url: str, reply: httpx.Response) -> None:
        """`_Later` for what may pass, `UserError` for what does not."""
        if reply.is_success:
            return
        why = f"{reply.status_code} {_message(reply)}"
        if reply.status_code in (401, 403):
            raise UserError(f"{url} refuses the key ({reply.status_code}); it is read from {KEY}.")
        if reply.status_code != 409 and may_pass(reply.status_code):  # 409: another target, now and later
            raise _Later(why, retry_after(reply.headers))
        raise UserError(f"{url} refuses to give features: {why}")

    def _check_targets(self) -> None:
        """Each server that answers runs this very target; at least one does answer."""
        mine, away = identity_of(self.whole.identity()), []
        for url in self.urls:
            try:
                reply = self.client.get(f"{url}/features")
                self._check(url, reply)
                theirs = reply.json()
                other, name = theirs["target"], theirs["fingerprint"]
            except (httpx.TransportError, _Later) as error:
                away.append(f"{url}: {error}")
                continue
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{url} is no feature server: GET {url}/features gives no description."
                ) from error
            if name != fingerprint(mine):
                differing = [key for key in mine if other.get(key) != mine[key]] or ["protocol"]
                raise UserError(
                    f"{url} runs another target: its {differing[0]} is {other.get(differing[0])}, here it is "
                    f"{mine.get(differing[0])}."
                )
        if len(away) == len(self.urls):
            raise UserError(
                f"No feature server can be reached ({'; '.join(away)}). Start one: {self.made_by}"
            )


class _Later(Exception):
    """Worth another try; after: seconds that the server asked for."""

    def __init__(self, why: str, after: float | None) -> None:
        super().__init__(why)
        self.after = after


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.reason_phrase
