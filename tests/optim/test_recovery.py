"""Stored optimiser states: their bytes, and that members serve them while a program moves its weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import nn

import cgd
from cgd.errors import InputError
from cgd.optim.displacement import SGDRule
from cgd.optim.recovery import TensorWriter, common_state, restore
from support.in_process import DEADLINE_SECONDS, InProcessFederation, new_federation, uninterrupted_results
from support.programs import Training

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import FrameType

    from support.in_process import MemberProcess

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
NAMES = ("ada", "bob", "cleo")


def tensors_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of various shapes; their order is not that of a safetensors file."""
    return {
        "vector": torch.arange(7).to(dtype),
        "scalar": torch.ones((), dtype=dtype),
        "empty": torch.zeros(0, dtype=dtype),
        "empty matrix": torch.zeros(3, 0, dtype=dtype),
        "counts": torch.arange(3),
        "cube": torch.arange(24).reshape(2, 3, 4).to(dtype),
        "a parameter": nn.Parameter(torch.ones(2, 2)),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_writer_writes_the_bytes_of_safetensors(dtype: torch.dtype) -> None:
    tensors = tensors_of(dtype)
    assert TensorWriter().to_bytes(tensors) == safetensors.torch.save(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_writer_copies_tensors_that_are_not_contiguous_or_share_memory(dtype: torch.dtype) -> None:
    matrix = torch.arange(12).reshape(3, 4).to(dtype)
    tensors = {
        "transposed": matrix.T,
        "every second": matrix.reshape(-1)[::2],
        "column": matrix[:, 1],
        "shared": matrix,
        "expanded": torch.ones(1, dtype=dtype).expand(5),
        "channels last": torch.arange(24).reshape(1, 2, 3, 4).to(dtype, memory_format=torch.channels_last),
    }
    assert not tensors["transposed"].is_contiguous()
    assert not tensors["channels last"].is_contiguous()
    copies = {name: each.clone(memory_format=torch.contiguous_format) for name, each in tensors.items()}
    assert TensorWriter().to_bytes(tensors) == safetensors.torch.save(copies)


def test_tensor_writer_can_be_used_again_with_new_values_and_new_layouts() -> None:
    writer = TensorWriter()
    layouts: list[dict[str, torch.Tensor]] = [
        {"a": torch.ones(3), "b": torch.zeros(2)},
        {"a": torch.full((3,), 5.0), "b": torch.ones(2)},
        {"a": torch.ones(3), "b": torch.zeros(2), "momentum": torch.ones(3)},  # a new name
        {"a": torch.ones(3), "b": torch.zeros(1, 2), "momentum": torch.ones(3)},  # the same size, another shape
        {"a": torch.ones(3, dtype=torch.int32), "b": torch.zeros(1, 2), "momentum": torch.ones(3)},  # another type
        {"momentum": torch.ones(3), "b": torch.zeros(1, 2), "a": torch.ones(3, dtype=torch.int32)},  # another order
        {"a": torch.ones(3), "b": torch.zeros(2)},
        {},
    ]
    for tensors in layouts:
        assert writer.to_bytes(tensors) == safetensors.torch.save(tensors)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_restored_state_has_the_same_bits_and_the_origins_of_the_new_process(kind: str) -> None:
    def train(peers: cgd.Peers) -> None:
        model = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        cgd.confine(model, start="zeros")
        optimizer = (
            cgd.ConfinedSGD(model.parameters(), lr=0.1, momentum=0.5, peers=peers, samples=1)
            if kind == "sgd"
            else cgd.ConfinedAdam(model.parameters(), lr=0.1, peers=peers, samples=1)
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 2, 3, 3)).pow(2).mean().backward()
            optimizer.step()
        parameters = list(model.parameters())
        assert not parameters[0].is_contiguous()
        content = TensorWriter().to_bytes(common_state(parameters, optimizer.state, [9, 2, 11, 22, 33]))
        states: dict[torch.Tensor, dict[str, Any]] = {each: {"origin": torch.ones_like(each)} for each in parameters}
        counted = restore(content, parameters, states)
        assert counted == {"total_samples": 9, "epoch": 2, "pledges": [11, 22, 33]}
        for parameter in parameters:
            expected = optimizer.state[parameter] | {"origin": torch.ones_like(parameter)}
            del expected["start"]  # of the new process
            assert states[parameter].keys() == expected.keys()
            for key, value in states[parameter].items():
                assert torch.equal(value, expected[key]) if isinstance(value, torch.Tensor) else value == expected[key]

    with cgd.local_peers(3) as members:
        members.run(train)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not the state of an optimiser"),
        (safetensors.torch.save({"0.displacement": torch.zeros(2)}), "is not the state of an optimiser"),
        (safetensors.torch.save({"counts": torch.zeros(5, dtype=torch.int64)}), "is not the state of an optimiser"),
        (
            safetensors.torch.save({"counts": torch.zeros(5, dtype=torch.int64), "0.displacement": torch.zeros(3)}),
            r"of shapes \[\(3,\)\] and this model has \[\(2,\)\]",
        ),
    ],
)
def test_restore_rejects_a_state_that_does_not_fit(content: bytes, message: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    states: dict[torch.Tensor, dict[str, Any]] = {parameter: {"origin": torch.ones(2)}}
    with pytest.raises(InputError, match=message):
        restore(content, [parameter], states)
    assert states[parameter].keys() == {"origin"}


def test_error_names_layers_that_train_only_for_a_time_as_the_cause() -> None:
    """A restarted program begins with the layers of its first step; those that train may have changed since."""
    counts = {"counts": torch.tensor([9, 1, 5, 6, 7])}
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    both = {f"{number}.displacement": torch.zeros(2) for number in range(2)}
    for stored, parameters in ((counts | both, [one]), (counts | {"0.displacement": torch.zeros(2)}, [one, two])):
        states: dict[torch.Tensor, dict[str, Any]] = {each: {"origin": torch.ones(2)} for each in parameters}
        with pytest.raises(
            InputError, match="the layers that train have changed since .* all layers that train at any"
        ):
            restore(safetensors.torch.save(stored), parameters, states)
        assert all(each.keys() == {"origin"} for each in states.values())


# A state that a dishonest member has forged.

VALID = {"counts": torch.tensor([9, 1, 5, 6, 7]), "0.displacement": torch.zeros(4)}
MOMENTS = {"0.mean": torch.zeros(4), "0.square": torch.zeros(4)}
POWERS = {"0.powers": torch.full((2,), 0.5, dtype=torch.float64)}


def restore_over_one_parameter(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Restore a state over one parameter of four zeros with an origin of ones; return the parameter's state."""
    parameter = nn.Parameter(torch.zeros(4))
    states: dict[torch.Tensor, dict[str, Any]] = {parameter: {"origin": torch.ones(4)}}
    try:
        restore(safetensors.torch.save(tensors), [parameter], states)
    finally:
        assert torch.equal(states[parameter]["origin"], torch.ones(4))
    return states[parameter]


def test_stored_state_cannot_set_the_origin() -> None:
    with pytest.raises(InputError, match="no update rule stores 'displacement', 'origin'"):
        restore_over_one_parameter(VALID | {"0.origin": torch.full((4,), 0.5)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"counts": torch.tensor(9)}, "the count of the samples is missing or malformed"),
        ({"counts": torch.tensor([9])}, "the count of the samples is missing or malformed"),
        ({"counts": torch.tensor([9, 1])}, "the count of the samples is missing or malformed"),
        ({"counts": torch.tensor([[9, 1, 5]])}, "the count of the samples is missing or malformed"),
        ({"counts": torch.tensor([9.5, 1.0, 5.0])}, "the count of the samples is missing or malformed"),
        ({"1.displacement": torch.zeros(4)}, "'1.displacement' belongs to no parameter of this optimiser"),
        ({"9" * 5000 + ".displacement": torch.zeros(4)}, "of other layers: '9{200}' belongs to no parameter"),
        ({"-1.displacement": torch.zeros(4)}, "'-1.displacement' belongs to no parameter"),
        ({"9" * 5000: torch.zeros(4)}, "is not the state of an optimiser: '9{199}; restore a state folder"),
        ({"": torch.zeros(4)}, "'' belongs to no parameter"),
        ({"0": torch.zeros(4)}, "no update rule stores '', 'displacement'"),
        ({"0.displacement": torch.zeros(4, dtype=torch.float64)}, "displacement has the type torch.float64"),
        ({"0.momentum_buffer": torch.zeros(3)}, r"momentum_buffer has the type torch.float32, the shape \(3,\)"),
        ({"0.momentum_buffer": torch.zeros(4, dtype=torch.int64)}, "momentum_buffer has the type torch.int64"),
        ({"0.mean": torch.zeros(4)}, "no update rule stores 'displacement', 'mean'"),
        ({"0.largest": torch.zeros(4)}, "no update rule stores 'displacement', 'largest'"),
        (MOMENTS | {"0.powers": torch.zeros(2)}, "powers has the type torch.float32"),
        (MOMENTS | {"0.powers": torch.zeros(3, dtype=torch.float64)}, r"powers has .* the shape \(3,\)"),
        (MOMENTS | {"0.powers": torch.full((2,), 1 / 0.9, dtype=torch.float64)}, "powers has .* or wrong values"),
        (MOMENTS | {"0.powers": torch.full((2,), torch.nan, dtype=torch.float64)}, "powers has .* or wrong values"),
    ],
)
def test_restore_rejects_a_malformed_state(changed: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        restore_over_one_parameter(VALID | changed)


@pytest.mark.parametrize(
    "added",
    [{}, {"0.momentum_buffer": torch.ones(4)}, MOMENTS | POWERS, MOMENTS | POWERS | {"0.largest": torch.ones(4)}],
)
def test_restore_accepts_the_states_of_all_update_rules(added: dict[str, torch.Tensor]) -> None:
    restored = restore_over_one_parameter(VALID | added)
    assert restored.keys() == {"origin", "displacement", *(name.partition(".")[2] for name in added)}


# A program that moves its weights, and the thread that serves its peers.


class PauseInMove:
    """Pauses ada's program in one step, inside the update rule, when it has moved its first parameter."""

    def __init__(self, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.step = step
        self.paused = threading.Event()
        self.resume = threading.Event()
        self._programs: dict[threading.Thread, MemberProcess] = {}
        move = SGDRule.move

        def move_and_pause(rule: SGDRule, *arguments: Any) -> None:
            move(rule, *arguments)
            process = self._programs[threading.current_thread()]
            if process.name == "ada" and process.step == step and not self.paused.is_set():
                self.paused.set()
                assert self.resume.wait(2 * DEADLINE_SECONDS)

        monkeypatch.setattr(SGDRule, "move", move_and_pause)

    def program(self, process: MemberProcess) -> str:
        self._programs[threading.current_thread()] = process
        return Training()(process)


@pytest.fixture
def torch_threads() -> Iterator[set[threading.Thread]]:
    """The threads that call torch or safetensors, of those started during the test."""
    threads: set[threading.Thread] = set()
    libraries = ("torch", "safetensors")

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            module = frame.f_globals.get("__name__", "")
        elif event == "c_call":
            module = getattr(argument, "__module__", None) or type(getattr(argument, "__self__", None)).__module__
        else:
            return
        if str(module).partition(".")[0] in libraries:
            threads.add(threading.current_thread())

    threading.setprofile(profile)
    try:
        yield threads
    finally:
        threading.setprofile(None)


def test_peers_recover_from_a_member_whose_program_is_moving_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_threads: set[threading.Thread]
) -> None:
    """Bob and cleo lose everything while ada's step is half done; ada's runtime serves the state before that step."""
    path = new_federation(tmp_path, NAMES)
    expected = uninterrupted_results(path, tmp_path / "uninterrupted", Training())
    torch_threads.clear()
    pause = PauseInMove(3, monkeypatch)
    with InProcessFederation(path, tmp_path / "state") as federation:
        federation.start_all(pause.program)
        processes = list(federation)
        assert pause.paused.wait(DEADLINE_SECONDS)
        runtime, journal = federation["ada"].member.runtime, federation["ada"].journal()
        assert runtime._changed.acquire(timeout=DEADLINE_SECONDS), "the program holds the runtime's lock"
        runtime._changed.release()
        (stored,) = journal.states.values()
        assert stored.steps == pause.step

        federation.kill("bob", "cleo", lose_state=True)
        processes += [federation.start(name, pause.program) for name in ("bob", "cleo")]
        for name in ("bob", "cleo"):  # they take step 3 with ada's state and journal, and wait for ada in step 4
            federation[name].wait_for_step(pause.step + 1)
        assert federation["ada"].step == pause.step
        assert list(journal.states.values()) == [stored]
        assert {type(state.content) for each in federation for state in each.journal().states.values()} == {bytes}

        pause.resume.set()
        assert federation.results() == expected
        programs = {process._thread for process in processes}
        assert torch_threads & programs  # the fixture notices calls of torch
        assert torch_threads <= programs
