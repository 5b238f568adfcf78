"""Record a trace of a run: everything a participant receives and holds, in a folder.

A trace is for privacy attacks on a real run (`cgd.audit.trace_reader` reads it, `cgd audit` attacks). **It is as secret
as the records:** it contains them, and the participant's origin and gradients. Only its owner can read it (folder 0700,
files 0600), and nothing of it is ever sent.

    recording.json                    participant, federation and training settings, encoding of the records
    data.safetensors                  our encoded training and validation records, rows of the former in our table; our
                                      origin
    steps/000007.own.safetensors      our addend to the sum of step 7: our gradient of all our records or of a batch, or
                                      our update by local steps, written before anything is sent; with differential
                                      privacy our gradient with its noise, written when the sum is open
    steps/000007.total.safetensors    the opened sum
    steps/000007.state.safetensors    the displacement after 7 steps, as the members sent it after a restart
    frames                            every received frame with its sender, if it is well-formed

A participant that was killed continues the trace when it is restarted with the same command. All of its addends are
there, because they are written first. The total of its last step may be missing, if the others opened the sum and it
was killed before it received the total; the state that the members send after the restart replaces it. With
differential privacy, our addend of that step is missing, too: its noise existed in the killed process only. The other
sums, of statistics and validation losses, are not recorded: their results are in the model and its report.

The frames of a sender are recorded up to a size that grows with the sums, so that nobody can fill the disk of another
participant. An honest sender stays far below it; the log names one that exceeds it, and the training continues.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import struct
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import safetensors.numpy
import torch

import cgd
from cgd.errors import InputError
from cgd.files import check_writable, write_private
from cgd.json_files import parse_json
from cgd.optim.displacement import PRIVATE_STATES
from cgd.optim.flat_vectors import join

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from io import FileIO
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt

    from cgd.dp.settings import PrivacySettings
    from cgd.federation.config import Training
    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.peers import Peers
    from cgd.secagg.messages import Buffer, PeerId
    from cgd.tabular.preprocessing import Preprocessing
    from cgd.tabular.settings import TabularSettings
    from cgd.tabular.training import EncodedDataset, TrainingResult
    from cgd.transport.tap import Addend

log = logging.getLogger("cgd.tabular")

# Names in the files, such as "kept_x" (validation records) and "told" (metadata of an addend), are part of this format.
FORMAT = "cgd-recording-1"
FILE, DATA, STEPS, FRAMES = "recording.json", "data.safetensors", "steps", "frames"
# The bytes of frames that are recorded of each sender: at first, for journals and settings, and more for each value of
# our addends. In a sum, a sender sends at most two ring elements of 8 bytes for each.
FIRST_FRAME_BYTES = 1 << 28
FRAME_BYTES_PER_VALUE = 64
_FRAME = struct.Struct("<HQ")  # lengths of the sender's name and of the frame, which follow


class TraceWriter:
    """Write a trace into a folder. `train` calls it; the transport passes received frames to `frame`.

    Args:
        folder: the folder, which is created; or an interrupted trace of the same participant, to continue.
        participant: our name.
        federation: the federation's name.

    Raises:
        InputError: the folder holds something else, or cannot be used.
    """

    def __init__(self, folder: Path, participant: str, federation: str) -> None:
        self.folder = folder
        self._content = check_trace_folder(folder, participant, federation)
        self._frame_bytes: Counter[PeerId] = Counter()
        self._max_frame_bytes = FIRST_FRAME_BYTES
        self._excessive: set[PeerId] = set()
        self._parameters = 0
        try:
            self._frames = self._open()
        except OSError as error:
            raise _unusable(folder, error) from None

    def _open(self) -> FileIO:
        folder = self.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / FILE).exists():
            write_private(folder / FILE, json.dumps(self._content).encode())
        (folder / STEPS).mkdir(mode=0o700, exist_ok=True)
        for each in (folder, folder / STEPS):
            each.chmod(0o700)  # it may exist; and a copy from a backup may have lost its modes
        frames = os.open(folder / FRAMES, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        file = os.fdopen(frames, "r+b", buffering=0)
        os.fchmod(frames, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise InputError(f"{folder} is being written by another process; stop it, or name another folder") from None
        file.truncate(_complete_length(file))
        return file

    # Called by the training, in this order.

    def begin(
        self,
        peers: Peers,
        settings: TabularSettings,
        preprocessing: Preprocessing,
        network: torch.nn.Module,
        delta: float,
        training: EncodedDataset,
        validation: EncodedDataset,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Write encoded records, origin and settings, before the first step; `rows` are those of the training records.

        Raises:
            InputError: such a run cannot be recorded; or the folder has a trace with other records or settings.
        """
        check_recordable(settings)
        _check_parameters(network)
        balanced = settings.data.class_weights == "balanced"
        origin = torch.cat([each.detach().reshape(-1) for each in network.parameters()])
        content = {
            "version": cgd.__version__,
            "members": list(peers.members),
            "model": settings.model.as_stored(),
            "features": len(preprocessing.features),
            "outputs": preprocessing.outputs,
            "task": settings.data.task,
            "class_weights": preprocessing.class_weights().tolist() if balanced else None,
            "training": settings.training.as_stored(),
            "bound": peers.settings.bound,
            "ring_bits": peers.settings.ring_bits,
            "delta": delta,
            "samples": len(training),
            "preparation": preprocessing.to_dict(),
            **({} if settings.privacy is None else {"privacy": _stored(settings.privacy_settings())}),
        }
        self._parameters = len(origin)
        content = json.loads(json.dumps(content))  # as it is when read from the file
        data = safetensors.numpy.save(
            {
                "x": training.x.numpy(),
                "y": training.y.numpy(),
                "kept_x": validation.x.numpy(),
                "kept_y": validation.y.numpy(),
                "origin": origin.numpy(),
                **({} if rows is None else {"rows": rows}),
            }
        )
        before = {key: self._content[key] for key in content if key in self._content}
        same = all(before[key] == content[key] for key in before if key not in ("members", "version"))
        if before and not (same and (self.folder / DATA).exists() and (self.folder / DATA).read_bytes() == data):
            raise InputError(
                f"{self.folder} holds a trace of other records, or of another training; name another folder "
                "(--record), or move it away"
            )
        if not before:
            write_private(self.folder / DATA, data)
            self._save(content)
        peers.observer = self

    def resume(self, optimizer: ConfinedOptimizer) -> None:
        """Write the displacement and optimiser state that the members sent after a restart."""
        if not (taken := optimizer.sums_taken()):
            return
        parts: dict[str, list[torch.Tensor]] = {}
        powers = np.zeros(0)
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor) and key not in PRIVATE_STATES:
                    parts.setdefault(key, []).append(value.detach().reshape(-1))
                elif key == "powers":
                    powers = np.array(value, dtype=np.float64)
        state = {key: join(each).numpy() for key, each in parts.items()}
        if len(powers):
            state["powers"] = powers
        write_private(self._step(taken, "state"), safetensors.numpy.save(state))

    def before_sum(self, addend: Addend) -> None:
        """Write our addend to a gradient sum, before anything is sent; see `Observer`."""
        self._max_frame_bytes += FRAME_BYTES_PER_VALUE * addend.values.size
        if addend.step is not None and addend.weight is not None:
            self._save_addend(addend.step.number, addend, addend.values, {"weight": addend.weight})

    def after_sum(self, addend: Addend, total: npt.NDArray[Any]) -> None:
        """Write the opened sum.

        Raises:
            InputError: it cannot be written; or the folder has another total of this step, of another run.
        """
        if addend.step is None or (addend.weight is None and not self._is_private_step(addend)):
            return
        if addend.noise is not None:
            total = total.astype(np.float32)  # as the parameters, which are moved by it
            if addend.entered is not None:
                records = {"records": round(addend.noise.denominator)}
                self._save_addend(addend.step.number, addend, addend.entered.astype(np.float32), records)
        path, content = self._step(addend.step.number, "total"), safetensors.numpy.save({"total": total})
        if not path.exists():
            write_private(path, content)
        elif path.read_bytes() != content:
            raise InputError(
                f"{self.folder} has another total of step {addend.step.number}: it holds another run; name another "
                "folder (--record), or move it away"
            )

    def _is_private_step(self, addend: Addend) -> bool:
        """Return whether a sum with noise is that of the gradients, and not of the number of records."""
        return addend.noise is not None and addend.values.size == self._parameters

    def _save_addend(self, step: int, addend: Addend, values: npt.NDArray[Any], weight: Mapping[str, float]) -> None:
        metadata = {**weight, "members": list(addend.members), "epoch": addend.epoch}
        content = safetensors.numpy.save({"own": np.ascontiguousarray(values)}, {"told": json.dumps(metadata)})
        write_private(self._step(step, "own"), content)

    def frame(self, sender: PeerId, frame: Buffer) -> None:
        """Write a received frame, before the protocol processes it, unless its sender has sent far too much.

        Raises:
            InputError: it cannot be written.
        """
        name = sender.encode()
        pieces = [_FRAME.pack(len(name), len(frame)) + name, frame]
        recorded = self._frame_bytes[sender] + sum(map(len, pieces))
        if recorded > self._max_frame_bytes:
            self._warn_about_excess(sender)
            return
        self._frame_bytes[sender] = recorded
        try:
            written = os.writev(self._frames.fileno(), pieces)
            if written < sum(map(len, pieces)):  # a full disk; writing the rest would fail
                raise OSError(28, "No space left on device")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is closed"
            raise InputError(
                f"the trace in {self.folder} cannot be written ({reason}); check the free disk space; the same command "
                "continues from here"
            ) from None

    def _warn_about_excess(self, sender: PeerId) -> None:
        if sender not in self._excessive:
            self._excessive.add(sender)
            log.warning(
                "%s has sent %d MB, far more than the sums need; not all of its frames are recorded",
                sender, self._frame_bytes[sender] // 1_000_000, extra={"event": "not recorded", "peer": sender},
            )  # fmt: skip

    def finish(self, trained: TrainingResult) -> None:
        """Write the outcome of the training."""
        outcome = {"steps": trained.steps, "best_step": trained.best_step, "everyone_samples": trained.everyone_samples}
        self._save(outcome)

    def close(self) -> None:
        """Close the file of frames; further calls do nothing."""
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
    """Yield every frame of a trace with its sender, except a frame truncated by a kill.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            end = _complete_length(file)
            file.seek(0)
            while file.tell() < end:
                name, size = _FRAME.unpack(file.read(_FRAME.size))
                yield file.read(name).decode(), file.read(size)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "a sender's name is not UTF-8"
        raise InputError(f"{path} cannot be read ({reason}); restore it from your copy, or record again") from None


def _stored(privacy: PrivacySettings) -> dict[str, Any]:
    """Return the settings without a quorum that there is not, as before there was any."""
    return {name: value for name, value in asdict(privacy).items() if (name, value) != ("quorum", None)}


def bytes_per_parameter(training: Training, members: int) -> float:
    """Estimate the bytes that a step adds to a trace for each parameter: our addend, the total, and the frames."""
    word = training.ring_bits / 8
    received = 2 * (members - 1) / members * word if training.opening == "mesh" else word
    return 8 + received + (word * (members - 1) if training.masking == "uniform" else 0)


def _check_parameters(network: torch.nn.Module) -> None:
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad or parameter.dtype != torch.float32:
            fact = f"of type {parameter.dtype}" if parameter.requires_grad else "frozen"
            raise InputError(
                f"the parameter {name} is {fact}, and only networks whose parameters are all trained, in float32, can "
                "be recorded; join without --record"
            )


def check_recordable(settings: TabularSettings) -> None:
    """Raise InputError for a run of which no trace can be recorded.

    Raises:
        InputError: the table is partitioned by columns, or origins change.
    """
    if settings.vertical:
        raise InputError(
            f"the table is partitioned into {settings.columns} grid columns, and traces of row and column sums are not "
            "supported yet; join without --record"
        )
    if settings.model.fresh_origins:
        raise InputError(
            "[model] has fresh_origins, and traces of origins that change are not supported yet; join without --record"
        )


def check_trace_folder(folder: Path, participant: str, federation: str) -> dict[str, Any]:
    """Check that a folder can be used for a trace, without changing anything; return its header, or that of a new one.

    Raises:
        InputError: it holds something else, or cannot be used.
    """
    owner = {"format": FORMAT, "participant": participant, "federation": federation}
    try:
        check_writable(folder)
        if not (folder / FILE).exists():
            if folder.exists() and any(folder.iterdir()):
                raise InputError(f"{folder} holds files that are not a trace; name an empty folder, or a new one")
            return owner
    except OSError as error:
        raise _unusable(folder, error) from None
    header = read_header(folder / FILE)
    if {key: header.get(key) for key in owner} != owner:
        raise InputError(
            f"{folder} holds the trace of {header.get('participant')} of {header.get('federation')}, which is never "
            "overwritten; name another folder (--record), or move it away"
        )
    return header


def _unusable(folder: Path, error: OSError) -> InputError:
    return InputError(f"{folder} cannot be used ({error.strerror}); name another folder for the trace (--record)")


def read_header(path: Path) -> dict[str, Any]:
    """Return the content of `recording.json`.

    Raises:
        InputError: it is damaged, or of another format.
    """
    content = None
    with suppress(InputError, OSError):
        content = parse_json(path.read_bytes())
    if not isinstance(content, dict):
        raise InputError(f"{path} is damaged; restore it from your copy, or record into another folder")
    if content.get("format") != FORMAT:
        raise InputError(f"{path} is of the format {content.get('format')!r} and not {FORMAT!r}; name another folder")
    return content


def _complete_length(file: BinaryIO | FileIO) -> int:
    """Return the end of the last complete frame."""
    size, end = file.seek(0, os.SEEK_END), 0
    while True:
        file.seek(end)
        if len(head := file.read(_FRAME.size)) < _FRAME.size:
            return end
        after = end + _FRAME.size + sum(_FRAME.unpack(head))
        if after > size:
            return end
        end = after
