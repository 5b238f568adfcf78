"""Count the records that one member of four reads from a first layer by watching: `python benchmarks/first_layer.py`.

Four members train on a small public table with the default settings of tables (`small_tables.py`). The smallest one
only watches: it divides the sums of the first layer by those of its biases, and reads every record that alone activates
a unit in some step (`cgd.audit.attacks.records`). A record counts if it comes out in every feature within a hundredth
of a standard deviation. The grid has numbers of records, inputs (by table), units and activations; each seed draws the
records, their division and the origins. `results/first-layer.json` has the counts; `tests/audit/test_first_layer.py`
compares the privacy warning with them.

The runs are stored one by one, and a program that was stopped continues. Adult and credit default are read from the
folder in CGD_DATA.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import small_tables
import torch
from rich.console import Console
from rich.table import Table

from cgd.audit.attacks.records import count_exact
from cgd.audit.view import gradient_rows
from cgd.federation.model_section import Model
from cgd.files import write_file

FILE = Path(__file__).parent.parent / "results" / "first-layer.json"
RECORDS = {
    "diabetes": (100, 353),
    "breast-cancer": (100, 455),
    "credit-default": (100, 400, 1600),
    "digits": (400, 1400),
    "adult": (100, 400, 1600),
}
LARGE = {"credit-default": (6400, 24_000), "adult": (6400, 24_000)}
"""Tables and numbers of all members' records, with the validation splits; large ones are measured with fewer models."""
MODELS = {
    **{f"relu {units}": Model("mlp", (units,)) for units in (4, 8, 16, 32, 64)},
    **{f"{name} 32": Model("mlp", (32,), name) for name in ("tanh", "gelu", "sigmoid")},
    "logistic": Model("logistic"),
}
LARGE_MODELS = ("relu 8", "relu 32")
SEEDS = range(10)
LARGE_SEEDS = range(3)


def measure(table: str, records: int, model: str, seed: int) -> dict[str, int]:
    """Return the number of the others' training records, of inputs, and of the records that come out."""
    members = small_tables.draw(table, records, seed)
    trained = small_tables.train(members, MODELS[model], seed)
    return {
        "honest": len(trained.truth.all_y),
        "inputs": members.features,
        "read": count_exact(gradient_rows(trained.view), trained.truth),
    }


def runs() -> list[tuple[str, int, str, int]]:
    """Return all runs: tables, records, models and seeds; a part of each setting first."""
    small = [(seed, table, records, model) for seed in SEEDS for table, sizes in RECORDS.items()
             for records in sizes for model in MODELS]  # fmt: skip
    large = [(seed, table, records, model) for seed in LARGE_SEEDS for table, sizes in LARGE.items()
             for records in sizes for model in LARGE_MODELS]  # fmt: skip
    return [(table, records, model, seed) for seed, table, records, model in small + large]


def name(table: str, records: int, model: str) -> str:
    """Return the key of a setting in the results."""
    return f"{table}, {records} records, {model}"


def summary(found: dict[str, list[dict[str, int]]]) -> Table:
    """Return a table: records that come out in a training, on average and at most, by setting."""
    table = Table("setting", "inputs", "honest", "read on average", "at most", "seeds with a record", box=None)
    for setting, draws in found.items():
        read = [each["read"] for each in draws]
        inputs = sorted({each["inputs"] for each in draws})
        table.add_row(
            setting,
            "–".join(str(each) for each in dict.fromkeys((inputs[0], inputs[-1]))),
            f"{max(each['honest'] for each in draws):,}",
            f"{sum(read) / len(read):.1f}",
            str(max(read)),
            f"{sum(each > 0 for each in read)} of {len(read)}",
        )
    return table


def main() -> None:
    """Run or continue, store the counts and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE, help="the file for the counts")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, int]]] = json.loads(out.read_text()) if out.exists() else {}
    for table, records, model, seed in runs():
        draws = found.setdefault(name(table, records, model), [])
        if len(draws) == seed:
            draws.append(measure(table, records, model, seed))
            write_file(out, json.dumps(found, indent=0) + "\n")
    Console(width=120).print(summary(found))


if __name__ == "__main__":
    main()
