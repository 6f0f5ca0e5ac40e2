"""The tables of `python -m benchmarks.published`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.harness import Row, ran, table
from benchmarks.published.rows import TIME
from benchmarks.published.shares import fit_two_shares

NEAR_MIB, NEAR = 0.5, 0.0005
"""A predicted peak is exact enough within NEAR_MIB MiB or this share (NEAR) of the measured one."""
MODEL_NEAR = 0.015
MIN_ROWS_FOR_TWO_SHARES = 4
"""How many rows of a card are needed to fit two shares."""


NOTES = """## Notes

- *Fitted constant.* The scripts of embeddings, distillation and preference losses also run
  torch.compile in the same process, and what is on the card before their calls is more than they
  build: the same bytes in every row of a series, which no row tells. For the two series of
  embeddings they are 3 times the weights of all sizes of width 4096, and 2 times those of width
  768 more, so compiled modules of earlier calls are the likely holders. Each row's constant is
  fitted on the other rows of its series, not on itself. Without it these rows are too low by the
  constant. Scripts without torch.compile need none.
- *distill_jsd_loss.* Whether this release divides the logits by the temperature in place could
  not be read; the slope of the four rows says that it does not.
- *fused_linear_orpo_loss.* The script was changed between the two series of rows, on the day that
  their dates tell.
- *FSDP2 in torchtitan.* Its log has what the allocator reserved, predicted here with PyTorch's
  default settings. On 8 cards 68.3 GiB are allocated and 82.6 reserved, as buffers that are
  gathered and reduced lie in pools of other streams; 4.0 of them are results of each block's
  last product, which nothing reads: a checkpoint whose policy names kinds of operators keeps
  them. How much is reserved depends on when Python's variables let go of what a checkpointed
  block has made, which is rehearsed. The launch script of its repository asks for expandable
  segments; with them less would be reserved than was measured. Which setting these runs had is
  not stated. Not modelled: torchtitan keeps the last block's parameters whole from the forward to
  the backward pass (0.4 GiB allocated). The card is an H100 with slower memory and at most 500 W,
  whose rates are not published, so its share is of a usual H100's rates and not used elsewhere.
- *Variables.* Where the forward pass has the peak (`fused_linear_jsd`, `distill_jsd_loss`), it
  includes tensors that only a variable of `forward` still holds. A planned step frees them."""


def markdown(report: Row) -> str:
    rows = report["rows"]
    done = [row for row in rows if "predicted" in row]
    peaks = [row for row in done if row["level"] == "op" and row["metric"] != TIME]
    times = [row for row in done if row["level"] == "op" and row["metric"] == TIME]
    models = [row for row in done if row["level"] == "model"]
    parts = [
        "# Measured by others, predicted here",
        ran(report),
        *(["## Peaks of modules", peaks_text(peaks), _table(peaks, "MiB")] if peaks else []),
        *(["## Times of modules", times_text(times), _table(times, "ms")] if times else []),
        *(
            ["## Whole models", models_text(models), _table(models, "GB or GiB, as in the row")]
            if models
            else []
        ),
        NOTES,
        *_not_predicted([row for row in rows if "reason" in row]),
    ]
    return "\n\n".join(parts) + "\n"


def peaks_text(rows: Sequence[Row]) -> str:
    """Sentences on how many peaks are exact enough, without and with a fitted constant."""
    plain = [row for row in rows if "constant" not in row]
    fitted = [row for row in rows if "constant" in row]
    lines = [_accuracy_sentence(plain, "without any fitted figure")] if plain else []
    if fitted:
        n_series = len({json.dumps([row["op"], row["config"], row["gpu"]]) for row in fitted})
        lines.append(
            _accuracy_sentence(
                fitted,
                f"in {n_series} series, whose constant (what earlier calls in the process have "
                "left on the card) is fitted on the other rows of the series,",
            )
        )
    return " ".join(lines)


def _accuracy_sentence(rows: Sequence[Row], how: str) -> str:
    met = sum(is_exact(row) for row in rows)
    worst = max(rows, key=lambda row: abs(row["off"]))
    return (
        f"{met} of {len(rows)} rows {how} are within 0.05 % or 0.5 MiB; the largest error is "
        f"{100 * worst['off']:+.3f} %."
    )


def is_exact(row: Row) -> bool:
    return abs(row["predicted"] - row["measured"]) <= NEAR_MIB or abs(row["off"]) <= NEAR


def times_text(rows: Sequence[Row]) -> str:
    """Sentences on the errors of times and the shares of the peak rates that cards have reached."""
    errors = sorted(abs(row["off"]) for row in rows)
    lines = [f"{len(rows)} rows: the median error is {100 * statistics.median(errors):.1f} %,"]
    lines.append(f"the largest {100 * errors[-1]:.1f} %, by the fitted shares of `shares.py`")
    lines.append("(a card without one: their median). Shares of the peak rates reached by")
    for card in sorted({_card_name(row) for row in rows}):
        shares = sorted(row["rate_share"] for row in rows if _card_name(row) == card)
        lines.append(
            f"{card}: {shares[0]:.2f} to {shares[-1]:.2f}, median {statistics.median(shares):.2f}"
        )
        if len(shares) > 1:
            off = [100 * error for error in leave_one_out_errors(shares)]
            lines.append(
                f"(with the share of the other rows for each: median error "
                f"{statistics.median(off):.1f} %, largest {max(off):.1f} %)"
            )
        lines[-1] += "."
        kinds = [
            (*row["kinds"], row["measured"])
            for row in rows
            if _card_name(row) == card and "kinds" in row
        ]
        lines += [_two_shares_text(kinds)] if len(kinds) >= MIN_ROWS_FOR_TWO_SHARES else []
    lines += [ratios] if (ratios := _ratios_text(rows)) else []
    return " ".join(lines)


def _two_shares_text(rows: Sequence[tuple[float, float, float]]) -> str:
    """Sentences on whether the rows tell a share for products from one for other operators."""
    found = fit_two_shares(rows)
    parts = sorted(others / products for products, others, _ in rows)
    (products, others), errors = found.factors, [100 * error for error in found.errors]
    return (
        f"With two shares, of products and of other operators: at peak rates others take "
        f"{parts[0]:.2f} to {parts[-1]:.2f} of the products' time (condition number "
        f"{found.condition:.0f}), and the measured times are {products:.2f} ± "
        f"{found.spreads[0]:.2f} times those of products and {others:.2f} ± "
        f"{found.spreads[1]:.2f} times those of others. "
        f"The best shares that are at most 1 are {found.shares[0]:.2f} and {found.shares[1]:.2f}; "
        f"fitted on the other rows, they give each row with a median error of "
        f"{statistics.median(errors):.1f} %, the largest {max(errors):.1f} %."
    )


def leave_one_out_errors(shares: list[float]) -> list[float]:
    """The relative error of each time when it is predicted by the median of the other shares."""
    others = (shares[:at] + shares[at + 1 :] for at in range(len(shares)))
    pairs = zip(shares, map(statistics.median, others), strict=True)
    return [abs(share / expected - 1.0) for share, expected in pairs]


def models_text(rows: Sequence[Row]) -> str:
    """Sentences on the errors of peaks and the shares of the peak rates that steps have reached."""
    worst = max(abs(row["off"]) for row in rows)
    shares = [f"{_card_name(row)} {row['rate_share']:.2f}" for row in rows if "rate_share" in row]
    n_met = sum(abs(row["off"]) <= MODEL_NEAR for row in rows)
    return (
        f"Set-ups that are described well enough: {len(rows)}, of which {n_met} are within "
        f"{100 * MODEL_NEAR:.1f} %; the largest error is {100 * worst:.2f} %. Shares of the peak "
        f"rates that their steps have reached: {', '.join(shares) or 'not measured'}. "
        f"{_ratios_text(rows)}"
    ).strip()


def _ratios_text(rows: Sequence[Row]) -> str:
    """A sentence on the bounds that the rows give for (share of products / share of others)."""
    found = [row["ratio"] for row in rows if row.get("ratio")]
    if not found:
        return ""
    least, largest = min(low for low, _ in found), max(high for _, high in found)
    return (
        f"The share of products over that of other operators is between {least:.2f} and "
        f"{largest:.2f}, as no share is above 1: one measured time for both tells no more."
    )


def _table(rows: Sequence[Row], unit: str) -> str:
    head = ("what", "card", f"measured ({unit})", "predicted", "off", "fitted constant")
    return table(head, map(_cells, rows))


def _cells(row: Row) -> Iterator[str]:
    yield _title(row)
    yield _card_name(row)
    yield f"{row['measured']:.3f}".rstrip("0").rstrip(".")
    yield f"{row['predicted']:.3f}".rstrip("0").rstrip(".")
    yield f"{100 * row['off']:+.3f} %"
    yield f"{row['constant']:.2f}" if "constant" in row else ""


def _title(row: Row) -> str:
    if row.get("level") == "model":
        names = (row.get(name) for name in ("model", "technique", "source"))
        return ", ".join(str(name) for name in names if name)
    config, x = row.get("config"), row.get("x")
    if not isinstance(config, dict) or not isinstance(x, dict):
        return f"`{json.dumps(row)[:100]}`".replace("|", "/")
    settings = {**config, **x}
    shown = {k: v for k, v in settings.items() if isinstance(v, int | str) and k != "mode"}
    words = ", ".join(
        f"{name} {str(value).removeprefix('torch.')}" for name, value in shown.items()
    )
    return f"{row.get('op')} ({words})".replace("|", "/")


def _card_name(row: Row) -> str:
    return str(row.get("gpu")).removeprefix("NVIDIA ").removeprefix("GeForce ")


def _not_predicted(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    cells = ((_title(row), _card_name(row), row["reason"].replace("|", "/")) for row in rows)
    return ["## Not predicted", table(("what", "card", "why"), cells)]
