"""Why a row has no prediction."""


class NotPredictedError(ValueError):
    """Says why nothing can be predicted for a row."""
