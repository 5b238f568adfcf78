"""Choose the settings of private training: `python benchmarks/private_training.py mnist --out build/private-mnist`.

The paper's network for the data set, without biases, learns from the full batch with clipped gradients, momentum 0.9
and a step size that falls linearly to 0. (Biases would use a part of the clip norm in every record.) Records are
centred by their mean, which is opened with noise, and have norm 1: see `cgd.experiments.normalisation`.

For every ε, the settings are chosen in turn, each with the best of the others so far: by the accuracy of one model on
the last sixth of the training records after a private training on the others. The test records are not used. What the
choice reveals about training records is not accounted for, as in other publications. Five confined participants, one of
which may collude, use the same settings, with origins of their own δ. So does DP-SGD by Opacus with the full batch: it
has the same steps, clipping and accountant.

The chosen settings are printed as runs of a spec file, such as table-6.toml of the paper's experiments: `cgd reproduce`
trains each of them once on all training records, and tests it once.

Every finished run is stored in the folder of --out, and a run in progress beside it: the same command continues. The
file choice.json there has all settings that were tried. A step takes about a second of a core, everything less than an
hour of an idle core for each data set.
A trial: `private_training.py mnist --samples 600 --steps 3 --lr 4 --epsilon 8 --out build/trial`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from cgd.experiments.runner import ResultStore
from cgd.experiments.spec import RunSpec
from cgd.files import write_file

if TYPE_CHECKING:
    from collections.abc import Sequence

DP_DELTA, MOMENTUM, STATISTICS_SHARE, PARTICIPANTS = 1e-5, 0.9, 0.02, 5


@dataclass(frozen=True)
class Task:
    """A data set, and the values to choose from; the search starts with the first of each.

    Attributes:
        hidden: width of the hidden layer, as in the paper.
        confined_delta: δ of confined participants.
        epsilon: values of ε, those of the paper's table.
        choices: values of each setting, in the order in which the settings are chosen.
        records: number of training records, the full batch.
        own: values for single ε, in place of those in `choices`.
    """

    hidden: int
    confined_delta: float
    epsilon: tuple[float, ...]
    choices: dict[str, tuple[Any, ...]]
    records: int
    own: dict[float, dict[str, tuple[Any, ...]]] = field(default_factory=dict)


TASKS = {
    "mnist": Task(
        256,
        0.02,
        (8.0, 2.0, 0.5),
        {"lr": (4.0, 9.0, 14.0), "steps": (165,), "clip": (1.0,), "delta": (0.05,)},
        60_000,
        {8.0: {"lr": (14.0, 9.0), "steps": (165, 330)}, 0.5: {"lr": (4.0, 9.0)}},
    ),
    "cifar10-features": Task(
        1024,
        0.01,
        (8.0, 4.0, 2.0),
        {"lr": (16.0, 32.0, 8.0), "steps": (80, 160), "clip": (1.0,), "delta": (0.1,)},
        50_000,
    ),
}


@dataclass(frozen=True)
class Setting:
    """The settings that are chosen for an ε."""

    epsilon: float
    lr: float
    steps: int
    clip: float
    delta: float

    def as_run(self, data: str) -> dict[str, Any]:
        """Return the run of one model, as in a spec file."""
        privacy = {
            "epsilon": self.epsilon,
            "delta": DP_DELTA,
            "clip": self.clip,
            "statistics_share": STATISTICS_SHARE,
        }
        return {
            "method": "private-centralised",
            "data": data,
            "normalise": "centred",
            "hidden": [TASKS[data].hidden],
            "bias": False,
            "start": "zeros",
            "delta": self.delta,
            "steps": self.steps,
            "lr": self.lr,
            "momentum": MOMENTUM,
            "schedule": "linear",
            "privacy": privacy,
        }

    def as_confined_run(self, data: str) -> dict[str, Any]:
        """Return the run of confined participants, as in a spec file."""
        confined = {"method": "cgd", "rows": PARTICIPANTS, "delta": TASKS[data].confined_delta}
        return {**self.as_run(data), **confined}

    def as_opacus_run(self, data: str) -> dict[str, Any]:
        """Return the run of DP-SGD by Opacus, as in a spec file."""
        own = {"epsilon": self.epsilon, "dp_delta": DP_DELTA, "clip": self.clip, "batch": TASKS[data].records}
        shared = {name: value for name, value in self.as_run(data).items() if name != "privacy"}
        return {**shared, "method": "dp-sgd", **own}


class Search:
    """Private trainings on a part of the training records, each run once, and their accuracies on the other part."""

    def __init__(self, folder: Path, data: str, samples: int, seed: int) -> None:
        self.tried: dict[Setting, float] = {}
        self._store, self._data = ResultStore(folder), data
        self._extra = {"samples": samples, "seed": seed, "measure": "validation", "evaluations": 1}

    def accuracy(self, setting: Setting) -> float:
        """Return the accuracy on the last sixth of the training records."""
        if setting not in self.tried:
            spec = RunSpec.from_table({**setting.as_run(self._data), **self._extra}, "private_training.py")
            self.tried[setting] = fmean(self._store.run(spec).last.accuracy)
            print(setting, f"{self.tried[setting]:.2%}", flush=True)
        return self.tried[setting]

    def best(self, first: Setting, choices: dict[str, Sequence[Any]]) -> Setting:
        """Return the best setting, varying one value after the other."""
        best = first
        for name, values in choices.items():
            settings = [best, *(replace(best, **{name: value}) for value in values)]
            best = max(settings, key=self.accuracy)
        return best


def as_toml(run: dict[str, Any]) -> str:
    """Return a run as a table of a spec file."""
    lines = ["[[run]]"]
    for name, value in run.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = f"{{ {', '.join(f'{key} = {json.dumps(each)}' for key, each in value.items())} }}"
        lines.append(f"{name} = {text}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, or continue, the search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=TASKS)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--epsilon", type=float, nargs="+")
    for name, kind in (("lr", float), ("steps", int), ("clip", float), ("delta", float)):
        parser.add_argument(f"--{name}", type=kind, nargs="+", help="values to choose from")
    parser.add_argument("--samples", type=int, default=0, help="training records, from the first; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    task = TASKS[options.data]
    search = Search(options.out, options.data, options.samples, options.seed)
    chosen: list[Setting] = []
    for epsilon in options.epsilon or task.epsilon:
        offered = {**task.choices, **task.own.get(epsilon, {})}
        choices = {name: getattr(options, name) or values for name, values in offered.items()}
        first = {name: values[0] for name, values in choices.items()}
        chosen.append(search.best(Setting(epsilon, **first), choices))
        content = {
            "data": options.data,
            "tried": [{**asdict(each), "accuracy": round(value, 5)} for each, value in search.tried.items()],
            "chosen": [asdict(each) for each in chosen],
        }
        write_file(options.out / "choice.json", json.dumps(content, indent=1) + "\n")
    for each in chosen:
        runs = each.as_run(options.data), each.as_confined_run(options.data), each.as_opacus_run(options.data)
        print(*map(as_toml, runs), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
