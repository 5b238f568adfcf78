"""Recording a run: everything that a participant sees, and what it has of its own, in a folder.

A recording is for privacy attacks on what was really seen (`recording.py` reads it, `cgd audit` attacks). **It is as
secret as the records:** they are in it, and so are the participant's origin and its gradients. Only its owner can read
it (folder 0700, files 0600), and nothing of it is ever sent.

    recording.json                    whose it is, and how was trained
    data.safetensors                  our prepared training and kept-back records, our origin
    steps/000007.own.safetensors      what we put into the gradient sum of step 7: written before anything leaves
    steps/000007.total.safetensors    what was opened
    steps/000007.state.safetensors    the displacement after 7 steps, as the members gave it to us when we came back
    frames                            every frame that we received, with its sender, one after the other

A participant that was killed goes on recording when it is started again with the same command. Whatever it put into a
sum is there, because it is written first. The total of its last step may be missing, if the others opened the sum and
it was killed before it had the total; what the members give it when it comes back makes up for that. The other sums, of
statistics and validation losses, are not kept as such: what they told is in the model and its report.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import safetensors.numpy
import torch

import cgd
from cgd.errors import InputError
from cgd.files import write_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import FileIO
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    from cgd.federation.config import Training
    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.peers import Peers
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import Sample, TrainingResult
    from cgd.transport.tap import Addend

FORMAT = "cgd-recording-1"
FILE, DATA, STEPS, FRAMES = "recording.json", "data.safetensors", "steps", "frames"
_FRAME = struct.Struct("<HQ")  # the bytes of the sender's name, and of the frame; both follow


class TraceWriter:
    """Writes what a participant sees into a folder. `train` fills it; the transport's frames go to `frame`.

    Args:
        folder: made if it is not there; or a recording of the same participant that was broken off, to go on with.
        participant: who we are.
        federation: its name.

    Raises:
        InputError: the folder holds something else, or cannot be used.
    """

    def __init__(self, folder: Path, participant: str, federation: str) -> None:
        self.folder = folder
        self._belongs = {"format": FORMAT, "participant": participant, "federation": federation}
        self._content: dict[str, Any] = {}
        try:
            self._frames = self._open()
        except OSError as error:
            raise InputError(
                f"{folder} cannot be used ({error.strerror}); name another folder for the recording (--record)"
            ) from None

    def _open(self) -> FileIO:
        folder = self.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / FILE).exists():
            if any(folder.iterdir()):
                raise InputError(f"{folder} holds something that is no recording; name an empty folder, or a new one")
            folder.chmod(0o700)
            write_private(folder / FILE, json.dumps(self._belongs).encode())
        found = read_content(folder / FILE)
        if {key: found.get(key) for key in self._belongs} != self._belongs:
            raise InputError(
                f"{folder} holds the recording of {found.get('participant')} of {found.get('federation')}, which is "
                "never overwritten; name another folder (--record), or move it away"
            )
        self._content = found
        (folder / STEPS).mkdir(mode=0o700, exist_ok=True)
        frames = os.open(folder / FRAMES, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        file = os.fdopen(frames, "r+b", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(f"{folder} is being written by another process; stop that, or name another one") from None
        file.truncate(_whole(file))
        return file

    # What a training tells, in this order.

    def begin(
        self,
        peers: Peers,
        setting: TabularSettings,
        preparation: Preprocessing,
        network: torch.nn.Module,
        delta: float,
        training: Sample,
        validation: Sample,
    ) -> None:
        """The records are prepared and the network stands at its origin: keep both, and how is trained.

        Raises:
            InputError: views cannot be made of such a run; or the folder has one with other records or settings.
        """
        _check(setting, network)
        balanced = setting.data.class_weights == "balanced"
        origin = torch.cat([each.detach().reshape(-1) for each in network.parameters()])
        content = {
            "version": cgd.__version__,
            "members": list(peers.members),
            "model": asdict(setting.model),
            "features": len(preparation.features),
            "outputs": preparation.outputs,
            "task": setting.data.task,
            "class_weights": preparation.class_weights().tolist() if balanced else None,
            "training": asdict(setting.training),
            "bound": peers.settings.bound,
            "ring_bits": peers.settings.ring_bits,
            "delta": delta,
            "samples": len(training),
        }
        content = json.loads(json.dumps(content))  # as it is read again
        data = safetensors.numpy.save(
            {
                "x": training.x.numpy(),
                "y": training.y.numpy(),
                "kept_x": validation.x.numpy(),
                "kept_y": validation.y.numpy(),
                "origin": origin.numpy(),
            }
        )
        before = {key: self._content[key] for key in content if key in self._content}
        same = all(before[key] == content[key] for key in before if key not in ("members", "version"))
        if before and not (same and (self.folder / DATA).exists() and (self.folder / DATA).read_bytes() == data):
            raise InputError(
                f"{self.folder} holds a recording of other records, or of another training; name another folder "
                "(--record), or move it away"
            )
        if not before:
            write_private(self.folder / DATA, data)
            self._save(content)
        peers.observer = self

    def resume(self, optimizer: ConfinedOptimizer) -> None:
        """Keep what the members gave us when we came back: the displacement, and what the rule remembers."""
        if not (taken := optimizer.taken()):
            return
        parts: dict[str, list[torch.Tensor]] = {}
        powers = np.zeros(0)
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor) and key != "origin":
                    parts.setdefault(key, []).append(value.detach().reshape(-1))
                elif key == "powers":
                    powers = np.array(value, dtype=np.float64)
        state = {key: torch.cat(each).numpy() for key, each in parts.items()}
        if len(powers):
            state["powers"] = powers
        write_private(self._step(taken, "state"), safetensors.numpy.save(state))

    def entering(self, addend: Addend) -> None:
        """Keep our part of a gradient sum, before anything of it leaves; see `Observer`."""
        if addend.step is None or addend.weight is None:
            return
        told = {"weight": addend.weight, "members": list(addend.members), "epoch": addend.epoch}
        content = safetensors.numpy.save({"own": np.ascontiguousarray(addend.values)}, {"told": json.dumps(told)})
        write_private(self._step(addend.step.number, "own"), content)

    def opened(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        """Keep what was opened.

        Raises:
            InputError: it cannot be written; or another total of this step is there, of another run.
        """
        if addend.step is None or addend.weight is None:
            return
        path, content = self._step(addend.step.number, "total"), safetensors.numpy.save({"total": total})
        if not path.exists():
            write_private(path, content)
        elif path.read_bytes() != content:
            raise InputError(
                f"{self.folder} has another total of step {addend.step.number}: it holds another run; name another "
                "folder (--record), or move it away"
            )

    def frame(self, sender: PeerId, frame: Buffer) -> None:
        """Keep a frame; it is handed to the system before the protocol gets it.

        Raises:
            InputError: it cannot be written.
        """
        name = sender.encode()
        pieces = [_FRAME.pack(len(name), len(frame)) + name, frame]
        try:
            written = os.writev(self._frames.fileno(), pieces)
            if written < sum(map(len, pieces)):  # a full disk; the rest of it would fail
                raise OSError(28, "No space left on device")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is closed"
            raise InputError(
                f"the recording in {self.folder} cannot be written ({why}); see whether there is room; the same "
                "command goes on from here"
            ) from None

    def finish(self, trained: TrainingResult) -> None:
        """The training is over."""
        outcome = {"steps": trained.steps, "best_step": trained.best_step, "everyone_samples": trained.everyone_samples}
        self._save(outcome)

    def close(self) -> None:
        """Close the file of frames; a second call does nothing."""
        self._frames.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _save(self, content: dict[str, Any]) -> None:
        self._content = {**self._content, **content}
        write_private(self.folder / FILE, json.dumps(self._content, indent=1).encode())

    def _step(self, number: int, what: str) -> Path:
        return self.folder / STEPS / f"{number:06}.{what}.safetensors"


def read_frames(path: Path) -> Iterator[tuple[PeerId, bytes]]:
    """Yield every frame of a recording with its sender; what was cut off by a kill is left out.

    Raises:
        InputError: they cannot be read.
    """
    try:
        with path.open("rb") as file:
            end = _whole(file)
            file.seek(0)
            while file.tell() < end:
                name, size = _FRAME.unpack(file.read(_FRAME.size))
                yield file.read(name).decode(), file.read(size)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "a sender's name is no text"
        raise InputError(f"{path} cannot be read ({why}); restore it from your copy, or record anew") from None


def bytes_per_parameter(training: Training, members: int) -> float:
    """About how much a recording grows in a step, for each parameter: our addend, the total, and the frames."""
    word = training.ring_bits / 8
    received = 2 * (members - 1) / members * word if training.opening == "mesh" else word
    return 8 + received + (word * (members - 1) if training.sharing == "uniform" else 0)


def _check(setting: TabularSettings, network: torch.nn.Module) -> None:
    refuse_columns(setting)
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad or parameter.dtype != torch.float32:
            what = f"of type {parameter.dtype}" if parameter.requires_grad else "frozen"
            raise InputError(
                f"the parameter {name} is {what}, and recordings are of networks whose parameters are all trained, in "
                "float32; join without --record"
            )


def refuse_columns(setting: TabularSettings) -> None:
    """Only runs in which everybody has all columns can be recorded.

    Raises:
        InputError: the table is cut by columns.
    """
    if setting.in_columns:
        raise InputError(
            f"the table is cut into {setting.columns} columns, and what a coalition sees there, the sums of its rows "
            "and columns of participants, is not made a view of yet; join without --record"
        )


def read_content(path: Path) -> dict[str, Any]:
    """What `recording.json` says.

    Raises:
        InputError: it is damaged, or of another format.
    """
    content = None
    with suppress(ValueError, RecursionError, OSError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged; restore it from your copy, or record into another folder")
    if content.get("format") != FORMAT:
        raise InputError(f"{path} is of the format {content.get('format')!r} and not {FORMAT!r}; name another folder")
    return content


def _whole(file: BinaryIO | FileIO) -> int:
    """Where the last frame ends that is there in full."""
    size, end = file.seek(0, os.SEEK_END), 0
    while True:
        file.seek(end)
        if len(head := file.read(_FRAME.size)) < _FRAME.size:
            return end
        after = end + _FRAME.size + sum(_FRAME.unpack(head))
        if after > size:
            return end
        end = after
