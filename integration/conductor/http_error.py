"""What a client sees of an error: the error object of the OpenAI API, with its HTTP status.

Owns the map from kvpool's errors to statuses. Who calls it: everything of the Conductor that can
refuse a request.
"""

from collections.abc import Mapping
from typing import Final

from kvpool.errors import (
    CapacityError,
    ClosedError,
    KVPoolError,
    TransferTimeoutError,
    UnavailableError,
    UsageError,
)

# What nginx logs for a client that went away. Nobody reads it but the metrics.
CLIENT_GONE: Final = 499
# A message may quote the request; it is for a person.
MESSAGE_CHARACTERS_MAX: Final = 1000


class HttpError(Exception):
    """An answer that is an error object of the OpenAI API.

    Args:
        status: HTTP status, 4xx or 5xx.
        message: For a person: what is wrong and what to do.
        kind: ``type`` of the error object.
        param: The request's field it is about, if any.
        code: Short word for a program, if any.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message[:MESSAGE_CHARACTERS_MAX])
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or ({"retry-after": "1"} if status == 503 else {}))

    def body(self) -> dict[str, object]:
        """Return the error object."""
        return {
            "error": {
                "message": str(self),
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def http_error(error: KVPoolError) -> HttpError:
    """Say over HTTP what an error of the workers means for the client."""
    if isinstance(error, UsageError):
        return HttpError(400, str(error))
    if isinstance(error, CapacityError):
        return HttpError(503, str(error), kind="overloaded_error", code="overloaded")
    if isinstance(error, TransferTimeoutError):
        return HttpError(504, str(error), kind="timeout_error", code="timeout")
    if isinstance(error, UnavailableError | ClosedError):
        return HttpError(503, str(error), kind="unavailable_error", code="worker_unavailable")
    return HttpError(500, str(error), kind="internal_error", code="internal")
