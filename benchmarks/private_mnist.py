"""Measure the accuracy of private training on MNIST: `python benchmarks/private_mnist.py --out private-mnist.json`.

The paper's network 784-256-10, without biases, learns from the full batch with clipped gradients (C = 1), momentum 0.9
and a step size that falls linearly to 0: as one model on all records (initial weights of deviation 0.05), and as five
confined participants (δ 0.02, one colluder) by the mechanism of the product with floats. Biases would use a part of the
clip norm in every record, and cost about one percentage point at ε = 0.5.

**Preparation.** Each image is scaled to norm 1 by its own pixels, and centred by the mean of all, which is opened with
noise for 1 % of μ² (one record changes the sum by at most 1; the number by which it is divided is a constant). Then it
is scaled to norm 1 again. So no statistic depends on private records except through noise that is accounted for. The
training has the rest of the budget; of this, 1 % is for the number of records.

**Choice.** For every ε, the step size and then the number of steps are chosen by the accuracy of the one model on the
last sixth of the training records after a private training on the others; the confined participants use the same. What
the choice reveals is not accounted for, as in other publications. With the best setting, both are trained once on all
training records, and tested once on the test images.

Every finished run is stored in the file of --out, and a run in progress beside it: the same command continues. A step
with 60,000 records takes about a second of one core, everything about forty minutes of an idle core.
A trial: `--records 600 --steps 3 --rates 4 --epsilons 8`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cgd import Grid, simulate
from cgd.dp.accountant import epsilon_of, mu_of
from cgd.dp.settings import PrivacySettings
from cgd.experiments import datasets
from cgd.files import write_file
from cgd.optim.displacement import SGDRule
from cgd.simulation.baselines import BaselineSettings, private_centralised

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cgd.experiments.datasets import Dataset

DP_DELTA, CLIP, MOMENTUM = 1e-5, 1.0, 0.9
ONE_MODEL, CONFINED = "one model", "confined"
MEMBERS, COLLUDERS = {ONE_MODEL: 1, CONFINED: 5}, {ONE_MODEL: 0, CONFINED: 1}
DELTAS = {ONE_MODEL: 0.05, CONFINED: 0.02}
STATISTICS_SHARE = 0.01


@dataclass(frozen=True)
class Setting:
    """A scheme, ε, and what is chosen for it."""

    scheme: str
    epsilon: float
    lr: float
    steps: int


def build_model() -> nn.Sequential:
    """Return the network of the paper for MNIST."""
    return nn.Sequential(nn.Linear(784, 256, bias=False), nn.ReLU(), nn.Linear(256, 10, bias=False))


def prepare(data: Dataset, setting: Setting, statistics_mu: float, seed: int) -> Dataset:
    """Return the records centred by their noisy mean, and scaled to norm 1."""
    x, held_out = (nn.functional.normalize(each.float()) for each in (data.x, data.held_out_x))
    members, colluders = MEMBERS[setting.scheme], COLLUDERS[setting.scheme]
    deviation = math.sqrt(members / (members - colluders)) / statistics_mu
    noise = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(seed + 1_000_000))
    mean = (x.double().sum(dim=0) + deviation * noise) / len(x)  # the size of the data set is a constant of this file
    x, held_out = (nn.functional.normalize(each - mean.float()) for each in (x, held_out))
    return replace(data, x=x, held_out_x=held_out)


def train(setting: Setting, data: Dataset, reruns: int, seed: int, checkpoint: Path) -> dict[str, Any]:
    """Train with a setting, and return the accuracy on the held-out records and what was spent."""
    mu = mu_of(setting.epsilon, DP_DELTA)
    statistics_mu = mu * math.sqrt(STATISTICS_SHARE)
    epsilon = epsilon_of(mu * math.sqrt(1 - STATISTICS_SHARE) * (1 - 1e-9), DP_DELTA)
    prepared = prepare(data, setting, statistics_mu, seed)
    privacy = PrivacySettings(epsilon, DP_DELTA, setting.steps, CLIP, COLLUDERS[setting.scheme], reruns)
    common: dict[str, Any] = {
        "steps": setting.steps,
        "lr": setting.lr,
        "delta": DELTAS[setting.scheme],
        "seed": seed,
        "test": (prepared.held_out_x, prepared.held_out_y),
        "evaluate_every": setting.steps,
        "checkpoint": checkpoint,
    }
    method: dict[str, Any] = {
        "rule": partial(SGDRule, momentum=MOMENTUM),
        "schedule": lambda step: 1 - step / setting.steps,
    }
    blocks = Grid(MEMBERS[setting.scheme]).split(prepared.x, prepared.y, seed=seed)
    if setting.scheme == ONE_MODEL:
        result = private_centralised(BaselineSettings(build_model, blocks, **common), privacy, **method)
    else:
        result = simulate(build_model, blocks, privacy=privacy, progress=False, **common, **method)
    accuracy, spent = result.history.evaluations[-1].accuracy, result.spent
    used = math.hypot(statistics_mu, spent.mu if spent else 0.0)
    return {
        "accuracy": fmean(accuracy),
        "worst": min(accuracy),
        "epsilon": epsilon_of(used, DP_DELTA),
        "mu": used,
        "openings": 1 + (spent.openings if spent else 0),
    }


class Runs:
    """The runs in the file of --out; each is run once."""

    def __init__(self, path: Path, options: dict[str, Any], reruns: int, seed: int) -> None:
        self._path, self._reruns, self._seed = path, reruns, seed
        self.content: dict[str, Any] = {"options": options, "validation": [], "test": []}
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["options"] != options:
                raise SystemExit(f"{path} has results of other options, {self.content['options']}; name another file")

    def run(self, part: str, setting: Setting, data: Dataset) -> dict[str, Any]:
        """Return the stored result of a setting, or train."""
        found = [each for each in self.content[part] if each["setting"] == asdict(setting)]
        if found:
            return dict(found[0])
        checkpoint = self._path.with_name(f".{self._path.name}.pt")
        start = time.monotonic()
        result = {"setting": asdict(setting), **train(setting, data, self._reruns, self._seed, checkpoint)}
        result["seconds"] = round(time.monotonic() - start, 1)
        self.content[part].append(result)
        write_file(self._path, json.dumps(self.content, indent=1) + "\n")
        checkpoint.unlink(missing_ok=True)
        print(part, *asdict(setting).values(), f"{result['accuracy']:.2%}, {result['seconds']} s", flush=True)
        return result


def choose(runs: Runs, first: Setting, data: Dataset, choices: dict[str, Iterable[Any]]) -> Setting:
    """Return the best setting, varying one value after the other."""
    best = first
    for name, values in choices.items():
        settings = [replace(best, **{name: value}) for value in values]
        best = max(settings, key=lambda each: float(runs.run("validation", each, data)["accuracy"]))
    return best


def main() -> None:
    """Run, or continue, everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 2.0, 8.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 6.0, 9.0], help="step sizes to choose from")
    parser.add_argument("--steps", type=int, nargs="+", default=[100, 60, 165], help="first the one for all step sizes")
    parser.add_argument("--records", type=int, default=60_000)
    parser.add_argument("--reruns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    data = datasets.load("mnist").first(arguments.records)
    split = arguments.records * 5 // 6
    part = replace(data, x=data.x[:split], y=data.y[:split], held_out_x=data.x[split:], held_out_y=data.y[split:])
    options = {name: value for name, value in vars(arguments).items() if name != "out"}
    runs = Runs(arguments.out, options, arguments.reruns, arguments.seed)
    for epsilon in arguments.epsilons:
        first = Setting(ONE_MODEL, epsilon, arguments.rates[0], arguments.steps[0])
        best = choose(runs, first, part, {"lr": arguments.rates, "steps": arguments.steps})
        for scheme in MEMBERS:
            runs.run("test", replace(best, scheme=scheme), data)


if __name__ == "__main__":
    main()
