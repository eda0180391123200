"""The one error a user's wrong input raises; free of torch, so that a laptop can read runs quickly."""


class InputError(ValueError):
    """A user's input is wrong; the message is one sentence that says what, where and what to do."""
