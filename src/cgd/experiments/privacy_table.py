"""The table `privacy` of a spec: settings of differential privacy, with the names of `PrivacySettings`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from cgd.dp.settings import PrivacySettings
from cgd.errors import InputError

if TYPE_CHECKING:
    from cgd.experiments.spec import RunSpec

PRIVATE_METHODS = ("cgd", "private-centralised")
DP_SGD_STATISTICS_SHARE = 0.02
"""The part of μ² that dp-sgd reserves for the mean of centred records: half of it is used, and the steps have the rest.

This is what a table `privacy` with `statistics_share = 0.02` uses for the mean."""
# A simulated participant is never absent from a sum, so a spec has no quorum.
_NAMES = tuple(each.name for each in fields(PrivacySettings) if each.name != "quorum")
_FLOATS = ("epsilon", "delta", "clip")
MAX_SETTING = 10**9


def parse(value: Any, steps: int) -> PrivacySettings | None:
    """Return the settings in a table of a TOML or JSON file; None if there is no table.

    Args:
        value: the table, or settings, or None.
        steps: steps of the run, which the noise is calibrated for unless the table has its own number.

    Raises:
        InputError: a name is unknown or missing, or a value is invalid.
    """
    if value is None or isinstance(value, PrivacySettings):
        return value
    if not isinstance(value, dict):
        raise InputError(f"privacy is {value!r}; it must be a table: privacy = {{ epsilon = 2.0, delta = 1e-5 }}")
    for name in value:
        if name not in _NAMES:
            raise InputError(f"privacy: there is no setting {name!r}; choose one of {', '.join(_NAMES)}")
    for name in ("epsilon", "delta"):
        if name not in value:
            raise InputError(f"privacy: {name} is missing; set epsilon and delta")
    settings: dict[str, Any] = {"steps": steps, **value}
    for name, setting in settings.items():
        if isinstance(setting, bool) or not isinstance(setting, (int, float)):
            raise InputError(f"privacy: {name} is {setting!r}; it must be a number")
        if not abs(setting) <= MAX_SETTING:
            raise InputError(f"privacy: {name} is beyond {MAX_SETTING} or not a number; choose a smaller one")
        if name in _FLOATS:  # whole numbers become floats, so that equal runs have equal names
            settings[name] = float(setting)
    try:
        return PrivacySettings(**settings)
    except InputError as error:
        raise InputError(f"privacy: {error}") from None


def as_json(settings: PrivacySettings) -> dict[str, Any]:
    """Return settings as the table that `parse` reads.

    Examples:
        >>> parse(as_json(PrivacySettings(2.0, 1e-5, 100)), 100) == PrivacySettings(2.0, 1e-5, 100)
        True
    """
    return {name: getattr(settings, name) for name in _NAMES}


def check(spec: RunSpec) -> None:
    """Check that a run can be private, if it is to be.

    Raises:
        InputError: the method has no privacy or needs it, or the grid or the steps do not fit.
    """
    privacy = spec.privacy
    if privacy is None:
        of_statistics(spec)
        if spec.method == "private-centralised":
            raise InputError("the method private-centralised needs a table privacy with epsilon and delta")
        return
    if spec.method not in PRIVATE_METHODS:
        raise InputError(
            f"there is a table privacy and the method is {spec.method}; only {' and '.join(PRIVATE_METHODS)} use it"
        )
    if spec.method == "cgd":
        privacy.check_members(spec.rows)
        if spec.columns > 1:
            raise InputError(f"there is a table privacy and columns is {spec.columns}; private runs have one column")
    if (spec.normalise == "centred") != (privacy.statistics_share > 0):
        raise InputError(
            f"normalise is {spec.normalise!r} and statistics_share of privacy is {privacy.statistics_share:g}; the "
            'mean of private records, and nothing else, needs a share: set normalise = "centred" and a share of 0.02'
        )
    if spec.steps > privacy.steps:
        raise InputError(
            f"steps is {spec.steps}, and the noise of privacy is for {privacy.steps}; leave steps out of privacy"
        )


def of_statistics(spec: RunSpec) -> PrivacySettings | None:
    """Return the settings by which the mean of centred records is opened; None if it is not private.

    Raises:
        InputError: no noise is enough for the values of dp-sgd.
    """
    if spec.method != "dp-sgd" or spec.normalise != "centred":
        return spec.privacy
    return PrivacySettings(spec.epsilon, spec.dp_delta, spec.steps, statistics_share=DP_SGD_STATISTICS_SHARE)


def with_defaults(run: dict[str, Any], common: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a [[run]] with the settings of the table [privacy] of the file, if its method uses them."""
    own = run.get("privacy", {})
    method = run.get("method", common.get("method", "cgd"))
    if not defaults or method not in PRIVATE_METHODS or not isinstance(own, dict):
        return run
    return {**run, "privacy": {**defaults, **own}}
