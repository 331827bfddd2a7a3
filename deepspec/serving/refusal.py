"""What a client is told when a request is not answered: a status and OpenAI's error object."""

from typing import Any


class Refusal(Exception):
    """status: of HTTP. kind: the protocol's `type`. param: the field that is wrong. code: the protocol's, for
    programs. after: seconds until it is worth another try."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.after = status, kind, param, code, after

    def body(self) -> dict[str, Any]:
        """The protocol's error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        return {} if self.after is None else {"Retry-After": str(self.after)}


def wrong(param: str, message: str) -> Refusal:
    """A field that cannot be followed."""
    return Refusal(400, message, param=param)


def stopping() -> Refusal:
    """Of a server that takes no more requests."""
    return Refusal(503, "The server is stopping.", kind="server_error", code="stopping", after=30)
