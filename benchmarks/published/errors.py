"""The error of rows that have no prediction."""


class NotPredictedError(ValueError):
    """Nothing can be predicted for a row; the message says why."""
