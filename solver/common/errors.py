"""What the command raises for a request that cannot be."""


class UsageError(ValueError):
    """The command line asks for something that cannot be; the message says what would be right."""
