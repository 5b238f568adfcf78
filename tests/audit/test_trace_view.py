"""Recordings: what a coalition saw in a run, exactly, and no more than that; and what becomes of damaged ones."""

from __future__ import annotations

import json
import pickle
import stat
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch.func import functional_call, grad
from torch.nn import functional

import cgd
from cgd.audit.examination import examine
from cgd.audit.trace_view import OTHERS, load, view_of
from cgd.audit.view import Finding, flat, unflat
from cgd.errors import InputError
from cgd.federation.data_schema import Model
from cgd.secagg.fixed_point import FixedPoint
from cgd.tabular.trace_writer import FILE, FRAMES, STEPS, TraceWriter, bytes_per_parameter, read_frames
from cgd.tabular.training import train
from support.practice import DATA, NUMBER, records, setting, table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

    from cgd.audit.trace_view import Recording
    from cgd.audit.view import Truth, View
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import TrainingResult

NAMES = ("ada", "bob", "cleo", "dan")
COALITION = ("ada", "cleo")
TABLES = [table(60, 1), table(40, 2, ("B", "C")), table(30, 3), table(20, 4)]
BALANCED = replace(DATA, class_weights="balanced")
SETTINGS: dict[str, TabularSettings] = {
    "sgd": setting(optimizer="sgd", lr=0.5, steps=12, validate_every=4),
    "shrinking steps": setting(optimizer="sgd", lr=0.5, mu=0.1, steps=12, validate_every=4),
    "momentum": setting(optimizer="sgd", lr=0.2, momentum=0.9, steps=12, validate_every=4),
    "adam": setting(steps=12, validate_every=4),
    "balanced": setting(BALANCED, steps=12, validate_every=4),
    "regression": setting(NUMBER, Model("linear"), optimizer="sgd", lr=0.1, steps=12, validate_every=4),
}
EPSILON = float(torch.finfo(torch.float32).eps)


def seed_of(name: str) -> bytes:
    return name.encode().ljust(32, b".")


def run(
    what: TabularSettings,
    folder: Path | None = None,
    wrap: Callable[[TraceWriter], TraceWriter] = lambda recorder: recorder,
    **options: Any,
) -> tuple[list[TrainingResult], dict[str, cgd.Peers]]:
    """A run of four participants in one process; recorded, if there is a folder for it."""
    recorders: dict[str, TraceWriter] = {}

    def one(peers: cgd.Peers, content: dict[str, list[Any]]) -> TrainingResult:
        peers.seed = seed_of(peers.me)
        return train(peers, what, records(content, what.data), recorder=recorders.get(peers.me))

    with ExitStack() as open_files:
        if folder is not None:
            made = {name: TraceWriter(folder / name, name, "trial") for name in NAMES}
            recorders |= {name: wrap(open_files.enter_context(each)) for name, each in made.items()}
        sinks = {name: each.frame for name, each in recorders.items()}
        with cgd.local_peers(NAMES, sinks=sinks, **options) as colony:
            results = colony.run(one, TABLES)
    return results, {peers.me: peers for peers in colony}


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of one run, not to be written to."""
    folder = tmp_path_factory.mktemp("rehearsal")
    run(SETTINGS["adam"], folder)
    return folder


def read(folder: Path) -> list[Recording]:
    return [load(folder / name) for name in NAMES]


def true_sum(view: View, truth: Truth, step: int) -> torch.Tensor:
    """The honest participants' gradients at their own models, computed anew in double precision, times n_l/n."""
    model = view.build_model().double()
    total = torch.zeros_like(view.final_displacement, dtype=torch.float64)
    for name, weights in truth.models.items():
        origin = weights.double() - view.final_displacement.double()
        x, y = truth.x[name].double(), truth.y[name]
        y = y.double() if y.is_floating_point() else y

        def value(given: dict[str, torch.Tensor], x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            return view.loss(functional_call(model, given, (x,)), y)

        at = unflat(origin + view.rounds[step].displacement.double(), model)
        total += len(y) / view.samples * flat(grad(value)(at))
    return total


@pytest.mark.parametrize("name", SETTINGS)
def test_a_view_has_the_sums_of_the_run_and_the_displacement_bit_for_bit(name: str, tmp_path: Path) -> None:
    what = SETTINGS[name]
    plain, _ = run(what)
    results, peers = run(what, tmp_path)
    recordings = read(tmp_path)
    for before, after, each in zip(plain, results, recordings, strict=True):
        saved = flat(list(after.network.parameters()))
        assert torch.equal(saved, flat(list(before.network.parameters())))  # recording changes nothing
        assert each.best_step == after.best_step
        assert torch.equal(each.origin + each.displacements()[after.best_step], saved)
        assert each.missing == ()
    view, truth, fresh = view_of(recordings, COALITION)
    assert view.honest == ("bob", "dan")
    assert view.honest_samples == results[1].samples + results[3].samples
    assert len(view.rounds) == results[0].steps
    assert len(fresh[1]) == results[1].validation.rows + results[3].validation.rows
    fixed_point = FixedPoint.for_weighted_sum(addends=4, bound=16.0)
    assert fixed_point.resolution == peers["ada"].resolution
    for step, taken in enumerate(view.rounds):
        found = view.honest_sum(step)
        honest = [recordings[place].taken[step].addend for place in (1, 3)]
        # Four addends are rounded to the ring; each of them, the total and their difference to single precision.
        size = taken.gradient_sum.abs().max() + 2 * max(part.abs().max() for part in honest)
        assert (found - sum(honest)).abs().max() <= 2 * fixed_point.resolution + 4 * EPSILON * size
        # A gradient in single precision: sums of some hundred terms of about its own size.
        assert torch.allclose(found.double(), true_sum(view, truth, step), rtol=0, atol=100 * EPSILON)
        assert torch.equal(taken.displacement, recordings[2].displacements()[step])
    if name == "balanced":  # without its weights the loss is another one
        other = replace(view, loss=functional.cross_entropy)
        assert not torch.allclose(view.honest_sum(0).double(), true_sum(other, truth, 0), rtol=0, atol=100 * EPSILON)
    pickle.dumps((view, truth, fresh))  # attacks run in processes of their own


def test_one_recording_is_the_worst_case_for_its_owner(rehearsal: Path) -> None:
    bob = load(rehearsal / "bob")
    view, truth, (x, y) = view_of([bob])
    assert view.honest == ("bob",)
    assert view.honest_samples == len(truth.y["bob"]) == len(bob.records[1])
    assert view.samples == sum(len(load(rehearsal / name).records[1]) for name in NAMES)
    for step, each in enumerate(view.rounds):
        size = each.gradient_sum.abs().max() + bob.taken[step].addend.abs().max()
        assert (view.honest_sum(step) - bob.taken[step].addend).abs().max() <= 2 * EPSILON * size
    known = view.coalition[OTHERS]
    assert torch.equal(torch.cat([known.x, x]).sort(dim=0).values, bob.kept[0].sort(dim=0).values)
    assert abs(len(known.y) - len(y)) <= 1
    assert not any(torch.equal(one, other) for one in known.x for other in bob.records[0])  # nothing it trained on
    assert not torch.equal(known.origin, bob.origin)
    assert known.origin.std().item() == pytest.approx(bob.model.delta, rel=0.5)
    assert view.frames == ()
    assert torch.equal(truth.models["bob"], bob.origin + view.final_displacement)


def shows(frames: list[bytes], words: np.ndarray[Any, Any]) -> bool:
    """Whether four neighbouring words of an addend are anywhere in what was received."""
    content = words.tobytes()
    pieces = [content[start : start + 16] for start in range(0, len(content) - 15, 4)]
    return any(piece in frame for frame in frames for piece in pieces if any(piece))


def test_frames_are_all_that_came_and_show_no_addend(tmp_path: Path) -> None:
    _, peers = run(SETTINGS["sgd"], tmp_path)
    recordings = read(tmp_path)
    for each in recordings:
        frames = list(each.frames())
        traffic = peers[each.participant].traffic
        # What still came after its last sum was never taken out of the inbox.
        assert (len(frames), sum(len(frame) for _, frame in frames)) == (
            traffic.frames_received,
            traffic.bytes_received,
        )
        assert {sender for sender, _ in frames} == set(NAMES) - {each.participant}
    view, _, _ = view_of(recordings, COALITION)
    seen = [frame for _, frame in view.frames]
    assert len(seen) == sum(len(list(recordings[place].frames())) for place in (0, 2))
    fixed_point = FixedPoint.for_weighted_sum(addends=4, bound=16.0)
    for place in (1, 3):
        own = safetensors.torch.load_file(tmp_path / NAMES[place] / STEPS / "000003.own.safetensors")["own"]
        weight = len(recordings[place].records[1]) / view.samples
        words = fixed_point.encode(own.numpy(), weight)
        assert not shows(seen, words)
        assert shows([*seen, b"header" + words.tobytes()], words)  # as it would be in the open


def test_only_the_owner_can_read_a_recording(rehearsal: Path) -> None:
    for path in [rehearsal / "ada", *(rehearsal / "ada").rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path
    assert "origin" not in repr(load(rehearsal / "ada"))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_total_that_was_not_recorded_is_told_from_the_states_around_it(name: str, tmp_path: Path) -> None:
    """As after a kill: one has it from the members before the next step."""
    kept: dict[str, Any] = {}

    class Noting(TraceWriter):
        def resume(self, optimizer: Any) -> None:
            kept.setdefault(self.folder.name, (self, optimizer))

        def entering(self, addend: Any) -> None:
            if addend.step is not None and addend.weight is not None and addend.step.number == 5:
                _, optimizer = kept[self.folder.name]
                optimizer.taken = lambda: 5
                super().resume(optimizer)
            super().entering(addend)

    def noting(recorder: TraceWriter) -> TraceWriter:
        recorder.__class__ = Noting
        return recorder

    run(SETTINGS[name], tmp_path, noting)
    whole = load(tmp_path / "bob")
    assert list(whole.states) == [5]
    (tmp_path / "bob" / STEPS / "000004.total.safetensors").unlink()
    bob = load(tmp_path / "bob")
    assert bob.missing == (4,)
    view, _, _ = view_of([bob])
    assert len(view.rounds) == len(whole.totals)
    told = view.rounds[4].gradient_sum
    # By the smallest step size of these settings, and Adam's 1 − β₁, a rounding of D or the mean grows tenfold.
    assert torch.allclose(told, whole.totals[4], rtol=0, atol=40 * EPSILON * whole.totals[4].abs().max().item())
    assert torch.equal(view.final_displacement, whole.displacements()[len(whole.totals)])
    others = [each if each.participant != "bob" else bob for each in read(tmp_path)]
    merged, _, _ = view_of(others, COALITION)
    assert torch.equal(merged.rounds[4].gradient_sum, whole.totals[4])  # the others have it
    (tmp_path / "bob" / STEPS / "000003.total.safetensors").unlink()
    view, _, _ = view_of([load(tmp_path / "bob")])
    assert len(view.rounds) == len(whole.totals) - 2  # two cannot be told apart
    assert torch.equal(view.final_displacement, whole.displacements()[len(whole.totals)])
    for step in range(5):  # as if it had been recorded from step 5 on only
        for path in (tmp_path / "bob" / STEPS).glob(f"00000{step}.[ot]*"):
            path.unlink()
    late = load(tmp_path / "bob")
    assert late.missing == (0, 1, 2, 3, 4)
    view, _, _ = view_of([late])
    for each, step in zip(view.rounds, range(5, len(whole.totals)), strict=True):
        assert torch.equal(each.displacement, whole.displacements()[step])
        assert torch.equal(each.gradient_sum, whole.totals[step])


def test_a_step_of_a_colluder_that_was_not_recorded_is_left_out(rehearsal: Path) -> None:
    recordings = read(rehearsal)
    ada = replace(recordings[0], taken={step: each for step, each in recordings[0].taken.items() if step != 2})
    assert ada.missing == (2,)
    whole, _, _ = view_of(recordings, COALITION)
    view, truth, _ = view_of([ada, *recordings[1:]], COALITION)
    assert len(view.rounds) == len(whole.rounds) - 1
    assert torch.equal(view.rounds[2].gradient_sum, whole.rounds[3].gradient_sum)
    assert torch.equal(view.honest_sum(2), whole.honest_sum(3))
    assert torch.allclose(view.honest_sum(2).double(), true_sum(view, truth, 2), rtol=0, atol=100 * EPSILON)


@pytest.mark.parametrize("coalition", [("ada", "bob"), ("ada", "dan")])
def test_who_has_left_is_in_no_later_round(coalition: tuple[str, str], rehearsal: Path) -> None:
    def without_dan(each: Recording) -> Recording:
        remain = {
            step: taken
            if step < 6 or each.participant == "dan"
            else replace(taken, members=NAMES[:3], epoch=2, samples=9)
            for step, taken in each.taken.items()
            if step < 7 or each.participant != "dan"  # it was about to take part in step 6 when it was removed
        }
        totals = {step: total for step, total in each.totals.items() if step < 6 or each.participant != "dan"}
        return replace(each, taken=remain, totals=totals)

    recordings = [without_dan(each) for each in read(rehearsal)]
    view, truth, _ = view_of(recordings, coalition)
    assert [each.members for each in view.rounds] == [NAMES] * 6 + [NAMES[:3]] * (len(view.rounds) - 6)
    assert [each.samples for each in view.rounds[6:]] == [9] * (len(view.rounds) - 6)
    assert len(view.rounds) == len(recordings[0].totals)
    assert set(truth.models) == set(NAMES) - set(coalition)
    if "dan" in coalition:
        assert torch.equal(view.coalition["dan"].addends[5], recordings[3].taken[5].addend)
        assert not any(each.any() for each in view.coalition["dan"].addends[6:])


def test_attacks_work_on_what_was_recorded(tmp_path: Path) -> None:
    """A linear regression gives XᵀX away; one round of it does not."""
    run(setting(NUMBER, Model("linear"), optimizer="sgd", lr=0.1, steps=40, patience=0), tmp_path)
    recordings = read(tmp_path)
    for view, truth, fresh in (view_of(recordings, COALITION), view_of(recordings[3:])):
        found = examine(view, truth, fresh)["gram"]
        assert [isinstance(each, Finding) and each.succeeds for each in found] == [True, True]
        alone = examine(view.until(1), truth, fresh)["gram"][0]
        assert isinstance(alone, Finding)
        assert not alone.succeeds
        assert torch.equal(view.until(1).final_displacement, view.rounds[1].displacement)


def test_a_recording_that_was_cut_off_is_read_and_goes_on(tmp_path: Path) -> None:
    def frames(recorder: TraceWriter, *contents: bytes) -> None:
        for content in contents:
            recorder.frame("bob", memoryview(content))
        recorder.close()

    frames(TraceWriter(tmp_path / "ada", "ada", "trial"), b"one", b"", b"three")
    path = tmp_path / "ada" / FRAMES
    content = path.read_bytes()
    for cut in range(1, 18):  # within the last frame or its head
        path.write_bytes(content[:-cut])
        assert list(read_frames(path)) == [("bob", b"one"), ("bob", b"")]
    frames(TraceWriter(tmp_path / "ada", "ada", "trial"), b"again")
    assert list(read_frames(path)) == [("bob", b"one"), ("bob", b""), ("bob", b"again")]
    with pytest.raises(InputError, match="cannot be written"):
        frames(closed := TraceWriter(tmp_path / "ada", "ada", "trial"), b"more")
        closed.frame("bob", b"too late")


def test_a_folder_of_something_else_is_not_written_to(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "ada", "ada", "trial").close()
    with pytest.raises(InputError, match="holds the recording of ada of trial, which is never overwritten"):
        TraceWriter(tmp_path / "ada", "bob", "trial")
    with pytest.raises(InputError, match="holds the recording of ada of trial"):
        TraceWriter(tmp_path / "ada", "ada", "another")
    with TraceWriter(tmp_path / "ada", "ada", "trial"), pytest.raises(InputError, match="written by another process"):
        TraceWriter(tmp_path / "ada", "ada", "trial")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(InputError, match="no recording; name an empty folder"):
        TraceWriter(tmp_path / "mine", "ada", "trial")
    with pytest.raises(InputError, match="cannot be used"):
        TraceWriter(tmp_path / "mine" / "thesis.txt", "ada", "trial")


def test_two_runs_do_not_mix(tmp_path: Path) -> None:
    short = setting(optimizer="sgd", lr=0.5, steps=3)
    run(short, tmp_path)
    before = [torch.stack(list(each.totals.values())) for each in read(tmp_path)]
    run(short, tmp_path)  # the same records and origins: the same run, and what is there stays
    for each, totals in zip(read(tmp_path), before, strict=True):
        assert torch.equal(torch.stack(list(each.totals.values())), totals)
    with pytest.raises(InputError, match="other records, or of another training"):
        run(setting(optimizer="sgd", lr=0.6, steps=3), tmp_path)
    path = tmp_path / "ada" / STEPS / "000001.total.safetensors"
    path.write_bytes((tmp_path / "ada" / STEPS / "000002.total.safetensors").read_bytes())
    with pytest.raises(InputError, match="another total of step 1: it holds another run"):
        run(short, tmp_path)
    with pytest.raises(InputError, match=r"ada has another total of step 1 than .*bob: they are not of one run"):
        view_of([load(tmp_path / name) for name in ("bob", "ada", "cleo", "dan")], COALITION)


def damage_json(folder: Path) -> None:
    (folder / FILE).write_text('{"format": ')


def damage_format(folder: Path) -> None:
    (folder / FILE).write_text(json.dumps(json.loads((folder / FILE).read_text()) | {"format": "cgd-recording-9"}))


def damage_step(folder: Path) -> None:
    (folder / STEPS / "000001.total.safetensors").write_bytes(b"cut off")


def damage_model(folder: Path) -> None:
    content = json.loads((folder / FILE).read_text())
    content["outputs"] += 1
    (folder / FILE).write_text(json.dumps(content))


def damage_key(folder: Path) -> None:
    content = json.loads((folder / FILE).read_text())
    del content["samples"]
    (folder / FILE).write_text(json.dumps(content))


def damage_all_steps(folder: Path) -> None:
    for path in (folder / STEPS).iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (damage_json, r"recording\.json is damaged; restore it"),
        (damage_format, "of the format 'cgd-recording-9' and not"),
        (damage_step, r"000001\.total\.safetensors is damaged"),
        (damage_model, "parameters, and .* is of one with"),
        (damage_key, "is damaged: samples is missing; restore it"),
        (damage_all_steps, "no step was taken in the recording"),
        (lambda folder: (folder / FILE).unlink(), r"has no recording\.json; name a folder"),
    ],
)
def test_a_damaged_recording_is_told(damage: Callable[[Path], None], match: str, tmp_path: Path) -> None:
    run(setting(optimizer="sgd", lr=0.5, steps=3), tmp_path)
    damage(tmp_path / "ada")
    with pytest.raises(InputError, match=match):
        load(tmp_path / "ada")


def test_a_recording_whose_training_has_not_begun_is_told(tmp_path: Path) -> None:
    TraceWriter(tmp_path / "ada", "ada", "trial").close()
    with pytest.raises(InputError, match="no step was taken in the recording"):
        load(tmp_path / "ada")


def test_recordings_must_be_of_all_and_the_coalition_of_some(rehearsal: Path) -> None:
    recordings = read(rehearsal)
    with pytest.raises(InputError, match="there is no recording"):
        view_of([])
    for coalition, said in ((), "nobody"), (NAMES, "ada, bob"), (("eve",), "eve"):
        with pytest.raises(InputError, match=f"the coalition is {said}.*; choose some of ada, bob"):
            view_of(recordings, coalition)
    with pytest.raises(InputError, match="the recording of dan is not given"):
        view_of(recordings[:3], COALITION)
    with pytest.raises(InputError, match="there are 2 recordings of bob"):
        view_of([*recordings, recordings[1]], COALITION)
    with pytest.raises(InputError, match="there is one recording, of ada: everybody else colludes"):
        view_of(recordings[:1], ["bob"])
    with pytest.raises(InputError, match="are not of one run: federation is another and trial"):
        view_of([*recordings[:3], replace(recordings[3], federation="another")], COALITION)
    few = replace(recordings[0], kept=(recordings[0].kept[0][:1], recordings[0].kept[1][:1]))
    with pytest.raises(InputError, match="ada kept back 1 records"):
        view_of([few])


def test_a_federation_by_columns_is_not_recorded(tmp_path: Path) -> None:
    what = replace(setting(), columns=3)
    network = torch.nn.Linear(2, 2)
    recorder = TraceWriter(tmp_path / "ada", "ada", "trial")
    recorder.close()
    with pytest.raises(InputError, match="cut into 3 columns.*join without --record"):
        recorder.begin(None, what, None, network, 0.1, None, None)  # type: ignore[arg-type]
    network.bias.requires_grad_(False)
    with pytest.raises(InputError, match="the parameter bias is frozen"):
        recorder.begin(None, setting(), None, network, 0.1, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"sharing": "uniform"}, {"ring_bits": 64}])
def test_the_size_that_is_told_is_about_right(options: dict[str, Any], tmp_path: Path) -> None:
    """For a network that is large beside headers; four steps and one, because statistics come before the first."""
    sizes, parameters = [], 0
    for steps in (1, 4):
        what = setting(model=Model("mlp", (500, 40)), optimizer="sgd", lr=0.1, steps=steps)
        folder = tmp_path / str(steps)
        run(what, folder, **options)
        recorded = [folder / "ada" / FRAMES, *(folder / "ada" / STEPS).iterdir()]
        sizes.append(sum(path.stat().st_size for path in recorded))
        parameters = len(load(folder / "ada").origin)
    told = bytes_per_parameter(replace(what.training, **options), len(NAMES)) * parameters
    assert (sizes[1] - sizes[0]) / 3 == pytest.approx(told, rel=0.05)
