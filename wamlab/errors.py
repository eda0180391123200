"""The one error a user's wrong input raises; free of torch, so that a laptop can read runs quickly."""


class InputError(ValueError):
    """A user's input is wrong; the message is one sentence that says what, where and what to do."""


class Stopped(KeyboardInterrupt):
    """A run ended before its last step because someone wanted that; its newest checkpoint holds the last step taken."""

    def __init__(self, message: str, *, is_preempted: bool = False) -> None:
        super().__init__(message)
        self.is_preempted = is_preempted  # the machine was taken away: whoever started the run should start it again


def check_range(owner: str, config: object, least: int | float, most: int | float, *names: str) -> None:
    """Raise InputError naming the first of a config's numbers that is not a number from ``least`` to ``most``."""
    for name in names:
        value = getattr(config, name)
        if not least <= value <= most:  # also catches nan
            limit = f"at least {least:g}" if most == float("inf") else f"a number from {least:g} to {most:g}"
            raise InputError(f"{owner}.{name} is {value}: give {limit}")
