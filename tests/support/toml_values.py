"""Values of any type that a TOML file can contain, as a strategy of hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(), st.sampled_from([10**400, "", "cgd", "quick", "a b"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["loss", "rows", "lr"]), inner),
    max_leaves=4,
)
