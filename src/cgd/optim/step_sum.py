"""The sum of one step: what a member enters, the count of the samples before it, and the opened total after it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from cgd.errors import InputError, LocalProtocolError, PeerLeftError, SettingsError
from cgd.optim import program_checks, sample_count
from cgd.optim.clipping import clip_to_norm
from cgd.optim.displacement import step_context, trainable
from cgd.optim.flat_vectors import common_states_on_cpu, split_sum
from cgd.optim.fresh_origins import describe
from cgd.optim.origin import warn_if_unconfined
from cgd.optim.sample_count import abort_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from cgd.optim.displacement import StepContext
    from cgd.optim.optimizer import ConfinedOptimizer
    from cgd.optim.privacy import Privacy
    from cgd.optim.rank_gradients import RankGradients
    from cgd.optim.recovery import OptimizerRecovery
    from cgd.optim.step_input import StepInput
    from cgd.optim.weighted_sum import WeightedSums
    from cgd.peers import Peers
    from cgd.secagg.journal_entry import Step


@dataclass(eq=False)
class StepSum:
    """The sum of a step with one set of peers.

    Attributes:
        step: the identifier of the step.
        groups: the parameter groups, with their options and the count of the samples.
        parameters: the parameters whose gradients are summed.
        context: what members compare, without the number of all samples.
        vector: returns what this member enters: its gradients, or its updates.
        samples: the number of this member's samples, on this rank.
        records_digest: a digest of them, or nothing.
        privacy: differential privacy, if wanted.
        max_norm: the largest norm of the opened sum.
        step_input: what the vectors are.
        replay: whether the sum must come from the journal.
        one_model: whether the gradients of earlier sums may be those of the same model, as with a delay.
    """

    step: Step
    groups: list[dict[str, Any]]
    parameters: list[torch.Tensor]
    context: StepContext
    vector: Callable[[], torch.Tensor]
    samples: int
    records_digest: bytes
    privacy: Privacy | None
    max_norm: float | None
    step_input: StepInput
    replay: bool = False
    one_model: bool = False


class StepSums:
    """Opens the sums of an optimiser's steps.

    Args:
        optimizer: the optimiser, or a proxy: it is used only in its own methods.
        recovery: its identifiers of steps.
        weighted_sums: opens the sums without noise.
        ranks: adds up what the ranks of this participant's job have.
        kind: the kind of the optimiser.
        options: the names of the options that members always compare.
    """

    def __init__(
        self,
        optimizer: ConfinedOptimizer,
        recovery: OptimizerRecovery,
        weighted_sums: WeightedSums,
        ranks: RankGradients,
        kind: str,
        options: Sequence[str],
    ) -> None:
        self._optimizer, self._recovery, self._weighted_sums = optimizer, recovery, weighted_sums
        self._ranks, self._kind, self._options = ranks, kind, options
        self._latest: dict[Peers, tuple[bytes, int]] = {}  # the model of the latest sum, and its epoch

    def request(self, peers: Peers, groups: list[dict[str, Any]], number: int) -> StepSum:
        """Return the sum of a step's gradients of these groups."""
        optimizer, parameters = self._optimizer, trainable(*groups)
        step = self._recovery.step_id(peers, number)
        return StepSum(
            step,
            groups,
            parameters,
            self._context(groups),
            partial(self._vector, peers, parameters, step.slot),
            optimizer.samples,
            optimizer.records_digest,
            optimizer.privacy,
            optimizer.max_norm,
            optimizer.step_input,
        )

    def _context(self, groups: list[dict[str, Any]]) -> StepContext:
        optimizer, kind = self._optimizer, self._kind + describe(trainable(*groups))
        if optimizer.privacy is not None:
            kind += f" for {optimizer.privacy.settings.describe()},"
        kind += optimizer.step_input.describe() + (f" clipped to {optimizer.max_norm}" if optimizer.max_norm else "")
        kind += f" delayed by {optimizer.delay}" if optimizer.delay else ""
        defaults = optimizer.LATER_OPTIONS.items()
        later = [key for key, default in defaults if any(group[key] != default for group in groups)]
        states = common_states_on_cpu(trainable(*groups), optimizer.state)
        return step_context(kind, [*self._options, *later], groups, states)

    def _vector(self, peers: Peers, parameters: list[torch.Tensor], slot: int) -> torch.Tensor:
        """Return what this member enters in the sum of a step."""
        optimizer = self._optimizer
        if optimizer.step_input.local_steps is None:  # which has warned
            warn_if_unconfined([each for each in parameters if each not in optimizer.state], stacklevel=8)
        if optimizer.privacy is None:
            own, what = optimizer.step_input.vector(parameters, optimizer), optimizer.step_input.what
            return self._ranks.mean(peers, own, optimizer.samples, parameters, what)
        program_checks.reject_scaling(optimizer)
        optimizer.privacy.begin(peers, slot)
        return optimizer.privacy.gradient(parameters, optimizer.samples)

    def open(self, peers: Peers, requested: StepSum) -> tuple[dict[torch.Tensor, torch.Tensor], bool]:
        """Return the weighted sum of all members' vectors, by parameter, and whether it came from the journal."""
        groups, step, privacy = requested.groups, requested.step, requested.privacy
        epoch, addends = peers.next_round()
        with abort_on_error([peers]):
            samples, digest = self._ranks.all_samples(peers, requested.samples, requested.records_digest)
            revealed = peers.recovery.may_be_revealed(step) and not peers.recovery.is_replay()  # of a newer count
            was_counted = peers.recovery.took_part()
            # A count of an earlier epoch is replayed; the present epoch counts again.
            took_part = was_counted and epoch == peers.epoch
            check = partial(sample_count.check, peers, samples, groups, epoch, digest, exact=privacy is None)
            check(revealed=revealed, took_part=took_part)
            self._check_model(peers, requested, epoch)
            vector = requested.vector()
        if groups[0]["total_samples"] is None:
            count = partial(sample_count.count_for_groups, was_counted=was_counted, took_part=took_part)
            count(peers, groups, samples, step, epoch, addends, digest, privacy)
            self._weighted_sums.forget_weight(peers)
            with abort_on_error([peers]):  # a replayed count may be that of an earlier process
                check(took_part=took_part)
        total_samples = groups[0]["total_samples"]
        context, replayed = requested.context.complete(total_samples), peers.recovery.is_replay()
        try:
            if privacy is not None:
                total = privacy.open_gradients(peers, vector, total_samples, context, step, epoch, addends)
            else:
                weight = samples / total_samples if took_part else 1 / addends  # the latter is not sent
                own = requested.parameters, vector, samples, weight, context, step, epoch, requested.step_input
                total = self._weighted_sums.open(peers, groups, *own)
        except (SettingsError, PeerLeftError) as error:
            raise program_checks.explain(error) from None
        self._latest[peers] = requested.context.digests["state"], epoch
        return split_sum(clip_to_norm(total, requested.max_norm), requested.parameters), replayed

    def _check_model(self, peers: Peers, requested: StepSum, epoch: int) -> None:
        """Check, with a delay, that no sum is opened of gradients that an earlier epoch may have summed.

        The first steps with a delay, and those after `drain`, compute their gradients at one model. With other members
        the difference of two such sums would be that of the members' gradients, exactly if batches are whole.

        Raises:
            InputError: the members have lost the sum of a step before the stored state.
            LocalProtocolError: an earlier epoch has summed gradients of this model.
        """
        if requested.replay and not peers.recovery.is_replay():
            raise InputError(
                f"the members' stored state is that after step {requested.step.number}, and they have lost the sum of "
                "that step; restore a state folder of one of them, or start a new training"
            )
        if not requested.one_model or requested.privacy is not None:  # with noise, every opening is charged
            return
        model, before = self._latest.get(peers, (b"", epoch))
        if model == requested.context.digests["state"] and before != epoch:
            raise LocalProtocolError(
                f"step {requested.step.number} has the gradients of the model of the step before, because of the "
                f"delay, and that one was summed in epoch {before}; it is epoch {epoch} now. If the members have "
                "changed, the difference of the two sums would disclose a member's gradient. Change members in the "
                "middle of a training, or train anew under another federation name"
            )
