"""The ranks of a participant's job over `torch.distributed`: `ProcessGroupRanks` implements `Ranks`.

`cgd.join` uses it if the program runs in several processes, as torchrun starts them. It has a process group of its own
with the gloo backend, on the CPU, beside that of the program. What it sends is not encrypted, like everything that
`torch.distributed` sends: gradients and the seed of the origin cross the network between the machines of a job.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cgd import errors
from cgd.errors import CGDError, InputError, RankError
from cgd.transport.ranks import OneRank, causes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    import torch.distributed

    from cgd.transport.ranks import Ranks, Reply

SIGN_OF_LIFE_SECONDS = 5.0
"""Seconds after which rank 0 tells the others again that it waits for the peers. They handle signals then."""
REPORT_SECONDS = 60.0
"""Seconds for which a rank that failed waits for the others, to tell them why."""
JOIN_SECONDS = 300.0
"""Seconds for which a rank waits for the others to call `cgd.join`."""
HEADER_BYTES = 8192
MAX_MESSAGE_CHARACTERS = 400  # of at most twelve bytes each, as JSON escapes them; a call has at most 255 bytes of text
WAITING = -1


def ranks_of_job(join_seconds: float = JOIN_SECONDS) -> Ranks:
    """Return the ranks of the job that this process belongs to, or `OneRank`; all ranks of a job call it.

    Raises:
        InputError: this process is one of several of a job, and `torch.distributed` is not initialised.
        RankError: not all ranks have called it.
    """
    distributed = sys.modules.get("torch.distributed")  # who has initialised it has imported it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if size.isdecimal() and int(size) > 1 and rank.isdecimal():
            raise InputError(
                f"this process is rank {rank} of a job of {size} (WORLD_SIZE, as torchrun sets it), and would join as "
                "if it were alone; call torch.distributed.init_process_group() on all ranks before cgd.join"
            )
        return OneRank()
    if distributed.get_world_size() == 1:
        return OneRank()
    rank, timeout = distributed.get_rank(), _timeout_of(distributed.group.WORLD)
    try:
        group = distributed.new_group(backend="gloo", timeout=min(timeout, timedelta(seconds=join_seconds)))
        _set_timeout(group, timeout)
    except RuntimeError as error:
        raise RankError(
            None,
            f"rank {rank} of {distributed.get_world_size()} has called cgd.join, and some other rank has not within "
            f"{join_seconds:g} s; call it on all ranks of the job ({_first_line(error)})",
        ) from None
    return ProcessGroupRanks(group, rank, distributed.get_world_size(), distributed.destroy_process_group)


class ProcessGroupRanks:
    """The ranks of a process group; see `Ranks`.

    Args:
        group: a process group with the gloo backend that nothing else uses.
        rank: the number of this process in it.
        size: the number of ranks.
        destroy: called with the group at the end.
        sign_of_life_seconds: how often rank 0 tells the others that it still waits for the peers.
        report_seconds: how long a rank that failed waits for the others, to tell them why.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        rank: int,
        size: int,
        destroy: Callable[[Any], None] = lambda _: None,
        *,
        sign_of_life_seconds: float = SIGN_OF_LIFE_SECONDS,
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        self.rank, self.size = rank, size
        self._group: Any = group
        self._destroy = destroy
        self._sign_of_life_seconds, self._report_seconds = sign_of_life_seconds, report_seconds
        self._known: BaseException | None = None  # the error with which the last exchange ended, on all ranks

    def exchange(self, call: str, **own: Any) -> list[dict[str, Any]]:
        """Return the small values of all ranks; see `Ranks`."""
        found = self._gather({"call": call, **own})
        for rank, each in enumerate(found):
            if "error" in each:
                self._fail(RankError(rank, each["error"]))
        for rank, each in enumerate(found):
            if each["call"] != call:
                self._fail(
                    RankError(
                        rank,
                        f"it is at {each['call']!r} while rank {self.rank} is at {call!r}; all ranks must make the "
                        "same calls in the same order, with the same options and the same model",
                    )
                )
        return found

    def lead(self, call: str, action: Callable[[], Reply], interrupt: Callable[[], None] = lambda: None) -> Reply:
        """Run `action` on rank 0, and return its result on every rank; see `Ranks`."""
        self.exchange(call)
        if self.rank > 0:
            return self._receive()
        waiting = _SignsOfLife(self._send_waiting, interrupt, self._sign_of_life_seconds)
        try:
            with waiting:
                value, content = action()
        except BaseException as error:
            if waiting.lost is not None:
                self._lost(waiting.lost)
            self._known = error
            with suppress(RankError):
                self._send({"error": _describe(error)}, b"")
            raise
        if waiting.lost is not None:
            self._lost(waiting.lost)
        self._send({"value": value}, content)
        return value, content

    def add(self, values: npt.NDArray[Any], factors: Sequence[float] | None = None) -> npt.NDArray[Any]:
        """Return the sum of the arrays of all ranks, each multiplied by its factor; see `Ranks`.

        Each rank adds one part of the arrays, so the traffic of a rank is twice the array, whatever their number.
        """
        import torch

        length = -(-values.size // self.size)
        own = np.zeros((self.size, length), dtype=values.dtype)
        own.reshape(-1)[: values.size] = values.reshape(-1)
        parts, total = np.empty_like(own), np.empty_like(own)
        own_bytes, part_bytes = (torch.from_numpy(each.view(np.uint8).reshape(-1)) for each in (own, parts))
        sizes = [part_bytes.numel() // self.size] * self.size
        self._wait(lambda: self._group.alltoall_base(part_bytes, own_bytes, sizes, sizes))
        wide = np.float64 if values.dtype.kind == "f" else values.dtype
        result = np.zeros(length, dtype=wide)
        for rank, part in enumerate(parts):
            result += part.astype(wide) if factors is None else part.astype(wide) * factors[rank]
        rounded = torch.from_numpy(result.astype(values.dtype).view(np.uint8))
        slices = list(torch.from_numpy(total.view(np.uint8)).unbind())
        self._wait(lambda: self._group.allgather([slices], [rounded]))
        return total.reshape(-1)[: values.size].reshape(values.shape)

    def report(self, error: BaseException) -> None:
        """Let the other ranks end their next call with an error, unless they know of this one; see `Ranks`."""
        if self._known is not None and any(each is self._known for each in causes(error)):
            return
        self._known = error
        text = f"{type(error).__name__}: {error}"
        with suppress(RankError):
            self._gather({"call": "error", "error": text[:MAX_MESSAGE_CHARACTERS]}, self._report_seconds)

    def close(self) -> None:
        """Leave the group; see `Ranks`."""
        group, self._group = self._group, None
        if group is not None:
            self._destroy(group)

    def _fail(self, error: CGDError) -> NoReturn:
        self._known = error
        raise error from None

    def _gather(self, own: dict[str, Any], seconds: float | None = None) -> list[dict[str, Any]]:
        import torch

        padded = torch.frombuffer(bytearray(json.dumps(own).encode().ljust(HEADER_BYTES)), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([found], [padded]), seconds)
        return [json.loads(each.numpy().tobytes()) for each in found]

    def _send(self, message: dict[str, Any], content: bytes) -> None:
        import torch

        header = json.dumps(message).encode()
        self._broadcast(torch.tensor([len(header), len(content)]))
        self._broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        if content:
            self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def _send_waiting(self) -> None:
        import torch

        self._broadcast(torch.tensor([WAITING, 0]))

    def _receive(self) -> Reply:
        import torch

        sizes = torch.tensor([WAITING, 0])
        while sizes[0] == WAITING:
            self._broadcast(sizes)
        header, content = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
        self._broadcast(header)
        if content.numel():
            self._broadcast(content)
        message = json.loads(header.numpy().tobytes())
        if "error" in message:
            self._fail(_rebuild(message["error"]))
        return message["value"], content.numpy().tobytes()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._wait(lambda: self._group.broadcast(tensor, 0))

    def _wait(self, start: Callable[[], Any], seconds: float | None = None) -> None:
        """Make a collective call; a rank that was lost, or is silent for the timeout of the group, is an error."""
        if self._group is None:
            raise RankError(None, "the ranks of this job have closed their connection; join again for further sums")
        try:
            work = start()
            if seconds is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: BaseException) -> NoReturn:
        self._fail(
            RankError(
                None,
                f"rank {self.rank} has lost the connection to another rank of this job, which has ended or does not "
                f"answer; its own output says why. Start the job again ({_first_line(error)})",
            )
        )


class _SignsOfLife:
    """While the block runs, tell the other ranks from time to time that rank 0 still waits.

    Attributes:
        lost: the error by which a rank was found to be lost.
    """

    def __init__(self, send: Callable[[], None], interrupt: Callable[[], None], seconds: float) -> None:
        self.lost: BaseException | None = None
        self._send, self._interrupt, self._seconds = send, interrupt, seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cgd-ranks", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._done.wait(self._seconds):
            try:
                self._send()
            except RankError as error:
                self.lost = error
                self._interrupt()
                return


def _describe(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON can represent it: its class in `cgd.errors`, if there is one."""
    kinds = [each.__name__ for each in type(error).__mro__ if each.__module__ == errors.__name__]
    if not kinds:
        return {"kind": RankError.__name__, "text": f"rank 0: {type(error).__name__}: {error}", "more": {"rank": 0}}
    attributes = {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in vars(error).items()
        if isinstance(value, (str, int, float, tuple, frozenset))
    }
    return {"kind": kinds[0], "text": str(error), "more": attributes}


def _rebuild(described: dict[str, Any]) -> CGDError:
    """Return an error that `_describe` has described on rank 0."""
    kind = getattr(errors, described["kind"])
    error: CGDError = kind.__new__(kind)
    Exception.__init__(error, described["text"])
    for key, value in described["more"].items():
        kinds = {"peers": frozenset, "members": tuple, "index": tuple}
        setattr(error, key, kinds.get(key, lambda each: each)(value))
    return error


def _timeout_of(group: Any) -> timedelta:
    """Return the timeout of the program's process group, which `init_process_group(timeout=)` sets."""
    import torch

    try:
        return group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):  # it has no backend for the CPU
        return torch.distributed.distributed_c10d.default_pg_timeout


def _set_timeout(group: Any, timeout: timedelta) -> None:
    import torch

    group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def _first_line(error: BaseException) -> str:
    text = str(error).removeprefix("[").splitlines()[0] if str(error) else type(error).__name__
    return text.split("] ", 1)[-1].split(". This is typically", 1)[0]
