"""`cgd simulate` and `cgd reproduce` as commands."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from cgd.experiments import cifar, resnet
from support import cifar_files

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SPEC = """
title = "Mine"

[common]
data = "iris"
hidden = [8]
steps = 20
evaluations = 2

[[run]]
label = "pooled"
method = "centralised"

[[run]]
label = "CGD"
group = "5×1"
rows = 5
"""


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cgd", *arguments]
    # Wide, so that no table is truncated; without a data folder or cache, unless the test gives one.
    bare = {key: value for key, value in os.environ.items() if key != "CGD_DATA"}
    empty_folders = {"XDG_CACHE_HOME": str(cwd / "cache"), "XDG_DATA_DIRS": str(cwd / "system"), "HOME": str(cwd)}
    env = {**bare, **empty_folders, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=cwd, env=env)


def test_simulate_writes_a_table_a_plot_and_json(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SPEC)
    finished = run("simulate", "mine.toml", "--out", "there", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "Mine" in finished.stdout
    assert "5 of 5" in finished.stdout
    assert "paper" not in finished.stdout  # there are no figures of the paper to show
    results = list((tmp_path / "there").glob("*.json"))
    assert len(results) == 2
    assert all(json.loads(path.read_text())["history"]["training_loss"] for path in results)
    assert (tmp_path / "there" / "plots" / "mine.png").read_bytes().startswith(b"\x89PNG")
    before = {path: path.stat().st_mtime_ns for path in results}
    again = run("simulate", "mine.toml", "--out", "there", cwd=tmp_path)
    assert again.stdout == finished.stdout
    assert {path: path.stat().st_mtime_ns for path in results} == before
    fresh = run("simulate", "mine.toml", "--out", "there", "--fresh", cwd=tmp_path)
    assert fresh.stdout == finished.stdout
    assert all(path.stat().st_mtime_ns > before[path] for path in results)


def test_only_runs_the_entries_with_a_text_and_all_their_seeds(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(f"{SPEC}seeds = 2\n")
    finished = run("simulate", "mine.toml", "--only", "5X1 cgd", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "pooled" not in finished.stdout + finished.stderr
    assert "5×1 CGD, seed 0: step 20 of 20" in finished.stderr
    assert "5×1 CGD, seed 1: step 20 of 20" in finished.stderr
    assert "± sd over seeds" in " ".join(finished.stdout.split())
    results = [json.loads(path.read_text()) for path in (tmp_path / "cgd-simulation").glob("*.json")]
    assert sorted(each["spec"]["seed"] for each in results) == [0, 1]
    assert not (tmp_path / "cgd-simulation" / "plots").exists()


def test_reproduce_list_names_the_experiments(tmp_path: Path) -> None:
    finished = run("reproduce", "list", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    for name in ("table-3", "table-4", "table-6", "table-7", "table-8", "figure-4", "figure-9", "theory", "towers"):
        assert name in finished.stdout
    assert "0 of 7" in finished.stdout
    runs = run("reproduce", "list", "table-7", cwd=tmp_path)
    assert runs.returncode == 0, runs.stderr
    assert "1000×112 δ random" in runs.stdout
    assert list(tmp_path.iterdir()) == []


def test_report_names_missing_runs(tmp_path: Path) -> None:
    finished = run("reproduce", "report", "--out", "results", "--scale", "paper", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    page = (tmp_path / "results" / "paper" / "report.md").read_text()
    assert "Not run yet: `cgd reproduce table-3 --scale paper`" in page


def test_claims_without_results_are_not_run_yet(tmp_path: Path) -> None:
    finished = run("reproduce", "claims", "--out", "results", "--scale", "paper", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "The page is results/paper/claims.md" in finished.stdout
    page = (tmp_path / "results" / "paper" / "claims.md").read_text()
    assert " 0 confirmed, 0 not confirmed, " in page
    assert (
        "`cgd reproduce table-3 --scale paper` | *missing:* table-3 (centralised, 1000×112 CGD) | **not run yet**"
        in page
    )


def corrupt_mnist(folder: Path) -> None:
    (folder / "mnist").mkdir()
    (folder / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"no images"))


@pytest.mark.parametrize(
    ("arguments", "change", "message"),
    [
        (("simulate", "none.toml"), "", "none.toml cannot be read"),
        (("simulate", "mine.toml"), "rows = 500", "rows is 500 and there are 112 samples; make it smaller"),
        (("simulate", "mine.toml"), "rows = 5\ncolumns = 50", "columns is 50 and there are 4 features"),
        (("simulate", "mine.toml"), "rowz = 5", "there is no setting 'rowz' (did you mean 'rows'?)"),
        (("simulate", "mine.toml"), "rows = 5\ndata = 'moon'", "data is 'moon'"),
        (("simulate", "mine.toml"), "rows = 5\nlr = 1e30", "lower lr"),
        (("simulate", "mine.toml"), "rows = [", "is not TOML"),
        (("simulate", "mine.toml", "--out", "mine.toml"), "rows = 5", "cannot be written"),
        (("simulate", "mine.toml", "--scale", "quick"), "rows = 5", "has no scale 'quick'"),
        (("simulate", "mine.toml", "--only", "PGD"), "rows = 5", "the runs are: pooled; 5×1 CGD"),
        (("reproduce", "table-9"), "", "there is no experiment 'table-9'"),
        (("reproduce", "table-8", "--only", "PGD"), "", "the runs are: centralised; 1000×1 CGD; 100×1 CGD"),
        (("reproduce", "list", "--only", "CGD"), "", "but `list` runs nothing"),
        (("reproduce", "list", "table-2"), "", "there is no experiment 'table-2'"),
        (("reproduce", "table-3", "table-4"), "", "only `list` takes another one"),
        (("reproduce", "claims", "--only", "CGD"), "", "but `claims` runs nothing"),
        (("reproduce", "table-3", "--data-dir", "."), "", "is not the published file"),
    ],
)
def test_bad_input_is_reported_without_a_traceback(
    arguments: tuple[str, ...], change: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(SPEC.replace("rows = 5", change))
    corrupt_mnist(tmp_path)
    finished = run(*arguments, cwd=tmp_path)
    assert finished.returncode in (1, 2)
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_missing_data_error_names_files_and_folder(tmp_path: Path) -> None:
    finished = run(
        "reproduce", "table-3", cwd=tmp_path, http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9"
    )
    assert finished.returncode == 2
    output = " ".join(finished.stderr.split())
    assert "train-images-idx3-ubyte.gz" in output
    assert f"{tmp_path}/cache/cgd/mnist" in output
    assert "Traceback" not in output


def test_all_runs_what_has_data_and_names_the_rest(tmp_path: Path) -> None:
    command = ("reproduce", "all", "--only", "μ")  # of theory, which has its data; and of figure 8, on MNIST
    finished = run(*command, cwd=tmp_path, http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    assert finished.returncode == 2
    output = " ".join(finished.stderr.split())
    assert "not run, because their data are missing. figure-8: " in output
    assert "train-images-idx3-ubyte.gz" in output
    assert "the same command runs them" in output
    assert "Traceback" not in output
    assert "Theorem 1" in finished.stdout
    assert len(list((tmp_path / "results" / "quick").glob("iris-*.json"))) == 5


def test_missing_images_and_weights_are_named(tmp_path: Path) -> None:
    finished = run("reproduce", "table-6", cwd=tmp_path)
    assert finished.returncode == 2
    output = "".join(finished.stderr.split())  # lines are broken within addresses
    assert f"cifar-10-binary.tar.gzinto{tmp_path}/cache/cgd/cifar10" in output
    assert f"cifar100_resnet56-f2eff4c8.ptinto{tmp_path}/cache/cgd/weights" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "content", [b"", cifar_files.weights()[:1000], cifar_files.other_weights()], ids=["empty", "truncated", "other"]
)
def test_weights_that_are_not_the_published_ones_are_refused(content: bytes, tmp_path: Path) -> None:
    files = {f"cifar10/{cifar.ARCHIVE}": b"not read", f"weights/{resnet.WEIGHTS_FILE}": content}
    for name, each in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(each)
    finished = run("reproduce", "table-5", "--data-dir", ".", cwd=tmp_path)
    assert finished.returncode == 2
    output = "".join(finished.stderr.split())  # lines are broken within digests
    assert f"{resnet.WEIGHTS_FILE}isnotthepublishedfile:ithas{len(content)}bytes,andtheirsha256is" in output
    assert f"not{resnet.WEIGHTS_SHA256};downloaditagainfrom{resnet.WEIGHTS_URL}" in output
    assert "Traceback" not in output


def test_damaged_features_in_the_cache_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "cgd" / cifar.NAME / cifar.CACHE_FILE
    path.parent.mkdir(parents=True)
    features = cifar.Features(torch.ones(5, 64), torch.arange(5), torch.ones(1, 64), torch.zeros(1))
    cifar.write_cache(path, features)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    finished = run("reproduce", "table-5", cwd=tmp_path)
    assert finished.returncode == 2
    output = "".join(finished.stderr.split())
    assert f"{cifar.CACHE_FILE}wasaltered:thesha256ofitscontentis" in output
    assert "deleteit,anditiscomputedagain" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("label", ["a[/b]", "a\\u001b[2J"])
def test_label_of_a_run_is_not_markup_and_cannot_control_the_terminal(tmp_path: Path, label: str) -> None:
    common = 'data = "digits"\nrows = 3\nhidden = []\nlr = 0.5\nsteps = 2\n'
    text = f'title = "trial"\nshow = "table"\n[common]\n{common}[[run]]\nlabel = "{label}"\n'
    (tmp_path / "spec.toml").write_text(text)
    finished = run("simulate", "spec.toml", cwd=tmp_path)
    assert "Traceback" not in finished.stderr
    assert "\x1b" not in finished.stdout + finished.stderr
