"""Peaks and times that others measured on their GPUs, beside this project's predictions.

    python -m benchmarks.published                      # the rows in benchmarks/data/published
    python -m benchmarks.published --rows FILE.json     # other rows of the same format

Every row names its source. Nothing was measured for it here.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.published.errors import NotPredictedError
from benchmarks.published.predict import Prediction, predicted
from benchmarks.published.tables import markdown

Row = harness.Row

FOLDER = Path(__file__).parents[1]
DATA = FOLDER / "data" / "published"
RESULT = FOLDER / "results" / "published.json"
CONSTANT_MIB = 0.5
"""Rows of one series must agree so well on what earlier calls have left on the card."""


def main() -> None:
    arguments = harness.parser("published", __doc__)
    arguments.add_argument("--rows", type=Path, nargs="+", help="files of rows; default: all known")
    options = arguments.parse_args()
    files = options.rows or sorted(DATA.glob("*.json"))
    out = options.out or (None if options.rows else RESULT)
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    report = {"circumstances": harness.circumstances(), "rows": compared(rows)}
    print(markdown(report))
    harness.write(out, report, markdown)


def compared(rows: Iterable[Row]) -> list[Row]:
    """Each row with what is predicted for it and how far that is off, or why nothing is."""
    results: list[Row] = []
    series: defaultdict[str, list[tuple[Row, Prediction]]] = defaultdict(list)
    for row in rows:
        result = dict(row)
        results.append(result)
        try:
            prediction = predicted(row)
        except NotPredictedError as error:
            result["reason"] = str(error)
            continue
        if prediction.is_up_to_a_constant:
            fields = ("op", "provider", "config", "gpu", "metric", "version")
            key = json.dumps([row.get(name) for name in fields])
            series[key].append((result, prediction))
            continue
        _compare(result, prediction.value, prediction.measured)
        if prediction.rate_share is not None:
            result |= {"rate_share": prediction.rate_share, "ratio": prediction.ratio}
    for each in series.values():
        _compare_series(each)
    return results


def _compare(result: Row, value: float, measured: float) -> None:
    result |= {"predicted": value, "measured": measured, "off": value / measured - 1.0}


def _compare_series(series: Sequence[tuple[Row, Prediction]]) -> None:
    """Rows that share an unknown constant: it is the median of what is missing."""
    missing = [prediction.measured - prediction.value for _, prediction in series]
    constant = statistics.median(missing)
    if len(series) < 2 or max(missing) - min(missing) > 2 * CONSTANT_MIB:
        for (result, prediction), left in zip(series, missing, strict=True):
            result["reason"] = (
                f"without what torch.compile has kept of earlier calls in the process the peak is "
                f"{prediction.value:.2f}, {left:.2f} less; a series of rows is needed to know it"
            )
        return
    for result, prediction in series:
        _compare(result, prediction.value + constant, prediction.measured)
        result["constant"] = constant


if __name__ == "__main__":
    main()
