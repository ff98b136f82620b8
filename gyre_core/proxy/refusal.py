"""What the proxy says instead of an answer: one exception for every refusal; dialects write it in their own form."""

from enum import StrEnum

from gyre_core.errors import ProxyError


class RefusalKind(StrEnum):
    """Why a request is refused; dialects map it to their error types and status codes."""

    BAD_REQUEST = "bad_request"  # malformed or unreadable
    CONTEXT_LENGTH = "context_length"  # the prompt leaves no room to sample
    AUTHENTICATION = "authentication"  # no key, or a wrong one
    FORBIDDEN = "forbidden"  # a sealed session, or one that used up its budget
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"  # engines or the journal failed: the same request may succeed later
    INTERNAL = "internal"  # a fault of ours


class Refusal(ProxyError):
    """A request that gets an error body. `retry_after_s` is sent with UNAVAILABLE."""

    def __init__(self, kind: RefusalKind, message: str, *, retry_after_s: int = 2) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s

    def again(self) -> "Refusal":
        """The same refusal without what led to it."""
        return Refusal(self.kind, self.message, retry_after_s=self.retry_after_s)


def prompt_too_long(num_tokens: int, context_length: int) -> Refusal:
    """A prompt that leaves no room to sample, in the words that make harnesses compact their history."""
    return Refusal(
        RefusalKind.CONTEXT_LENGTH,
        f"prompt is too long: {num_tokens} tokens > {context_length - 1} maximum. This model's maximum context length "
        f"is {context_length} tokens. Please reduce the length of the messages.",
    )


def bad_request(message: str) -> Refusal:
    """A 400."""
    return Refusal(RefusalKind.BAD_REQUEST, message)
