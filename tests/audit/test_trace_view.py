"""The view of a coalition in a recorded run: exactly the opened sums, and nothing else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch.func import functional_call, grad
from torch.nn import functional

from cgd.audit.registry import get
from cgd.audit.results import AttackResult
from cgd.audit.scenario import LocalSteps, Scenario
from cgd.audit.schemes import observe
from cgd.audit.trace_replay import replay, update_rule
from cgd.audit.trace_view import OTHERS, load, view_of
from cgd.audit.view import flat, unflat
from cgd.errors import InputError
from cgd.federation.model_section import Model
from cgd.optim.minibatches import round_batches
from cgd.secagg.fixed_point import FixedPoint
from cgd.tabular.few_records import merge_few_records
from cgd.tabular.trace_writer import STEPS, TraceWriter
from cgd.tabular.training_loop import LOCAL_MOMENTUM
from support.tabular import REGRESSION, tabular_settings
from support.traces import BATCHED, COALITION, DELAYED, NAMES, SETTINGS, load_all, run, seed_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from cgd.audit.trace_view import Trace
    from cgd.audit.view import Truth, View
    from cgd.tabular.settings import TabularSettings

EPSILON = float(torch.finfo(torch.float32).eps)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The traces of one run, which are only read."""
    folder = tmp_path_factory.mktemp("rehearsal")
    run(SETTINGS["adam"], folder)
    return folder


def true_sum(view: View, truth: Truth, step: int) -> torch.Tensor:
    """The sum of the honest gradients at their own models, in double precision, times n_l/n."""
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


@pytest.mark.parametrize("name", [*SETTINGS, *DELAYED])
def test_view_has_the_sums_of_the_run_and_the_displacement_bit_for_bit(name: str, tmp_path: Path) -> None:
    settings = (SETTINGS | DELAYED)[name]
    plain, _ = run(settings)
    results, peers = run(settings, tmp_path)
    traces = load_all(tmp_path)
    for before, after, each in zip(plain, results, traces, strict=True):
        saved = flat(list(after.network.parameters()))
        assert torch.equal(saved, flat(list(before.network.parameters())))  # recording does not change the run
        assert each.best_step == after.best_step
        if name in SETTINGS or after.best_step < settings.training.steps:
            assert torch.equal(each.origin + each.displacements()[after.best_step], saved)
        else:  # at the end, the model has moved by the last sums, too
            final = replay(each.training, len(each.origin), each.totals, each.states).final
            assert torch.equal(each.origin + final, saved)
        assert each.missing == ()
    view, truth, fresh = view_of(traces, COALITION)
    assert view.honest == ("bob", "dan")
    assert view.honest_samples == results[1].samples + results[3].samples
    assert len(view.rounds) == results[0].steps
    assert len(fresh[1]) == results[1].validation.rows + results[3].validation.rows
    fixed_point = FixedPoint.for_weighted_sum(addends=4, bound=16.0)
    assert fixed_point.resolution == peers["ada"].resolution
    for step, opened in enumerate(view.rounds):
        found = view.honest_sum(step)
        honest = [traces[place].steps[step].addend for place in (1, 3)]
        # Four addends are rounded to the ring; each of them, the total and their difference to single precision.
        size = opened.gradient_sum.abs().max() + 2 * max(part.abs().max() for part in honest)
        assert (found - sum(honest)).abs().max() <= 2 * fixed_point.resolution + 4 * EPSILON * size
        # A gradient in single precision: sums of some hundred terms of about its own size.
        assert torch.allclose(found.double(), true_sum(view, truth, step), rtol=0, atol=100 * EPSILON)
        assert torch.equal(opened.displacement, traces[2].start() + traces[2].displacements()[step])
    if name == "class weights":  # without them the loss differs
        other = replace(view, loss=functional.cross_entropy)
        assert not torch.allclose(view.honest_sum(0).double(), true_sum(other, truth, 0), rtol=0, atol=100 * EPSILON)
    pickle.dumps((view, truth, fresh))  # attacks run in other processes


def simulated(settings: TabularSettings, traces: list[Trace]) -> tuple[View, Truth]:
    """Simulate the recorded run from the records and seeds of all, as an audit of a table does."""
    training, preprocessing = settings.training, traces[0].preprocessing
    assert preprocessing is not None

    def draws(name: str, number: int, count: int) -> list[torch.Tensor]:
        drawn = round_batches(seed_of(name), number, count, training.batches, training.local_epochs)
        return [torch.tensor(batch) for batch in drawn]

    def prepare(x: torch.Tensor) -> torch.Tensor:
        merged = x.clone()
        merge_few_records(merged.numpy(), preprocessing, settings.data)
        return merged

    scenario = Scenario(
        {each.participant: each.records for each in traces},
        traces[0].build_model,
        COALITION,
        functional.cross_entropy,
        rounds=training.steps,
        origins={name: (settings.model.delta, seed_of(name)) for name in NAMES},
        rule=partial(update_rule, training),
        start=traces[0].start(),
        draws=draws,
        local=LocalSteps(training.local_lr, LOCAL_MOMENTUM) if training.local_epochs else None,
        prepare=None if training.local_epochs else prepare,
        clamp=True,
    )
    return observe(scenario, "cgd")


@pytest.mark.parametrize("name", BATCHED)
def test_recorded_batches_and_updates_are_those_of_a_simulation(name: str, tmp_path: Path) -> None:
    settings = BATCHED[name]
    plain, _ = run(settings)
    results, _ = run(settings, tmp_path)
    traces = load_all(tmp_path)
    for before, after, each in zip(plain, results, traces, strict=True):
        saved = flat(list(after.network.parameters()))
        assert torch.equal(saved, flat(list(before.network.parameters())))  # recording does not change the run
        assert torch.equal(each.origin + each.displacements()[after.best_step], saved)
        assert each.training == settings.training
    view, truth, _ = view_of(traces, COALITION)
    expected, expected_truth = simulated(settings, traces)
    assert len(view.rounds) == len(expected.rounds) == settings.training.steps
    assert view.noise == pytest.approx(expected.noise)
    for step, (opened, simulation) in enumerate(zip(view.rounds, expected.rounds, strict=True)):
        assert opened.samples == simulation.samples
        assert torch.allclose(opened.displacement, simulation.displacement, rtol=0, atol=1e-5)
        assert torch.allclose(view.honest_sum(step), expected.honest_sum(step), rtol=0, atol=1e-5)
        assert view.honest_sum(step).abs().max() > 1e-3
    assert torch.allclose(view.final_displacement, expected.final_displacement, rtol=0, atol=1e-5)
    for honest in view.honest:
        assert torch.allclose(truth.models[honest], expected_truth.models[honest], rtol=0, atol=1e-5)
    alone, _, _ = view_of(traces[1:2])
    whole = view.coalition["ada"].addends[0].norm() + view.honest_sum(0).norm()
    assert 0 < alone.honest_sum(0).norm() < whole
    assert torch.allclose(alone.rounds[0].gradient_sum, view.rounds[0].gradient_sum)


def test_single_trace_gives_the_worst_case_for_its_owner(rehearsal: Path) -> None:
    bob = load(rehearsal / "bob")
    view, truth, (x, y) = view_of([bob])
    assert view.honest == ("bob",)
    assert view.honest_samples == len(truth.y["bob"]) == len(bob.records[1])
    assert view.samples == sum(len(load(rehearsal / name).records[1]) for name in NAMES)
    for step, each in enumerate(view.rounds):
        size = each.gradient_sum.abs().max() + bob.steps[step].addend.abs().max()
        assert (view.honest_sum(step) - bob.steps[step].addend).abs().max() <= 2 * EPSILON * size
    known = view.coalition[OTHERS]
    assert torch.equal(torch.cat([known.x, x]).sort(dim=0).values, bob.validation[0].sort(dim=0).values)
    assert abs(len(known.y) - len(y)) <= 1
    assert not any(torch.equal(one, other) for one in known.x for other in bob.records[0])  # no training record
    assert not torch.equal(known.origin, bob.origin)
    assert known.origin.std().item() == pytest.approx(bob.model.delta, rel=0.5)
    assert view.frames == ()
    assert torch.equal(truth.models["bob"], bob.origin - bob.start() + view.final_displacement)


def contains_words(frames: list[bytes], words: np.ndarray[Any, Any]) -> bool:
    """Return whether a frame contains four consecutive words of an addend."""
    content = words.tobytes()
    pieces = [content[start : start + 16] for start in range(0, len(content) - 15, 4)]
    return any(piece in frame for frame in frames for piece in pieces if any(piece))


def test_frames_are_complete_and_contain_no_addend(tmp_path: Path) -> None:
    _, peers = run(SETTINGS["sgd"], tmp_path)
    traces = load_all(tmp_path)
    for each in traces:
        frames = list(each.frames())
        traffic = peers[each.participant].traffic
        # Frames that arrived after the last sum were not processed.
        assert (len(frames), sum(len(frame) for _, frame in frames)) == (
            traffic.frames_received,
            traffic.bytes_received,
        )
        assert {sender for sender, _ in frames} == set(NAMES) - {each.participant}
    view, _, _ = view_of(traces, COALITION)
    received = [frame for _, frame in view.frames]
    assert len(received) == sum(len(list(traces[place].frames())) for place in (0, 2))
    fixed_point = FixedPoint.for_weighted_sum(addends=4, bound=16.0)
    for place in (1, 3):
        own = safetensors.torch.load_file(tmp_path / NAMES[place] / STEPS / "000003.own.safetensors")["own"]
        weight = len(traces[place].records[1]) / view.samples
        words = fixed_point.encode(own.numpy(), weight)
        assert not contains_words(received, words)
        assert contains_words([*received, b"header" + words.tobytes()], words)  # the control: an unmasked addend


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in ("momentum", "adam") else pytest.mark.slow) for each in SETTINGS]
)
def test_missing_total_is_inferred_from_the_states_around_it(name: str, tmp_path: Path) -> None:
    """As after a kill: the members send the state before the next step."""
    resumed: dict[str, Any] = {}

    class RestartingWriter(TraceWriter):
        def resume(self, optimizer: Any) -> None:
            resumed.setdefault(self.folder.name, optimizer)

        def before_sum(self, addend: Any) -> None:
            if addend.step is not None and addend.weight is not None and addend.step.number == 5:
                optimizer = resumed[self.folder.name]
                optimizer.sums_taken = lambda: 5
                super().resume(optimizer)
            super().before_sum(addend)

    def wrap(trace_writer: TraceWriter) -> TraceWriter:
        trace_writer.__class__ = RestartingWriter
        return trace_writer

    run(SETTINGS[name], tmp_path, wrap=wrap)
    whole = load(tmp_path / "bob")
    assert list(whole.states) == [5]
    (tmp_path / "bob" / STEPS / "000004.total.safetensors").unlink()
    bob = load(tmp_path / "bob")
    assert bob.missing == (4,)
    view, _, _ = view_of([bob])
    assert len(view.rounds) == len(whole.totals)
    inferred = view.rounds[4].gradient_sum
    # The smallest learning rate of these settings, and Adam's 1 − β₁, amplify a rounding of D or the mean tenfold.
    assert torch.allclose(inferred, whole.totals[4], rtol=0, atol=40 * EPSILON * whole.totals[4].abs().max().item())
    assert torch.equal(view.final_displacement, whole.start() + whole.displacements()[len(whole.totals)])
    others = [each if each.participant != "bob" else bob for each in load_all(tmp_path)]
    merged, _, _ = view_of(others, COALITION)
    assert torch.equal(merged.rounds[4].gradient_sum, whole.totals[4])  # from the other traces
    (tmp_path / "bob" / STEPS / "000003.total.safetensors").unlink()
    view, _, _ = view_of([load(tmp_path / "bob")])
    assert len(view.rounds) == len(whole.totals) - 2  # two consecutive totals cannot be inferred
    assert torch.equal(view.final_displacement, whole.start() + whole.displacements()[len(whole.totals)])
    for step in range(5):  # as if it had been recorded from step 5 on only
        for path in (tmp_path / "bob" / STEPS).glob(f"00000{step}.[ot]*"):
            path.unlink()
    late = load(tmp_path / "bob")
    assert late.missing == (0, 1, 2, 3, 4)
    view, _, _ = view_of([late])
    for each, step in zip(view.rounds, range(5, len(whole.totals)), strict=True):
        assert torch.equal(each.displacement, whole.start() + whole.displacements()[step])
        assert torch.equal(each.gradient_sum, whole.totals[step])


def test_step_without_a_colluders_addend_is_left_out(rehearsal: Path) -> None:
    traces = load_all(rehearsal)
    ada = replace(traces[0], steps={number: step for number, step in traces[0].steps.items() if number != 2})
    assert ada.missing == (2,)
    whole, _, _ = view_of(traces, COALITION)
    view, truth, _ = view_of([ada, *traces[1:]], COALITION)
    assert len(view.rounds) == len(whole.rounds) - 1
    assert torch.equal(view.rounds[2].gradient_sum, whole.rounds[3].gradient_sum)
    assert torch.equal(view.honest_sum(2), whole.honest_sum(3))
    assert torch.allclose(view.honest_sum(2).double(), true_sum(view, truth, 2), rtol=0, atol=100 * EPSILON)


@pytest.mark.parametrize("coalition", [("ada", "bob"), ("ada", "dan")])
def test_departed_member_is_in_no_later_round(coalition: tuple[str, str], rehearsal: Path) -> None:
    def without_dan(each: Trace) -> Trace:
        steps = {
            number: step
            if number < 6 or each.participant == "dan"
            else replace(step, members=NAMES[:3], epoch=2, samples=9)
            for number, step in each.steps.items()
            if number < 7 or each.participant != "dan"  # dan recorded an addend for step 6 before it was removed
        }
        totals = {step: total for step, total in each.totals.items() if step < 6 or each.participant != "dan"}
        return replace(each, steps=steps, totals=totals)

    traces = [without_dan(each) for each in load_all(rehearsal)]
    view, truth, _ = view_of(traces, coalition)
    assert [each.members for each in view.rounds] == [NAMES] * 6 + [NAMES[:3]] * (len(view.rounds) - 6)
    assert [each.samples for each in view.rounds[6:]] == [9] * (len(view.rounds) - 6)
    assert len(view.rounds) == len(traces[0].totals)
    assert set(truth.models) == set(NAMES) - set(coalition)
    if "dan" in coalition:
        assert torch.equal(view.coalition["dan"].addends[5], traces[3].steps[5].addend)
        assert not any(each.any() for each in view.coalition["dan"].addends[6:])


def test_attack_succeeds_on_a_recorded_run(tmp_path: Path) -> None:
    """A linear regression reveals XᵀX; a single round does not."""
    run(tabular_settings(REGRESSION, Model("linear"), optimizer="sgd", lr=0.1, steps=40, patience=0), tmp_path)
    traces = load_all(tmp_path)
    for view, truth, fresh in (view_of(traces, COALITION), view_of(traces[3:])):
        found = get("gram").run_on(view, truth, fresh)
        assert [isinstance(each, AttackResult) and each.succeeds for each in found] == [True, True]
        alone = get("gram").run_on(view.until(1), truth, fresh)[0]
        assert isinstance(alone, AttackResult)
        assert not alone.succeeds
        assert torch.equal(view.until(1).final_displacement, view.rounds[1].displacement)


def test_traces_of_all_participants_and_a_coalition_of_some_are_needed(rehearsal: Path) -> None:
    traces = load_all(rehearsal)
    with pytest.raises(InputError, match="there is no trace"):
        view_of([])
    for coalition, text in ((), "nobody"), (NAMES, "ada, bob"), (("eve",), "eve"):
        with pytest.raises(InputError, match=f"the coalition is {text}.*; choose some of ada, bob"):
            view_of(traces, coalition)
    with pytest.raises(InputError, match="the trace of dan is not given"):
        view_of(traces[:3], COALITION)
    with pytest.raises(InputError, match="there are 2 traces of bob"):
        view_of([*traces, traces[1]], COALITION)
    with pytest.raises(InputError, match="there is one trace, of ada: all others collude"):
        view_of(traces[:1], ["bob"])
    with pytest.raises(InputError, match="are not of one run: federation is another and trial"):
        view_of([*traces[:3], replace(traces[3], federation="another")], COALITION)
    few = replace(traces[0], validation=(traces[0].validation[0][:1], traces[0].validation[1][:1]))
    with pytest.raises(InputError, match="ada has 1 validation records"):
        view_of([few])
