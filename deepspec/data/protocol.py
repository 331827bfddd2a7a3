"""What every client of an OpenAI-compatible server shares: its address, the key, and which failures may pass."""

import os
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from deepspec.errors import UserError

KEY = "OPENAI_API_KEY"
RETRIED = (408, 409, 425, 429)  # and every 5xx
REFUSED = (401, 403, 404)  # wrong for every prompt
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds
LONGEST_RETRY_AFTER = 600.0
CONNECT_SECONDS = 10.0


def base_url(url: str, setting: str, variable: str = KEY) -> str:
    """`http://host:8000` → `http://host:8000/v1`; a path that is there stays. `UserError` names `setting`."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{setting}: {url!r} is not a URL like http://host:8000/v1.") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{setting}: {url!r} is not a URL like http://host:8000/v1.")
    if parsed.userinfo or parsed.query:
        raise UserError(f"{setting}: no passwords or keys in URLs; set {variable} in the environment.")
    path = parsed.path.rstrip("/")
    return str(parsed.copy_with(path=path or "/v1"))


def key_header(variable: str = KEY) -> dict[str, str]:
    """The key of an environment variable as a header, none where it is not set; no message ever has it in it."""
    key = os.environ.get(variable, "").strip()
    if not key:
        return {}
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"The key in {variable} has blanks or other characters that no key has. Set it anew.")
    return {"Authorization": f"Bearer {key}"}


def time_limits(seconds: float) -> httpx.Timeout:
    """seconds: without a byte; a connection is there sooner or not at all."""
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))


def may_pass(status: int) -> bool:
    """Whether another try may succeed."""
    return status in RETRIED or status >= 500


def back_off(attempt: int) -> float:
    """Seconds before the next try: doubled with each one (attempt 0, 1, ...), less a random part."""
    return min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * random.uniform(0.5, 1.0)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks for: the header has them, or a date."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)
