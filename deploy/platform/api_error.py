"""Defines the error of a failed call of one of Google's services, and what it says of a retry."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.base.errors import reason


class ApiError(Exception):
    """Reports a failed call.

    `code`: its HTTP status, 0 without a response; `login`: the command that fixes a 401.

    `sent`: False if the request certainly did not reach the service.
    """

    final = False  # True if another tier or region does not help; the message then says what to do

    def __init__(
        self, code: int, message: str, login: str = "gcloud auth login", *, sent: bool = True
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code
        self.login = login
        self.sent = sent
        self._service_fault = code >= 500 and code != 501  # 501: the service lacks this method

    @property
    def quota(self) -> bool:
        """Returns whether a machine quota is exhausted, which a retry does not fix; rate limits do
        not count."""
        text = str(self).lower()
        rate_limit = re.search(r"per (\d+ )?(minute|second)|rate_?limit_?exceeded", text)
        return not self.final and self.code == 429 and "quota" in text and not rate_limit

    @property
    def unavailable(self) -> bool:
        """Returns whether this region lacks quota or machines for the job, which another region or
        tier may have."""
        missing = re.search(
            r"(machine|accelerator|gpu).* (not|un)\W?(supported|available|offered|exist|found)\b"
            r"|not (supported|available|offered) in (the )?(region|location|zone)",
            str(self),
            re.IGNORECASE,
        )
        return self.quota or (self.code in (400, 404) and missing is not None and not self.final)

    @property
    def transient(self) -> bool:
        """Returns whether a retry may help."""
        return self._service_fault or (self.code in (0, 408, 429) and not self.quota)

    @property
    def may_have_succeeded(self) -> bool:
        """Returns whether the service may have carried out the request although the call failed."""
        return self.sent and (self.code == 0 or self._service_fault)


class BrokenClientError(ApiError):
    """Reports a fault of this machine's client program or network that every call would meet;
    states the fix."""

    final = True
    transient = False


@contextmanager
def unreadable_as_lost(of_parser: type[Exception] = ValueError) -> Iterator[None]:
    """Raises ApiError, as if the response were lost, if the block cannot parse it.

    `of_parser`: an exception of the parser in use, which is converted like ValueError, KeyError and
        the like.
    """
    try:
        yield
    except (of_parser, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ApiError(0, f"the response is not one of this service: {reason(error)}") from None
