"""Choose the model that `cgd schema` suggests, from the number of records in one participant's table.

The sum of a ReLU unit contains only the records that activate it, so a single participant that only watches reads
records of the others from a first layer of ReLU units (`cgd.optim.privacy_warnings`). By the same attack it read none
from units whose derivative is nowhere zero, and small tables are learned as well with a few of them.
`benchmarks/suggested_models.py` measures both. No activation protects a record that has a feature alone: such features
are merged (`cgd.tabular.few_records`). What a participant that steers the models can read, no model prevents: only
noise does (`[privacy]`).

A participant knows the number of its own records only. No choice here rests on it for privacy: the models differ in
accuracy, and each of them was attacked at all sizes.
"""

from __future__ import annotations

from cgd.federation.model_section import Model

MIN_RECORDS_FOR_GELU = 300
"""Where the participant with the most records has so many, GELU units were better than tanh units; with fewer, tanh."""

FOR_SMALL_TABLES = Model("mlp", (8,), "tanh")
FOR_TABLES = Model("mlp", (16,), "gelu")
FOR_REGRESSION = Model("mlp", (16,), "sigmoid")
"""A linear model was hardly better, and would disclose covariances (the privacy warning "second moments")."""
FOR_PRIVACY = Model("mlp", (32,), "relu")
"""With noise, nothing is read from ReLU units either; the costs of noise were measured with this one."""


def choose_model(records: int, *, regression: bool = False, private: bool = False) -> Model:
    """Return the model to suggest for a table.

    Args:
        records: the number of records in the table. It is not used with noise: the suggestion is sent to others.
        regression: True if the target is a number.
        private: True if the sums have noise.

    Examples:
        >>> choose_model(230).activation, choose_model(5000).activation
        ('tanh', 'gelu')
    """
    if private:
        return FOR_PRIVACY
    if regression:
        return FOR_REGRESSION
    return FOR_SMALL_TABLES if records < MIN_RECORDS_FOR_GELU else FOR_TABLES


def model_lines(model: Model) -> list[str]:
    """Return the section `[model]` of a suggestion."""
    why = "" if model == FOR_PRIVACY else '  # not "relu": a participant that watches reads records from its sums'
    return [
        "[model]",
        'kind = "mlp"       # or "logistic" ("linear" in a regression): no hidden layer',
        f"layers = {list(model.layers)}",
        f'activation = "{model.activation}"{why}',
    ]
