"""Compare peaks and times that others measured on their GPUs with this project's predictions.

    python -m benchmarks.published                      # the rows in benchmarks/data/published
    python -m benchmarks.published --rows FILE.json     # other rows of the same format

Every row names its source. Nothing is measured here.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.published.errors import NotPredictedError
from benchmarks.published.predict import Prediction, predict_row
from benchmarks.published.tables import markdown

Row = harness.Row

FOLDER = Path(__file__).parents[1]
DATA = FOLDER / "data" / "published"
RESULT = FOLDER / "results" / "published.json"


def main() -> None:
    arguments = harness.parser("published", __doc__)
    arguments.add_argument("--rows", type=Path, nargs="+", help="files of rows; default: all known")
    options = arguments.parse_args()
    known = rows_in(sorted(DATA.glob("*.json")))
    out = options.out or (None if options.rows else RESULT)
    rows = compare_rows(rows_in(options.rows), known) if options.rows else compare_rows(known)
    report = {"circumstances": harness.circumstances(), "rows": rows}
    print(markdown(report))
    harness.write(out, report, markdown)


def rows_in(files: Iterable[Path]) -> list[Any]:
    """All rows of these JSON files, each of which has a list of rows or an object with a list under
    "rows". Exits with a message if one has neither."""
    found: list[Any] = []
    for path in files:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            sys.exit(f"{path}: {error}")
        rows = content.get("rows") if isinstance(content, dict) else content
        if not isinstance(rows, list):
            sys.exit(f'{path}: a list of rows is needed, or an object with one under "rows"')
        found += rows
    return found


def compare_rows(rows: Iterable[Any], known: Iterable[Row] = ()) -> list[Row]:
    """Each row with the prediction for it and the relative error, or the reason why there is none.

    known: further rows. If they are of the same series as one of `rows`, they help to fit the
        constant of the series; see `_compare_series`.
    """
    results: list[Row] = []
    by_series: defaultdict[str, list[tuple[Row, Prediction]]] = defaultdict(list)
    for row in rows:
        result = dict(row) if isinstance(row, dict) else {"row": row}
        results.append(result)
        prediction = _try_predict(row, result)
        if prediction is None:
            continue
        if prediction.is_up_to_a_constant:
            by_series[_series_key(row)].append((result, prediction))
            continue
        _add_comparison(result, prediction.value, prediction.measured)
        if prediction.rate_share is not None:
            result |= {"rate_share": prediction.rate_share, "ratio": prediction.ratio}
        if prediction.kinds is not None:
            result["kinds"] = prediction.kinds
    others = [row for row in known if _series_key(row) in by_series]
    for name, series in by_series.items():
        further = [(row, _try_predict(row, {})) for row in others if _series_key(row) == name]
        _compare_series(series, [(row, each) for row, each in further if each is not None])
    return results


def _try_predict(row: Any, result: Row) -> Prediction | None:
    """The prediction; None if there is none, with the reason in `result`."""
    try:
        return predict_row(row)
    except NotPredictedError as error:
        result["reason"] = str(error)
    except Exception as error:  # noqa: BLE001 (rows of others: one must not stop the rest)
        result["reason"] = f"predicting it failed: {type(error).__name__}: {error}"[:300]
    return None


def _series_key(row: Row) -> str:
    """Rows of one series differ only in `x` and in what was measured."""
    fields = ("op", "provider", "config", "gpu", "metric", "version")
    return json.dumps([row.get(name) for name in fields], sort_keys=True)


def _add_comparison(result: Row, value: float, measured: float) -> None:
    result |= {"predicted": value, "measured": measured, "off": value / measured - 1.0}


def _compare_series(
    series: list[tuple[Row, Prediction]], further: list[tuple[Row, Prediction]]
) -> None:
    """Compare rows whose predictions lack an unknown constant, the same for the whole series.

    For each row, the constant is the median of measured minus predicted over the rows with another
    `x`, those of `further` included.
    """
    for result, prediction in series:
        constants = {
            json.dumps(row["x"], sort_keys=True): each.measured - each.value
            for row, each in (*further, *series)
            if row["x"] != result["x"]
        }
        if not constants:
            result["reason"] = (
                "without what torch.compile has kept of earlier calls in the process the peak is "
                f"{prediction.value:.2f}, {prediction.measured - prediction.value:.2f} less; "
                "another row of the series is needed to know it"
            )
            continue
        constant = statistics.median(constants.values())
        _add_comparison(result, prediction.value + constant, prediction.measured)
        result["constant"] = constant


if __name__ == "__main__":
    main()
