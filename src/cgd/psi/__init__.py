"""Private set intersection without I/O: which elements all members have, and nothing about the others.

Read `protocol.py` first. `curve.py` has the group, `zero_table.py` the tables whose sum shows the intersection.
`cgd.tabular.intersection` runs the protocol over the secure sums of a row.
"""
