"""One error tree. The code says what the client should do about it.

    ServingError
    ├── InvalidRequest          invalid_request          change the request (`param` names the field)
    │   ├── InvalidFrame        invalid_frame            the frame could not be read
    │   ├── UnsupportedVersion  unsupported_version      speak a version that HELLO offers
    │   ├── ContextLengthExceeded  context_length_exceeded  shorten the prompt or `max_tokens`
    │   ├── InputTooLarge       input_too_large          send fewer bytes
    │   ├── ModelNotFound       model_not_found          pick a model from /v1/models
    │   ├── DuplicateId         duplicate_id             pick another id, or wait for the first to end
    │   ├── UnknownId           unknown_id               nothing to do: there is no such live request
    │   ├── CacheMiss            cache_miss              `cache: only` found nothing: ask without it
    │   └── BadState            bad_state                the frame does not fit the request's state
    ├── Unauthorized            unauthorized             send a valid key
    ├── Forbidden               forbidden                use a key that may
    ├── OriginRefused           origin_refused           open the page from an allowed origin
    ├── RateLimited             rate_limited             retry after `retry_after_s`
    ├── Overloaded              overloaded               retry after `retry_after_s`
    ├── ResumeExpired           resume_expired           start the request again
    ├── Replaced                replaced                 nothing to do: a RESUME took the stream over
    ├── DeadlineExceeded        timeout                  retry with a longer `timeout_s`
    └── InternalError           internal                 retry once, then report the incident id

Knows nothing of HTTP or WebSockets: the status and close codes are data on the
classes, so the ingress translates in one place.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A `ServingError` as data: what crosses processes and goes into frames."""

    code: str
    message: str
    param: str | None = None
    limit: int | float | None = None
    retryable: bool = False
    retry_after_s: float | None = None


class ServingError(Exception):
    """Base of every error that a client may see.

    Args:
        message: lower case, with the offending value and the limit.
        param: name of the request field at fault, as the client wrote it.
        limit: the bound that was broken, when there is one.
        retry_after_s: seconds after which a retry makes sense.

    Attributes:
        request_id: the client's name for the request that the error is about, when a
            frame told it; a transport's matter, so not part of `info`.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        limit: int | float | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.request_id: str | None = None

    @property
    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=self.message,
            param=self.param,
            limit=self.limit,
            retryable=self.retryable,
            retry_after_s=self.retry_after_s,
        )

    @staticmethod
    def from_info(info: ErrorInfo) -> ServingError:
        """Rebuilds the error that `info` was made from (an unknown code becomes `InternalError`)."""
        return ERROR_BY_CODE.get(info.code, InternalError)(
            info.message, param=info.param, limit=info.limit, retry_after_s=info.retry_after_s
        )


class InvalidRequest(ServingError):
    code = "invalid_request"
    http_status = 400
    openai_type = "invalid_request_error"


class InvalidFrame(InvalidRequest):
    code = "invalid_frame"


class UnsupportedVersion(InvalidRequest):
    code = "unsupported_version"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InputTooLarge(InvalidRequest):
    code = "input_too_large"
    http_status = 413


class ModelNotFound(InvalidRequest):
    code = "model_not_found"
    http_status = 404


class DuplicateId(InvalidRequest):
    code = "duplicate_id"
    http_status = 409


class UnknownId(InvalidRequest):
    code = "unknown_id"
    http_status = 404


class BadState(InvalidRequest):
    code = "bad_state"
    http_status = 409


class CacheMiss(InvalidRequest):
    code = "cache_miss"
    http_status = 404


class Unauthorized(ServingError):
    code = "unauthorized"
    http_status = 401
    openai_type = "authentication_error"


class Forbidden(ServingError):
    code = "forbidden"
    http_status = 403
    openai_type = "permission_error"


class OriginRefused(ServingError):
    code = "origin_refused"
    http_status = 403
    openai_type = "permission_error"


class RateLimited(ServingError):
    code = "rate_limited"
    http_status = 429
    openai_type = "rate_limit_error"
    retryable = True


class Overloaded(ServingError):
    code = "overloaded"
    http_status = 503
    retryable = True


class ResumeExpired(ServingError):
    code = "resume_expired"
    http_status = 404
    openai_type = "invalid_request_error"


class Replaced(ServingError):
    code = "replaced"
    http_status = 409
    openai_type = "invalid_request_error"


class DeadlineExceeded(ServingError):
    code = "timeout"
    http_status = 504
    retryable = True


class InternalError(ServingError):
    code = "internal"
    http_status = 500
    retryable = True


ERROR_BY_CODE: dict[str, type[ServingError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        InvalidFrame,
        UnsupportedVersion,
        ContextLengthExceeded,
        InputTooLarge,
        ModelNotFound,
        DuplicateId,
        UnknownId,
        BadState,
        CacheMiss,
        Unauthorized,
        Forbidden,
        OriginRefused,
        RateLimited,
        Overloaded,
        ResumeExpired,
        Replaced,
        DeadlineExceeded,
        InternalError,
    )
}
