"""The one error a user's wrong input raises; free of torch, so that a laptop can read runs quickly."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A user's input is wrong; the message is one sentence that says what, where and what to do.

    What a terminal would obey or break a line at, as names in a damaged file may hold, is shown and not sent.
    """

    def __str__(self) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


class Stopped(KeyboardInterrupt):
    """A run ended before its last step because someone wanted that; its newest checkpoint holds the last step taken."""

    def __init__(self, message: str, *, is_preempted: bool = False) -> None:
        super().__init__(message)
        self.is_preempted = is_preempted  # the machine was taken away: whoever started the run should start it again


ADVICE = {  # what a person can do about what the system refuses
    (errno.ENOENT,): "make what is missing, or give another path",
    (errno.ENOSPC, errno.EDQUOT): "free space there, or give another place",
    (errno.EFBIG,): "the limit of a file's size is reached: raise it (ulimit -f), or give another place",
    (errno.EACCES, errno.EPERM): "get rights there, or give another place",
    (errno.EROFS,): "it can only be read there: give another place",
    (errno.EEXIST, errno.ENOTDIR, errno.EISDIR): "something of another kind has that name: give another path",
    (errno.ENAMETOOLONG,): "give a shorter name",
    (errno.ELOOP,): "links there lead in a circle: mend them",
    (errno.EADDRINUSE,): "end what listens there, or give another port",
    (errno.EMFILE, errno.ENFILE): "too many files are open: raise the limit (ulimit -n)",
}


def advice_for(error: OSError) -> str:
    """Say what a person can do about an error of the system."""
    return next((words for codes, words in ADVICE.items() if error.errno in codes), "look at what is there")


@contextmanager
def explained_damage(where: object, repair: str = "restore it from a copy") -> Iterator[None]:
    """Raise an InputError that says where, for whatever else it is that damaged content makes of reading it."""
    try:
        yield
    except InputError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{where} is damaged ({type(error).__name__}: {reason}): {repair}") from error


def check_range(owner: str, config: object, least: int | float, most: int | float, *names: str) -> None:
    """Raise InputError naming the first of a config's numbers that is not a number from ``least`` to ``most``."""
    for name in names:
        value = getattr(config, name)
        if not least <= value <= most:  # also catches nan
            limit = f"at least {least:g}" if most == float("inf") else f"a number from {least:g} to {most:g}"
            raise InputError(f"{owner}.{name} is {value}: give {limit}")
